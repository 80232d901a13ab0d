"""Damaged prepared data: the rows are those that were prepared, or are refused."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attack_harness import WEIRD, Bug
from common import byte_tokenizer

from lr_attnres import PackedTokens, prepare_data
from lr_attnres.data.packed_tokens import load_data_tokenizer


def make_original(folder: Path) -> list[torch.Tensor]:
    texts = folder.with_name("texts.jsonl")
    texts.write_text("".join(json.dumps({"text": f"speech {i} " * (i % 7 + 3)}) + "\n" for i in range(60)))
    options = {"sequence_length": 16, "validation_fraction": 0.2, "shard_tokens": 160}
    prepare_data([str(texts)], folder, tokenizer=byte_tokenizer(), progress_bar=False, **options)
    return read(folder)


def read(folder: Path) -> list[torch.Tensor]:
    load_data_tokenizer(folder)
    rows = []
    for split in ("train", "validation"):
        data = PackedTokens(folder, split)
        rows += [torch.stack(list(data[i].values())) for i in range(len(data))]
    return rows


def damage_shard(chance: random.Random, folder: Path) -> str:
    path = chance.choice(sorted(folder.rglob("*.arrow")))
    content = bytearray(path.read_bytes())
    kind = chance.choice(["flip", "flip", "flip", "cut", "empty", "deleted", "swapped", "longer"])
    if kind == "flip":
        position = chance.randrange(len(content))
        content[position] ^= 1 << chance.randrange(8)
        kind = f"flipped a bit of byte {position}"
    if kind == "cut":
        del content[chance.randrange(len(content)) :]
    if kind == "empty":
        content.clear()
    if kind == "longer":
        content += b"x"
    if kind == "swapped":
        other = chance.choice([other for other in sorted(folder.rglob("*.arrow")) if other != path])
        content = bytearray(other.read_bytes())
    path.write_bytes(content)
    if kind == "deleted":
        path.unlink()
    return f"{path.relative_to(folder)} {kind}"


def nodes_of(content: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of nested JSON."""
    keys = list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else []
    return [(content, key) for key in keys] + [node for key in keys for node in nodes_of(content[key])]


def damage_manifest(chance: random.Random, folder: Path) -> str:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    container, key = chance.choice(nodes_of(content))
    if chance.random() < 0.25:
        del container[key]
        kind = f"without {key}"
    else:
        value = container[key]
        close = [value + 1, value - 1, -value, value * 2] if type(value) is int else []
        container[key] = chance.choice(close if close and chance.random() < 0.5 else WEIRD)
        kind = f"{key}: {value!r} -> {container[key]!r}"[:200]
    path.write_text(json.dumps(content))
    return f"manifest {kind}"


def damage_tokenizer(chance: random.Random, folder: Path) -> str:
    path = chance.choice(sorted((folder / "tokenizer").iterdir()))
    content = path.read_text()
    position = chance.randrange(len(content))
    path.write_text(content[:position] + chance.choice(["", "x", "}", '"']) + content[position + 1 :])
    return f"tokenizer/{path.name} at {position}"


def make_maker(original: Path, expected: list[torch.Tensor]) -> Callable:
    def make_case(chance: random.Random, folder: Path) -> tuple[str, Callable[[], str | None]]:
        shutil.copytree(original, folder)
        damage = chance.choice([damage_shard, damage_manifest, damage_manifest, damage_tokenizer])
        description = damage(chance, folder)

        def try_data() -> str | None:
            try:
                rows = read(folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if len(rows) != len(expected) or not all(map(torch.equal, rows, expected)):
                raise Bug("other rows than those that were prepared")
            return None

        return description, try_data

    return make_case
