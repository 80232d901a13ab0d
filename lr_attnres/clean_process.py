"""Load a saved folder the way a stranger does: in a fresh process, offline, where this package cannot be imported."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch


class CleanProcessError(RuntimeError):
    """The folder does not load, or does not run, where the package is absent."""


def load_in_clean_process(folder: str | os.PathLike, dtype: str = "auto") -> dict[str, Any]:
    """What a fresh process found in the folder, loaded in `dtype` (as saved by default).

    missing_weights, unexpected_weights, bad_weights (NaN or infinite): lists of names; output: the logits (or hidden
    states) of `probe_tokens`; tokens: the same tokens and, for a causal model, one more; tokenizer_size: the largest
    token id plus one, None without a tokenizer. Runs the code of the folder.
    """
    with tempfile.TemporaryDirectory(prefix="lr-attnres-") as scratch:
        print("Checking the folder in a clean process ...", file=sys.stderr)
        environment = {name: value for name, value in os.environ.items() if name != "HF_MODULES_CACHE"}
        environment |= {"HF_HOME": scratch, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        result_file = Path(scratch) / "result.pt"
        # -P: the folder of this file, full of modules with short names, stays off the import path.
        command = [sys.executable, "-P", __file__, str(Path(folder).resolve()), dtype, str(result_file)]
        process = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if process.returncode != 0:
            lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
            reason = lines[-1] if lines else f"exit code {process.returncode}"
            raise CleanProcessError(f"{folder} does not load in a clean process: {reason}")
        return torch.load(result_file, weights_only=True)


def probe_tokens(vocab_size: int) -> torch.Tensor:
    """Eight tokens spread over the vocabulary: [1, 8]."""
    return (torch.arange(1, 9) * 7919 % vocab_size).unsqueeze(0)


class _PackageBlocker:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == "lr_attnres":
            raise ModuleNotFoundError("lr_attnres is hidden from this process")


@torch.no_grad()
def _probe(folder: str, dtype: str, result_file: str) -> None:
    sys.meta_path.insert(0, _PackageBlocker())
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    entry_points = {entry.split(".")[-1]: name for name, entry in config.auto_map.items()}
    auto_class = getattr(transformers, entry_points[config.architectures[0]])
    model, loading = auto_class.from_pretrained(folder, dtype=dtype, trust_remote_code=True, output_loading_info=True)
    tokens = probe_tokens(config.vocab_size)[:, : max(1, config.max_position_embeddings - 1)]
    output = model(tokens)[0]
    if model.can_generate():
        tokens = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=1)
    tokenizer_size = None
    if (Path(folder) / "tokenizer_config.json").exists():
        vocabulary = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True).get_vocab()
        tokenizer_size = max(vocabulary.values()) + 1
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
    _probe(*sys.argv[1:])
