"""Text from a saved model, printed as it is made."""

import sys
from typing import Any, TextIO

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, TextStreamer, set_seed

from .loading import load_config, load_language_model, load_tokenizer


class _Streamer(TextStreamer):
    def __init__(self, tokenizer: PreTrainedTokenizerBase, output: TextIO):
        super().__init__(tokenizer, skip_special_tokens=True)
        self.output = output

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(text, end="\n" if stream_end else "", file=self.output, flush=True)


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
    revision: str | None = None,
    token: str | None = None,
    output: TextIO | None = None,
) -> str:
    """Continue `prompt` with the model of a folder or Hub repository, streaming the text; returns the whole of it.

    Temperature 0 is greedy; any other samples, repeatably with `seed`. `output` is the standard output by default.
    """
    if not prompt:
        raise ValueError("`prompt` is empty; give the model something to continue.")
    if prompt != prompt.encode(errors="replace").decode():
        raise ValueError(f"`prompt` is {prompt!r}, which is not Unicode text.")
    if max_new_tokens < 1:
        raise ValueError(f"`max_new_tokens` is {max_new_tokens}; it must be at least 1.")
    if seed is not None and not 0 <= seed < 2**32:
        raise ValueError(f"`seed` is {seed}; it must lie in 0..{2**32 - 1}.")
    if temperature != 0 and not 1e-4 <= temperature < float("inf"):
        raise ValueError(f"`temperature` is {temperature}; it must be 0 (greedy), or finite and at least 1e-4.")
    if not 0 < top_p <= 1:
        raise ValueError(f"`top_p` is {top_p}; it must lie above 0 and at most at 1.")
    config = load_config(model, revision, token)
    tokenizer = load_tokenizer(model, config, revision, token)
    loaded = load_language_model(model, device, dtype, revision, token)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p}
    if seed is not None:
        set_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(loaded.device)
    with torch.inference_mode():
        tokens = loaded.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            streamer=_Streamer(tokenizer, output or sys.stdout),
            logits_processor=LogitsProcessorList([_check_no_nan]),
            **sampling,
        )
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


def _check_no_nan(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    if logits.isnan().any():
        raise ValueError("the logits are not numbers (NaN): weights are damaged, or too large for `dtype`.")
    return logits
