"""The manifest of a prepared folder: the settings, the tokenizer and the shards of every split, as JSON on disk."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..errors import LRAttnResError
from ..sources import read_json_object


FILENAME = "manifest.json"
FORMAT = 1
SPLITS = ("train", "validation")
FIELDS: dict[str, dict[str, tuple]] = {
    "manifest": {"format": (int,), "settings": (dict,), "tokenizer": (dict,), "splits": (dict,)},
    "settings": {"sources": (list,), "column": (str,), "tokenizer": (str,), "sequence_length": (int,)}
    | {"validation_fraction": (int, float), "max_tokens": (int, type(None)), "shard_tokens": (int,)},
    "tokenizer": {"name": (str,), "sha256": (str,), "vocab_size": (int,), "eos_token_id": (int,)},
    "split": {"documents": (int,), "tokens": (int,), "rows": (int,), "shards": (list,)},
    "shard": {"file": (str,), "rows": (int,), "sha256": (str,)},
}


@dataclass(frozen=True)
class Shard:
    file: str  # relative to the prepared folder
    rows: int
    sha256: str


@dataclass
class Split:
    documents: int = 0
    tokens: int = 0
    rows: int = 0
    shards: tuple[Shard, ...] = ()

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Split":
        return cls(**content | {"shards": tuple(Shard(**shard) for shard in content["shards"])})


@dataclass(frozen=True)
class Manifest:
    settings: dict[str, Any]  # the arguments of `prepare_data` that determine the rows
    sequence_length: int
    tokenizer_name: str
    tokenizer_sha256: str
    vocab_size: int
    eos_token_id: int
    splits: dict[str, Split]

    @classmethod
    def read(cls, folder: str | os.PathLike) -> "Manifest":
        folder = Path(folder)
        file, partial = folder / FILENAME, f"{folder}.partial"
        if not file.exists():
            resume = f"{partial} is unfinished: run the same `prepare` again"
            advice = resume if os.path.exists(partial) else "run `prepare` first"
            raise LRAttnResError(f"{folder} holds no prepared tokens (no {FILENAME}); {advice}.")
        content = read_json_object(file)
        if (found := content.get("format")) != FORMAT:
            raise LRAttnResError(f"{folder} has format {found}, this version reads {FORMAT}: prepare it again.")
        if problem := next(_problems(content, folder), None):
            raise LRAttnResError(f"{file}: {problem}; prepare the folder again.")
        settings, tokenizer, splits = content["settings"], content["tokenizer"], content["splits"]
        return cls(
            settings=settings,
            sequence_length=settings["sequence_length"],
            tokenizer_name=tokenizer["name"],
            tokenizer_sha256=tokenizer["sha256"],
            vocab_size=tokenizer["vocab_size"],
            eos_token_id=tokenizer["eos_token_id"],
            splits={name: Split.from_json(split) for name, split in splits.items()},
        )

    def write(self, folder: Path) -> None:
        tokenizer: dict[str, Any] = {"name": self.tokenizer_name, "sha256": self.tokenizer_sha256}
        tokenizer |= {"vocab_size": self.vocab_size, "eos_token_id": self.eos_token_id}
        splits = {name: asdict(split) for name, split in self.splits.items()}
        content = {"format": FORMAT, "settings": self.settings, "tokenizer": tokenizer, "splits": splits}
        write_json(folder / FILENAME, content)

    def training_hash(self) -> str:
        """A hash of the training tokens, which stays the same when the folder is moved."""
        shards = [shard.sha256 for shard in self.splits["train"].shards]
        return hashlib.sha256(json.dumps(shards).encode()).hexdigest()[:16]

    def check_fits(self, config: PreTrainedConfig) -> None:
        """Raise if a model of this config cannot read the rows."""
        size, context = config.vocab_size, getattr(config, "max_position_embeddings", None)
        if size < self.vocab_size:
            raise LRAttnResError(f"`vocab_size` is {size}, but the data has {self.vocab_size} different tokens.")
        if context is not None and context < self.sequence_length:
            raise LRAttnResError(
                f"`max_position_embeddings` is {context}, less than a row ({self.sequence_length} tokens)."
            )


def write_json(path: Path, content: dict[str, Any], suffix: str = ".tmp") -> None:
    """Written beside `path` and renamed, so that `path` is never half-written."""
    temporary = path.with_suffix(suffix)
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)


def _problems(content: dict[str, Any], folder: Path) -> Iterator[str]:
    """What is wrong with a manifest. Take the first problem only: each check relies on those before it."""
    yield from _field_problems("", content, "manifest")
    settings, tokenizer, splits = content["settings"], content["tokenizer"], content["splits"]
    yield from _field_problems("settings.", settings, "settings")
    yield from _field_problems("tokenizer.", tokenizer, "tokenizer")
    length, size, end = settings["sequence_length"], tokenizer["vocab_size"], tokenizer["eos_token_id"]
    if length < 2:
        yield f"`settings.sequence_length` is {length}, but a row has at least 2 tokens"
    if not 0 <= end < size:
        yield f"`tokenizer.eos_token_id` is {end}; it must lie in 0..`vocab_size` - 1 = {size - 1}"
    if not _is_hash(tokenizer["sha256"]):
        yield f"`tokenizer.sha256` is {tokenizer['sha256']!r:.70}, which is not 64 hexadecimal digits"
    if "train" not in splits or not {*splits} <= {*SPLITS}:
        yield f"`splits` has {[*splits]!r:.60}; expected train, and validation or not"
    for name, split in splits.items():
        yield from _split_problems(name, split, length, folder)


def _split_problems(name: str, split: Any, length: int, folder: Path) -> Iterator[str]:
    yield from _field_problems(f"splits.{name}.", split, "split")
    for number, shard in enumerate(split["shards"]):
        part, expected = f"splits.{name}.shards[{number}]", f"{name}/{number:05d}.arrow"
        yield from _field_problems(f"{part}.", shard, "shard")
        if shard["file"] != expected:
            yield f"`{part}.file` is {shard['file']!r:.60}; expected {expected}"
        if shard["rows"] < 1:
            yield f"`{part}.rows` is {shard['rows']}; it must be at least 1"
        if not _is_hash(shard["sha256"]):
            yield f"`{part}.sha256` is {shard['sha256']!r:.70}, which is not 64 hexadecimal digits"
        if not Path(os.path.realpath(folder / expected)).is_relative_to(os.path.realpath(folder)):
            yield f"`{part}.file` {expected} is a link to a place outside of the folder"
    rows, full_rows = sum(shard["rows"] for shard in split["shards"]), split["tokens"] // length
    if not split["rows"] == rows == full_rows or rows < 1:
        counts = f"its shards have {rows} and its {split['tokens']} tokens fill {full_rows}"
        yield f"`splits.{name}.rows` is {split['rows']}, but {counts}"
    if not 1 <= split["documents"] <= split["tokens"]:
        yield f"`splits.{name}.documents` is {split['documents']}; it must lie in 1..{split['tokens']}, its tokens"


def _field_problems(part: str, content: Any, kind: str) -> Iterator[str]:
    """A field that is missing, unknown or of another type. `type(...)`: a bool is not a number."""
    if not isinstance(content, dict):
        yield f"`{part[:-1]}` is not an object"
    for name in [*FIELDS[kind], *content]:
        if name not in content:
            yield f"`{part}{name}` is missing"
        if name not in FIELDS[kind]:
            yield f"`{part}{name}` is not a field of this format"
        if type(content[name]) not in FIELDS[kind][name]:
            yield f"`{part}{name}` is {content[name]!r:.60}, a {type(content[name]).__name__}"


def _is_hash(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", text) is not None
