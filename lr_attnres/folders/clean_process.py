"""Load a saved folder as other users do: in a fresh process, offline, without this package.

The fresh process runs this file as a script, so the top of the file cannot import from the package.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel


CODE_FIELDS = ("auto_map", "custom_pipelines", "custom_generate")


def probe_tokens(config: PreTrainedConfig) -> torch.Tensor:
    """Eight tokens spread over the vocabulary, [1, 8]; fewer if the context has no room for nine."""
    tokens = torch.arange(1, 9) * 7919 % config.vocab_size
    return tokens[: max(1, config.max_position_embeddings - 1)].unsqueeze(0)


@torch.no_grad()
def probe_logits(model: PreTrainedModel) -> torch.Tensor:
    """The logits (or hidden states) of `probe_tokens`."""
    return model(probe_tokens(model.config))[0]


def check_code(folder: Path) -> None:
    """Raise if loading the folder could run code other than the model's: `trust_remote_code=True` runs all of it."""
    from ..errors import LRAttnResError

    advice = "remove it; only the code of the model may run"
    if os.path.lexists(folder / "custom_generate"):
        raise LRAttnResError(f"{folder / 'custom_generate'} would run as code: {advice}.")
    for path in sorted(path for path in folder.glob("*.json") if path.is_file()):
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            continue  # names nothing
        if path.name == "config.json" and isinstance(content, dict):
            content.pop("auto_map", None)  # the model's code
        if field := _field_that_names_code(content):
            raise LRAttnResError(f"{path}: `{field}` names code: {advice}.")


def _field_that_names_code(content: Any) -> str | None:
    """The first field, at any depth, from which Transformers takes the name of a module to run."""
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            for field, inner in value.items():
                # A vocabulary may have tokens of these names; their values are numbers.
                if field in CODE_FIELDS and isinstance(inner, (str, list, dict)) and inner:
                    return field
                if field.strip("_") == "attn_implementation" and "/" in str(inner):  # a kernel on the Hub
                    return field
            waiting += value.values()
    return None


def load_in_clean_process(folder: str | os.PathLike, dtype: str = "auto") -> dict[str, Any]:
    """Load the folder in `dtype`, by default as saved, with the model code in it and no other; returns a dict:

    missing_weights, unexpected_weights, bad_weights (NaN or infinite): lists of names
    output: the logits (or hidden states) of `probe_tokens`
    tokens: the probe tokens, and for a causal model one generated token
    tokenizer_size: the largest token id plus one; None without a tokenizer
    """
    from ..errors import LRAttnResError

    check_code(Path(folder))
    with tempfile.TemporaryDirectory(prefix="lr-attnres-") as scratch:
        print("Checking the folder in a clean process ...", file=sys.stderr)
        environment = {name: value for name, value in os.environ.items() if name != "HF_MODULES_CACHE"}
        environment |= {"HF_HOME": scratch, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        result_file = Path(scratch) / "result.pt"
        # -P: without it, modules of this folder could shadow installed ones.
        command = [sys.executable, "-P", __file__, str(Path(folder).resolve()), dtype, str(result_file)]
        process = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if process.returncode != 0:
            lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
            raise LRAttnResError(f"{folder} does not load in a clean process: {lines[-1].strip()}")
        return torch.load(result_file, weights_only=True)


@torch.no_grad()
def main(folder: str, dtype: str, result_file: str) -> None:
    """Save the dict that `load_in_clean_process` returns."""
    sys.modules["lr_attnres"] = None  # type: ignore[assignment]  # its import fails, as if it were not installed
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    entry_points = {entry.split(".")[-1]: name for name, entry in config.auto_map.items()}
    auto_class = getattr(transformers, entry_points[config.architectures[0]])
    model, loading = auto_class.from_pretrained(folder, dtype=dtype, trust_remote_code=True, output_loading_info=True)
    tokens, output = probe_tokens(config), probe_logits(model)
    if model.can_generate():
        tokens = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=1)
    tokenizer_size = None
    if (Path(folder) / "tokenizer_config.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
        tokenizer_size = max(tokenizer.get_vocab().values()) + 1  # as `vocabulary_size`, which is in the package
    result = {
        "missing_weights": sorted(loading["missing_keys"]),
        "unexpected_weights": sorted(loading["unexpected_keys"]),
        "bad_weights": [name for name, weight in model.state_dict().items() if not weight.isfinite().all()],
        "output": output,
        "tokens": tokens,
        "tokenizer_size": tokenizer_size,
    }
    torch.save(result, result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
