"""Generate text with a saved model and print it token by token."""

import sys
from typing import Any

import torch
from transformers import LogitsProcessorList, TextStreamer, set_seed

from ..data.tokenizers import load_tokenizer
from ..errors import LRAttnResError
from ..folders.adapter import load_routing_adapter
from ..folders.loading import load_causal_lm, read_config


def generate_text(
    model: str,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    depth_backend: str = "torch",
    revision: str | None = None,
    token: str | None = None,
    adapter: str | None = None,
) -> str:
    """Continue `prompt` with a model (folder or Hub repository), print the text as it is generated, and return it.

    The model is an LR-AttnRes one, with or without a routing adapter, or an ordinary causal model of Transformers.
    Prompt and new tokens together have at most the length of the model's context. Temperature 0 is greedy. Any other
    temperature samples; a `seed` makes this repeatable.
    """
    _check_options(prompt, max_new_tokens, temperature, top_p, seed)
    config = read_config(model, revision, token)
    context = getattr(config, "max_position_embeddings", None) or sys.maxsize  # some models have no limit
    tokenizer = load_tokenizer(model, config.vocab_size, revision, token)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False, verbose=False)
    max_new_tokens = _fit(inputs["input_ids"].shape[1], max_new_tokens, context)
    loaded: Any = load_causal_lm(model, device, dtype, revision, token, depth_backend)
    if adapter is not None:
        load_routing_adapter(loaded, adapter)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        # Without `top_k`, Transformers would keep only the 50 likeliest tokens.
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    if seed is not None:
        set_seed(seed)
    with torch.inference_mode():
        tokens = loaded.generate(
            **inputs.to(loaded.device),
            max_new_tokens=max_new_tokens,
            streamer=TextStreamer(tokenizer, skip_special_tokens=True),
            logits_processor=LogitsProcessorList([_check_no_nan]),
            **sampling,
        )
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


def _check_options(prompt: str, max_new_tokens: int, temperature: float, top_p: float, seed: int | None) -> None:
    if not prompt:
        raise ValueError("`prompt` is empty: give the model some text to continue.")
    if prompt != prompt.encode(errors="replace").decode():
        raise ValueError(f"`prompt` is {prompt!r}, which is not Unicode text.")
    if max_new_tokens < 1:
        raise ValueError(f"`max_new_tokens` is {max_new_tokens}; it must be at least 1.")
    if seed is not None and not 0 <= seed < 2**32:
        raise ValueError(f"`seed` is {seed}; it must lie in 0..{2**32 - 1}.")
    if temperature != 0 and not 1e-4 <= temperature < float("inf"):
        raise ValueError(f"`temperature` is {temperature}; it must be 0 (greedy), or finite and at least 1e-4.")
    if not 0 < top_p <= 1:
        raise ValueError(f"`top_p` is {top_p}; it must be above 0 and at most 1.")
    if top_p < 1 and temperature == 0:
        raise ValueError(f"`top_p` is {top_p}, but `temperature` is 0, which is greedy: set a temperature, such as 1.")


def _fit(prompt_tokens: int, max_new_tokens: int, context: int) -> int:
    """The number of new tokens for which the context has room."""
    if prompt_tokens >= context:
        sizes = f"`prompt` has {prompt_tokens:,} tokens, but the context of this model is {context:,}"
        raise LRAttnResError(f"{sizes}: shorten it.")
    if (room := context - prompt_tokens) < max_new_tokens:
        reason = f"the context of this model is {context:,} tokens, the prompt has {prompt_tokens:,}"
        print(f"Note: {reason}: at most {room:,} new tokens, not {max_new_tokens:,}.", file=sys.stderr)
    return min(room, max_new_tokens)


def _check_no_nan(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    if logits.isnan().any():
        raise ValueError("the logits are NaN: the weights are damaged, or too large for `dtype`.")
    return logits
