"""`PackedTokens` maps the rows of a prepared folder into memory; also the folder's tokenizer and its verification."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..errors import LRAttnResError
from ..sources import read_json_object
from .manifest import Manifest, Shard, write_json
from .tokenizers import folder_hash, load_tokenizer, tokenizer_hash, vocabulary_size


VERIFIED_FILE = "verified.json"
COLUMNS = ["input_ids", "document_starts"]
DAMAGED = "{path} is missing or damaged ({problem}): delete {folder} and prepare it again."


def verify_data(
    folder: str | os.PathLike, progress_bar: bool = False, split: str | None = None, again: bool = True
) -> None:
    """Compare the shards of a prepared folder, or of one split, with the hashes in its manifest, and check their rows.

    `verified.json` in the folder, if it can be written, remembers the verified files. `again=False` skips those that
    have not changed since.
    """
    folder = Path(folder)
    manifest = Manifest.read(folder)
    verified: dict[str, Any] = {}
    with suppress(LRAttnResError):  # absent or damaged: nothing is verified yet
        verified = read_json_object(folder / VERIFIED_FILE)
    shards = [shard for name, part in manifest.splits.items() if split in (None, name) for shard in part.shards]
    before = dict(verified)
    for shard in tqdm(shards, desc="Checking", unit=" shards", delay=2, leave=False, disable=not progress_bar):
        path, problem = folder / shard.file, None
        try:
            stat = path.stat()
            # A copy has another inode, so that it is verified too.
            stamp = [shard.sha256, manifest.vocab_size, stat.st_size, stat.st_mtime_ns, stat.st_ino]
            if not again and before.get(shard.file) == stamp:
                continue
            if file_hash(path) != shard.sha256:
                problem = "its SHA-256 is not the manifest's"
        except OSError as error:
            problem = error.strerror
        chunks = [] if problem else map_shard(folder, shard, manifest)
        if problem := problem or next(filter(None, (chunk.problem(manifest.vocab_size) for chunk in chunks)), None):
            raise LRAttnResError(DAMAGED.format(path=path, problem=problem, folder=folder))
        verified[shard.file] = stamp
    if verified != before:
        with suppress(OSError):  # a folder that is only readable is verified every time
            # A name of its own: several processes may verify at the same time.
            write_json(folder / VERIFIED_FILE, verified, suffix=f".{token_hex(4)}.tmp")


def load_data_tokenizer(folder: str | os.PathLike) -> PreTrainedTokenizerBase:
    """The tokenizer that a folder was prepared with."""
    path, manifest = Path(folder) / "tokenizer", Manifest.read(folder)
    if not path.is_dir():
        raise LRAttnResError(f"{path} does not exist: prepare the data again.")
    try:
        tokenizer = load_tokenizer(path)
    except LRAttnResError as error:
        raise LRAttnResError(f"{str(error).rstrip('.')}. Prepare the data again.") from error
    if manifest.tokenizer_sha256 not in (tokenizer_hash(tokenizer), folder_hash(tokenizer, path)):
        raise LRAttnResError(f"{path} has changed since the rows were made with it: prepare the data again.")
    for name, size in {"vocab_size": vocabulary_size(tokenizer), "eos_token_id": tokenizer.eos_token_id}.items():
        if getattr(manifest, name) != size:
            found = f"`tokenizer.{name}` of the manifest is {getattr(manifest, name)}, that of {path} is {size}"
            raise LRAttnResError(f"{found}: prepare the data again.")
    return tokenizer


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Chunk(NamedTuple):
    """Rows of a mapped file. The documents of row i start at `starts[offsets[i] : offsets[i + 1]]`."""

    tokens: np.ndarray  # [rows, length]
    offsets: np.ndarray  # [rows + 1]
    starts: np.ndarray

    def problem(self, vocab_size: int) -> str | None:
        """What is wrong with the values, which are read from the disk for this."""
        rows, length = self.tokens.shape
        if rows and (largest := self.tokens.max()) >= vocab_size:
            return f"it has the token {largest}, but the vocabulary has {vocab_size}"
        starts = self.starts[self.offsets[0] : self.offsets[-1]]
        positions = starts + np.repeat(np.arange(rows) * length, np.diff(self.offsets))  # in the flattened rows
        first = self.offsets[:-1] - self.offsets[0]
        in_order = (np.diff(positions) > 0).all() and ((starts >= 0) & (starts < length)).all()
        if not in_order or (np.diff(self.offsets) < 1).any() or starts[first].any():
            return f"`document_starts` of a row are not 0 and then increasing numbers below {length}"
        return None


def map_shard(folder: Path, shard: Shard, manifest: Manifest) -> list[Chunk]:
    """Map a file into memory, after a check of its columns and number of rows."""
    path, length = folder / shard.file, manifest.sequence_length
    starts_kind, token_kinds = pa.list_(pa.int32()), (pa.list_(pa.uint16(), length), pa.list_(pa.uint32(), length))
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        found = [(column.type, column.null_count) for column in table.columns]
        if table.column_names != COLUMNS or found not in [[(kind, 0), (starts_kind, 0)] for kind in token_kinds]:
            raise pa.ArrowInvalid(f"its columns are not `input_ids` of {length} tokens and `document_starts`")
        if table.num_rows != shard.rows:
            raise pa.ArrowInvalid(f"it has {table.num_rows} rows, the manifest says {shard.rows}")
        table.validate(full=True)
        return [
            Chunk(tokens.flatten().to_numpy().reshape(-1, length), starts.offsets.to_numpy(), starts.values.to_numpy())
            for tokens, starts in zip(*(column.chunks for column in table.columns))
        ]
    except (OSError, pa.ArrowException, ValueError) as error:
        raise LRAttnResError(DAMAGED.format(path=path, problem=error, folder=folder)) from error


class PackedTokens(torch.utils.data.Dataset):
    """A split of a prepared folder, memory-mapped. Row -> `input_ids`, `position_ids`, `labels`, each int64 [length].

    `position_ids` restart with each document, so the model keeps documents apart; the end-of-text token is the last of
    its document. `labels` are the `input_ids`, with -100 for the first token of a document, which has no context.
    """

    def __init__(self, folder: str | os.PathLike, split: str = "train", verify: bool = True):
        """`verify`: see `verify_data`; files that have not changed since the last time are skipped."""
        self.folder, self.split = Path(folder), split
        self.manifest = Manifest.read(folder)
        if split not in self.manifest.splits:
            raise LRAttnResError(f"{folder} has no split {split!r}; it has {', '.join(self.manifest.splits)}.")
        if verify:
            verify_data(folder, progress_bar=True, split=split, again=False)
        self.sequence_length = self.manifest.sequence_length
        shards = self.manifest.splits[split].shards
        self._chunks = [chunk for shard in shards for chunk in map_shard(self.folder, shard, self.manifest)]
        self._ends = np.cumsum([len(chunk.tokens) for chunk in self._chunks])

    def __reduce__(self) -> tuple:
        return PackedTokens, (self.folder, self.split, False)  # a worker process maps the files itself

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        chunk = int(np.searchsorted(self._ends, index, side="right"))
        tokens, offsets, all_starts = self._chunks[chunk]
        row = index - int(self._ends[chunk])  # from the chunk's end: negative
        return make_row(tokens[row], all_starts[offsets[row - 1] : offsets[row]])


def make_row(tokens: np.ndarray, starts: np.ndarray) -> dict[str, torch.Tensor]:
    """A row as in `PackedTokens`. `starts`: where a document starts or goes on; the first start is 0."""
    input_ids = tokens.astype(np.int64)
    position_ids = np.arange(len(tokens)) - np.repeat(starts, np.diff(starts, append=len(tokens)))
    labels = np.where(position_ids == 0, -100, input_ids)
    columns = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
    return {name: torch.from_numpy(values) for name, values in columns.items()}
