"""Damaged checkpoints: a resumed run ends as the uninterrupted one did, or is refused."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState
from attack_harness import Bug
from safetensors.torch import load_file

from lr_attnres import TrainArguments, train


SETTINGS = {
    "variant": "sliced-n2-r4",
    "steps": 4,
    "batch_tokens": 32,
    "micro_batch_size": 2,
    "warmup_steps": 0,
    "save_steps": 2,
    "keep_last": 2,
    "model": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
}


def run(data: Path, output: Path, **options: str) -> dict[str, torch.Tensor]:
    try:
        model = train(TrainArguments(data=str(data), output_dir=str(output), **SETTINGS, **options))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return load_file(Path(model) / "model.safetensors")


def make_original(data: Path, folder: Path) -> dict[str, torch.Tensor]:
    """A whole run, then cut back to its first checkpoint."""
    weights = run(data, folder)
    for name in ("model", "checkpoints/step-00000004"):
        shutil.rmtree(folder / name)
    return weights


def make_maker(data: Path, original: Path, expected: dict[str, torch.Tensor]) -> Callable:
    def make_case(chance: random.Random, folder: Path) -> tuple[str, Callable[[], str | None]]:
        shutil.copytree(original, folder)
        checkpoint = folder / "checkpoints/step-00000002"
        path = chance.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file()))
        content = bytearray(path.read_bytes())
        kind = chance.choice(["flip", "flip", "flip", "cut", "deleted"])
        if kind == "cut":
            del content[chance.randrange(len(content)) :]
        if kind == "flip":
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        if kind == "deleted":
            path.unlink()

        def try_checkpoint() -> str | None:
            try:
                weights = run(data, folder, resume="last")
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if not all(torch.equal(weights[name], tensor) for name, tensor in expected.items()):
                raise Bug("the resumed run ends with other weights")
            return None

        return f"{path.name} {kind}", try_checkpoint

    return make_case
