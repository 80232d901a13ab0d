"""Transformers' own OpenAI-compatible server, for our models."""

import transformers
from transformers.utils.import_utils import is_serve_available

from . import modeling_lr_attnres


def serve(
    source: str,
    *,
    host: str = "localhost",
    port: int = 8000,
    device: str = "auto",
    dtype: str = "auto",
    continuous_batching: bool = False,
    cb_num_blocks: int | None = None,
    cb_max_batch_tokens: int | None = None,
) -> None:
    """Serve the model of a folder or Hub repository until interrupted.

    Continuous batching answers many requests together; its cache takes most of the memory unless `cb_num_blocks` and
    `cb_max_batch_tokens` bound it.
    """
    if not is_serve_available():
        raise ImportError("serving needs fastapi, uvicorn and openai: pip install 'lr-attnres[serve]'")
    from transformers.cli.serve import Serve

    # The server looks architectures up by name in `transformers`.
    for name in modeling_lr_attnres.__all__:
        setattr(transformers, name, getattr(modeling_lr_attnres, name))
    Serve(
        force_model=source,
        host=host,
        port=port,
        device=device,
        dtype=dtype,
        continuous_batching=continuous_batching,
        cb_num_blocks=cb_num_blocks,
        cb_max_batch_tokens=cb_max_batch_tokens,
    )
