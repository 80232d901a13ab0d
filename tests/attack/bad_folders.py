"""Damaged model folders: what loads computes what was saved, or is refused."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attack_harness import WEIRD, Bug
from common import save_text_model
from safetensors.torch import load_file, save_file

from lr_attnres.data.tokenizers import load_tokenizer
from lr_attnres.folders.loading import load_language_model


TEXT = "Fellow citizens, 1234!"
WEIGHTS = "model.safetensors"


def make_original(folder: Path) -> tuple[torch.Tensor, list[int]]:
    save_text_model(folder)
    return read(folder)


@torch.no_grad()
def read(folder: Path) -> tuple[torch.Tensor, list[int]]:
    tokenizer, model = load_tokenizer(folder, 257), load_language_model(folder, "cpu").eval()
    tokens = tokenizer(TEXT)["input_ids"]
    return model(torch.tensor([tokens])).logits, tokens


def damage_weights(chance: random.Random, folder: Path) -> str:
    weights = load_file(folder / WEIGHTS)
    name = chance.choice(sorted(weights))
    kind = chance.choice(["missing", "renamed", "nan", "inf", "shape", "extra", "integer", "empty"])
    tensor = weights[name]
    if kind in ("missing", "renamed"):
        del weights[name]
    if kind == "renamed":
        weights[name + "x"] = tensor
    if kind in ("nan", "inf"):
        tensor.view(-1)[chance.randrange(tensor.numel())] = float(kind)
    if kind == "shape":
        weights[name] = torch.cat([tensor, tensor])
    if kind == "extra":
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(3)
    if kind == "integer":
        weights[name] = tensor.to(torch.int8)
    save_file({} if kind == "empty" else weights, folder / WEIGHTS, metadata={"format": "pt"})
    return f"{kind} {name}"


def damage_bytes(chance: random.Random, folder: Path) -> str:
    """Cut off a file, or overwrite its head: the header of weights, the first lines of JSON."""
    path = chance.choice([path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".json")])
    content = bytearray(path.read_bytes())
    if chance.random() < 0.5:
        del content[chance.randrange(len(content)) :]
        kind = f"cut to {len(content)} bytes"
    else:
        content[: min(len(content), 8)] = bytes(chance.randrange(256) for _ in range(min(len(content), 8)))
        kind = "another head"
    path.write_bytes(content)
    return f"{path.name} {kind}"


def damage_json(chance: random.Random, folder: Path) -> str:
    path = chance.choice([path for path in sorted(folder.iterdir()) if path.suffix == ".json"])
    content = json.loads(path.read_text())
    key = chance.choice(sorted(content))
    if chance.random() < 0.3:
        del content[key]
        kind = f"without {key}"
    else:
        content[key] = chance.choice(WEIRD)
        kind = f"{key} = {content[key]!r}"[:200]
    path.write_text(json.dumps(content))
    return f"{path.name} {kind}"


def damage_files(chance: random.Random, folder: Path) -> str:
    path = chance.choice(sorted(folder.iterdir()))
    kind = chance.choice(["deleted", "folder", "loop", "pickle", "fifo", "index"])
    if kind == "pickle":
        (folder / WEIGHTS).unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": [1.0]}))
        return "a pickle instead of the weights"
    if kind == "index":
        index = {
            "metadata": {},
            "weight_map": {"lm_head.weight": chance.choice(["../x", "gone.safetensors", 3, None])},
        }
        (folder / WEIGHTS).unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return f"index {index['weight_map']}"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    if kind == "loop":
        path.symlink_to(path.name)
    if kind == "fifo":
        os.mkfifo(path)
    return f"{path.name} {kind}"


def make_maker(original: Path, expected: tuple[torch.Tensor, list[int]]) -> Callable:
    def make_case(chance: random.Random, folder: Path) -> tuple[str, Callable[[], str | None]]:
        shutil.copytree(original, folder)
        damage = chance.choice([damage_weights, damage_bytes, damage_json, damage_files])
        description = damage(chance, folder)

        def try_folder() -> str | None:
            try:
                logits, tokens = read(folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if not logits.isfinite().all():
                raise Bug("the logits are not finite")
            # An edited JSON file may mean another valid model; damaged weights may not.
            same: Any = tokens == expected[1] and torch.equal(logits, expected[0])
            if damage is damage_weights and not same:
                raise Bug("damaged weights were accepted")
            return None

        return description, try_folder

    return make_case
