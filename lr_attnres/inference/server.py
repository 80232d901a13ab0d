"""Serve a model with an OpenAI-compatible API."""

import math
import socket
import sys

from transformers import ContinuousBatchingConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerationMode
from transformers.utils import logging
from transformers.utils.import_utils import is_serve_available
from transformers.utils.versions import require_version

from ..data.tokenizers import load_tokenizer
from ..errors import LRAttnResError
from ..folders.loading import load_config, load_language_model


PAGE = 256  # tokens per block of the cache
CURL = (
    """curl {url}/completions -H "Content-Type: application/json" -d '{{"prompt": "The sea is", "max_tokens": 32}}'"""
)


def serve(
    model: str,
    *,
    host: str = "localhost",
    port: int = 8000,
    device: str = "auto",
    dtype: str = "auto",
    depth_backend: str = "torch",
    max_new_tokens: int = 1024,
    concurrent_requests: int = 4,
    cb_num_blocks: int | None = None,
    cb_max_batch_tokens: int = 512,
) -> None:
    """Serve a model (folder or Hub repository) until interrupted.

    `max_new_tokens` is the length of an answer for a request that names none. Requests are answered in one batch. Its
    cache holds `concurrent_requests` of the full context, and more that are shorter; `cb_num_blocks` gives its size in
    blocks of 256 tokens instead. A step computes `cb_max_batch_tokens` at most.
    """
    if not is_serve_available():
        command = 'pip install "lr-attnres[serve]", or in a clone pip install ".[serve]"'
        raise ImportError(f"serving needs fastapi, uvicorn and openai: {command}")
    require_version("transformers>=5.20", "`lr-attnres serve` needs its server: pip install --upgrade transformers")
    sizes = {"concurrent_requests": concurrent_requests, "cb_num_blocks": cb_num_blocks}
    sizes |= {"cb_max_batch_tokens": cb_max_batch_tokens, "max_new_tokens": max_new_tokens}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise LRAttnResError(f"`{name}` is {value}; it must be at least 1.")
    check_address(host, port)
    config = load_config(model)
    tokenizer = load_tokenizer(model, config.vocab_size)
    loaded = load_language_model(model, device, dtype, depth_backend=depth_backend)
    if host not in ("localhost", "127.0.0.1", "::1"):
        say(f"Warning: the server has no password. Anyone who reaches {host}:{port} can use it.")
    if loaded.generation_config.eos_token_id is None:
        say("Note: this model has no end-of-text token, so every answer is as long as its request allows.")
    check_generation(loaded)
    batching = batch_settings(config.max_position_embeddings, concurrent_requests, cb_num_blocks, cb_max_batch_tokens)
    context = min(config.max_position_embeddings, PAGE * (batching.num_blocks or 0))
    run_server(model, loaded, tokenizer, host, port, context, max_new_tokens, batching)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def check_generation(model: PreTrainedModel) -> None:
    """Raise for a generation config that needs more than one row per sequence in a batch."""
    mode, guidance = model.generation_config.get_generation_mode(), model.generation_config.guidance_scale
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) or guidance not in (None, 1):
        asked = f"{mode.value.replace('_', ' ')} with `guidance_scale` {guidance}"
        raise LRAttnResError(
            f"generation_config.json asks for {asked}; the server is greedy or samples, without guidance: change it."
        )


def batch_settings(
    context: int, concurrent_requests: int, num_blocks: int | None, max_batch_tokens: int
) -> ContinuousBatchingConfig:
    num_blocks = num_blocks or concurrent_requests * math.ceil(context / PAGE)
    return ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=min(num_blocks, max_batch_tokens, 64),  # bounds the memory of the logits
        auto_switch_to_flash=False,  # it may download kernels
        use_cuda_graph=False,  # each row of a batch is processed in Python, as its request asks
    )


def run_server(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    host: str,
    port: int,
    context: int,
    max_new_tokens: int,
    batching: ContinuousBatchingConfig,
) -> None:
    """Serve a loaded model under this name."""
    import uvicorn

    from .bounded import make_app

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            address = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
            url = f"http://{address}:{port}/v1"
            print(f"Serving {name} at {url} (context {context:,} tokens; Ctrl-C stops it). Try it:", flush=True)
            print(CURL.format(url=url), flush=True)

    logging.get_logger("transformers.cli.serving").setLevel(logging.ERROR)  # it warns of every request
    app, state = make_app(name, model, tokenizer, context, max_new_tokens, batching)
    try:
        # More than 512 connections get 503. Streams have a second to end when the server stops.
        Server(uvicorn.Config(app, host, port, limit_concurrency=512, timeout_graceful_shutdown=1)).run()
    finally:
        state.shutdown()


def check_address(host: str, port: int | None) -> None:
    """Raise unless a server can listen on this host and port. None means any free port."""
    if port is not None and not 1 <= port < 2**16:
        raise ValueError(f"`port` is {port}; it must lie in 1..{2**16 - 1}.")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port or 0), family=family).close()
    except OSError as error:
        address = f"`host` {host}" if port is None else f"`host` {host}, `port` {port}"
        raise ValueError(f"cannot listen on {address} ({error.strerror}): choose another.") from error
