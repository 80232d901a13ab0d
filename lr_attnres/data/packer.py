"""Cuts streams of tokens into rows and writes them as Arrow shards; its progress can be saved and restored."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..errors import LRAttnResError
from .documents import Documents
from .manifest import SPLITS, Manifest, Shard, Split
from .packed_tokens import file_hash
from .tokenizers import tokenizer_hash, vocabulary_size


BATCH_CHARACTERS = 4_000_000
PROGRESS_FILE = "progress.npz"


@dataclass(frozen=True)
class PackingSettings:
    """Everything that determines the rows. A resumed or repeated `prepare_data` must have the same settings."""

    sources: list[dict]
    column: str
    tokenizer: str
    sequence_length: int
    validation_fraction: float
    max_tokens: int | None
    shard_tokens: int

    def __post_init__(self) -> None:
        length, fraction = self.sequence_length, self.validation_fraction
        rules = {
            "sequence_length": (length >= 2, "a row needs at least 2 tokens"),
            "validation_fraction": (0 <= fraction < 1, "it must lie in [0, 1)"),
            "max_tokens": (self.max_tokens is None or self.max_tokens >= 1, "it must be at least 1, or None"),
            "shard_tokens": (self.shard_tokens >= length, f"it must hold a row of `sequence_length` {length}"),
        }
        for name, (is_valid, rule) in rules.items():
            if not is_valid:
                raise LRAttnResError(f"`{name}` is {getattr(self, name)}; {rule}.")


class Packer:
    """Collects the tokens of each split and writes a shard whenever enough rows are full."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, settings: PackingSettings):
        self.folder, self.tokenizer, self.settings = folder, tokenizer, settings
        self.length = settings.sequence_length
        self.shard_rows = settings.shard_tokens // self.length
        self.vocab_size = vocabulary_size(tokenizer)
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        self.splits = {name: Split() for name in SPLITS}
        # Per split, the documents that are not in a shard yet; the first may be the rest of a document.
        self.pending: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}

    @property
    def num_tokens(self) -> int:
        return sum(split.tokens for split in self.splits.values())

    @property
    def is_full(self) -> bool:
        return self.settings.max_tokens is not None and self.num_tokens >= self.settings.max_tokens

    def pack(self, documents: Documents, bar: tqdm) -> None:
        bar.update(self.num_tokens)
        if self.is_full:
            return
        for batch, position in _batches(documents):
            tokens_before, wrote_shard = self.num_tokens, False
            self.add(batch)
            for name in SPLITS:
                while self.pending_rows(name) >= self.shard_rows:
                    self.write_shard(name, self.shard_rows)
                    wrote_shard = True
            if wrote_shard:
                self.save_progress(position)
            bar.update(self.num_tokens - tokens_before)
            if self.is_full:
                return

    def add(self, batch: list[str]) -> None:
        """Tokenize documents, until `max_tokens` is reached."""
        # `split_special_tokens`: text that looks like a special token stays text.
        encoded = self.tokenizer(
            batch, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
        )["input_ids"]
        for text, tokens in zip(batch, encoded):
            name = split_of(text, self.settings.validation_fraction)
            self.pending[name].append(np.array([*tokens, self.tokenizer.eos_token_id], dtype=self.dtype))
            self.splits[name].documents += 1
            self.splits[name].tokens += len(tokens) + 1
            if self.is_full:
                return

    def pending_rows(self, name: str) -> int:
        return self.splits[name].tokens // self.length - self.splits[name].rows

    def write_shard(self, name: str, rows: int) -> None:
        documents, size = self.pending[name], rows * self.length
        flat = np.concatenate(documents)
        document_starts = np.cumsum([0, *map(len, documents)])[:-1]
        rest_starts = document_starts[document_starts > size] - size
        self.pending[name] = np.split(flat[size:], rest_starts) if len(flat) > size else []
        split = self.splits[name]
        path = self.folder / name / f"{len(split.shards):05d}.arrow"
        path.parent.mkdir(exist_ok=True)
        write_arrow(path, flat[:size].reshape(rows, self.length), document_starts[document_starts < size])
        split.shards += (Shard(f"{name}/{path.name}", rows, file_hash(path)),)
        split.rows += rows

    def save_progress(self, position: object) -> None:
        """Write everything that the remaining work depends on into one file."""
        arrays: dict[str, Any] = {}
        for name in SPLITS:
            arrays[f"{name}_tokens"] = np.concatenate([np.zeros(0, self.dtype), *self.pending[name]])
            arrays[f"{name}_lengths"] = np.array([len(document) for document in self.pending[name]], dtype=np.int64)
        counts = {name: asdict(split) for name, split in self.splits.items()}
        arrays["state"] = np.array(json.dumps({"position": position, "counts": counts}))
        temporary = self.folder / "progress.tmp"
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)
        os.replace(temporary, self.folder / PROGRESS_FILE)

    def restore_progress(self, documents: Documents) -> None:
        if not (self.folder / PROGRESS_FILE).exists():
            return
        with np.load(self.folder / PROGRESS_FILE) as saved:
            state = json.loads(str(saved["state"]))
            for name in SPLITS:
                ends = np.cumsum(saved[f"{name}_lengths"])
                self.pending[name] = np.split(saved[f"{name}_tokens"], ends[:-1]) if len(ends) else []
        self.splits = {name: Split.from_json(counts) for name, counts in state["counts"].items()}
        documents.resume(state["position"])

    def finish(self) -> None:
        """Write the last, shorter shards and the manifest. An incomplete last row is dropped."""
        try:
            self._check_sizes()
        except ValueError:
            shutil.rmtree(self.folder)
            raise
        for name in SPLITS:
            if rows := self.pending_rows(name):
                self.write_shard(name, rows)
        Manifest(
            settings=asdict(self.settings),
            sequence_length=self.length,
            tokenizer_name=self.settings.tokenizer,
            tokenizer_sha256=tokenizer_hash(self.tokenizer),
            vocab_size=self.vocab_size,
            eos_token_id=self.tokenizer.eos_token_id,
            splits={name: split for name, split in self.splits.items() if split.rows},
        ).write(self.folder)

    def _check_sizes(self) -> None:
        if not self.num_tokens:
            raise LRAttnResError("the corpus is empty: no document has any text.")
        fraction = self.settings.validation_fraction
        for name in SPLITS if fraction else ("train",):
            split = self.splits[name]
            if split.tokens < self.length:
                raise LRAttnResError(
                    f"the corpus is too small: the {name} split has {split.tokens} tokens ({split.documents} "
                    f"documents), less than one row of `sequence_length` {self.length}; shorten it or change "
                    f"`validation_fraction` ({fraction}; 0 makes no validation split)."
                )


def _batches(documents: Documents) -> Iterator[tuple[list[str], object]]:
    """Lists of documents that have text, each with the position in the sources where it ends."""
    batch, size = [], 0
    for text in documents:
        if text.strip():
            batch.append(text)
            size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch, documents.position
            batch, size = [], 0
    if batch:
        yield batch, documents.position


def split_of(text: str, validation_fraction: float) -> str:
    """Depends on the text alone, so that copies of a document are in the same split."""
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    return "validation" if int.from_bytes(digest) / 2**48 < validation_fraction else "train"


def write_arrow(path: Path, rows: np.ndarray, document_starts: np.ndarray) -> None:
    """rows [N, length] of tokens; `document_starts` are positions in the flattened rows."""
    length = rows.shape[1]
    row_starts = np.arange(0, rows.size + 1, length)
    starts = np.union1d(document_starts, row_starts[:-1])  # positions restart at every row, also inside a document
    offsets = np.searchsorted(starts, row_starts).astype(np.int32)
    columns = {
        "input_ids": pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), length),
        "document_starts": pa.ListArray.from_arrays(pa.array(offsets), pa.array((starts % length).astype(np.int32))),
    }
    table, temporary = pa.table(columns), path.with_suffix(".tmp")
    with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    os.replace(temporary, path)
