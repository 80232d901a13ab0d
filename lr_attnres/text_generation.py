"""Text from a saved model, printed as it is made."""

import sys
from typing import Any, TextIO

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TextStreamer,
    set_seed,
)

from .modeling_lr_attnres import LRAttnResForCausalLM


class _Streamer(TextStreamer):
    def __init__(self, tokenizer: PreTrainedTokenizerBase, output: TextIO):
        super().__init__(tokenizer, skip_special_tokens=True)
        self.output = output

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(text, end="\n" if stream_end else "", file=self.output, flush=True)


def generate_text(
    source: str,
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
        raise ValueError("--prompt is empty; give the model something to continue.")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"--temperature is {temperature}; it must be 0 (greedy) or above, and finite.")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p is {top_p}; it must lie above 0 and at most at 1.")
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, token=token)
    model = load_language_model(source, device, dtype, revision=revision, token=token)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p}
    if seed is not None:
        set_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    with torch.inference_mode():
        tokens = model.generate(
            **inputs, max_new_tokens=max_new_tokens, streamer=_Streamer(tokenizer, output or sys.stdout), **sampling
        )
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


def load_language_model(
    source: str, device: str = "auto", dtype: str = "auto", **options: str | None
) -> LRAttnResForCausalLM:
    """The model of a folder or Hub repository, on `device`: an accelerator if there is one, or the one named."""
    try:
        # Any: the hint of Transformers leaves out the second value.
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True, **options)
    except (SafetensorError, StrictDataclassError, RuntimeError) as error:
        raise ValueError(f"{source} cannot be loaded: {error}") from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"{source} lacks {len(missing)} weights that its config asks for, such as {missing[0]}.")
    try:
        model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu" if device == "auto" else device)
    except (RuntimeError, AssertionError) as error:  # how torch says that there is no such device
        raise ValueError(f"--device {device}: {error}") from error
    return model
