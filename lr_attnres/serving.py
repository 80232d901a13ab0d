"""Transformers' own OpenAI-compatible server, for our models."""

import socket
import sys

import transformers
from safetensors import SafetensorError
from transformers.utils.import_utils import is_serve_available

from . import modeling_lr_attnres
from .loading import load_config, load_tokenizer, usable_device


def serve(
    model: str,
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
        command = 'pip install "lr-attnres[serve]", or in a clone pip install ".[serve]"'
        raise ImportError(f"serving needs fastapi, uvicorn and openai: {command}")
    from transformers.cli.serve import Serve

    for name, value in {"cb_num_blocks": cb_num_blocks, "cb_max_batch_tokens": cb_max_batch_tokens}.items():
        if value is not None and value < 1:
            raise ValueError(f"`{name}` is {value}; it must be at least 1.")
        if value is not None and not continuous_batching:
            raise ValueError(f"`{name}` is {value}; it is for `continuous_batching`: turn that on.")
    check_address(host, port)
    usable_device(device)
    load_tokenizer(model, load_config(model))
    if host not in ("localhost", "127.0.0.1", "::1"):
        print(
            f"Warning: whoever reaches {host}:{port} can use this server without a password, and have it load another "
            "model (/load_model): put something in front of it.",
            file=sys.stderr,
        )

    # The server looks architectures up by name in `transformers`.
    for name in modeling_lr_attnres.__all__:
        setattr(transformers, name, getattr(modeling_lr_attnres, name))
    try:
        Serve(
            force_model=model,
            host=host,
            port=port,
            device=device,
            dtype=dtype,
            continuous_batching=continuous_batching,
            cb_num_blocks=cb_num_blocks,
            cb_max_batch_tokens=cb_max_batch_tokens,
        )
    except SafetensorError as error:
        raise ValueError(f"the weights of {model} cannot be loaded: {error}") from error


def check_address(host: str, port: int | None) -> None:
    """Raise where nothing can listen; without a port, at any port."""
    if port is not None and not 1 <= port < 2**16:
        raise ValueError(f"`port` is {port}; it must lie in 1..{2**16 - 1}.")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port or 0), family=family).close()
    except OSError as error:
        place = f"`host` {host}" if port is None else f"`host` {host}, `port` {port}"
        raise ValueError(f"{place} cannot be listened to ({error.strerror}): choose another.") from error
