"""Documents become rows of tokens in Arrow shards, packed end to end; `PackedTokens` maps them back into memory."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock, Timeout
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .documents import Documents, open_documents
from .errors import one_line
from .tokenizer import MIN_VOCAB_SIZE, cl100k_tokenizer, train_tokenizer


FORMAT = 1
SPLITS = ("train", "validation")
BATCH_CHARACTERS = 4_000_000
SHARD_TOKENS = 2**24
# A folder, Hub repository or `cl100k_base.tiktoken` file, or the object
TokenizerSource = str | os.PathLike | PreTrainedTokenizerBase


def prepare(
    sources: str | os.PathLike | list[str | os.PathLike],
    output_dir: str | os.PathLike,
    tokenizer: TokenizerSource | None = None,
    train_tokenizer: int | None = None,
    sequence_length: int = 2048,
    validation_fraction: float = 0.01,
    max_tokens: int | None = None,
    column: str = "text",
    name: str | None = None,
    split: str = "train",
    shard_tokens: int = SHARD_TOKENS,
    progress_bar: bool = True,
) -> dict:
    """Tokenize documents and pack them into rows of `sequence_length`; returns the manifest of the folder.

    Run again after an interruption it goes on after the last finished shard, and the result is the same. Run again on
    a finished folder it checks every shard against its hash.

    Args:
        sources: files, folders or a dataset, see `open_documents` (also for `column`, `name` and `split`).
        output_dir: gets `train/`, `validation/`, `tokenizer/` and `manifest.json`.
        tokenizer: a folder, Hub repository, `cl100k_base.tiktoken` file or object; default: cl100k_base.
        train_tokenizer: instead, train a byte-level BPE of this many tokens on the documents.
        validation_fraction: of the documents, chosen by their content, so that copies of one are on the same side.
        max_tokens: stop after the document that reaches this number.
        shard_tokens: tokens of a shard, which is held in memory until it is full.
    """
    sources = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    _check_options(tokenizer, train_tokenizer, sequence_length, validation_fraction, max_tokens, shard_tokens)
    output = _checked_output(output_dir)
    documents = open_documents(sources, column, name, split)
    settings = {
        "sources": documents.describe(),
        "column": column,
        "tokenizer": f"BPE of {train_tokenizer} tokens" if train_tokenizer is not None else _tokenizer_name(tokenizer),
        "sequence_length": sequence_length,
        "validation_fraction": validation_fraction,
        "max_tokens": max_tokens,
        "shard_tokens": shard_tokens,
    }
    if not output.exists():  # it appears at once and whole, so that a finished one needs no lock
        with _alone_in(output):
            if not output.exists():
                return _prepare(documents, output, tokenizer, train_tokenizer, settings, progress_bar)
    return _verify_finished(output, settings, progress_bar)


@contextmanager
def _alone_in(output: Path) -> Iterator[None]:
    """Of several processes one works, the others wait and find the result."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=output.parent):  # where no file can be made, a FileLock would try for ever
            pass
    except OSError as error:
        raise ValueError(f"`output_dir` {output} cannot be created: {error.strerror}; choose another.") from error
    lock = FileLock(f"{output}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print(f"another prepare is at work in {output}: waiting until it ends ({lock.lock_file})", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # while it is ours: afterwards it may be that of the next
        lock.release()


def _prepare(
    documents: Documents,
    output: Path,
    tokenizer: TokenizerSource | None,
    train_tokenizer: int | None,
    settings: dict,
    progress_bar: bool,
) -> dict:
    work = output.with_name(output.name + ".partial")
    _start_or_resume(work, settings)
    try:
        if not (work / "manifest.json").exists():
            fraction = settings["validation_fraction"]
            chosen = _tokenizer_in(work, tokenizer, train_tokenizer, documents, fraction, progress_bar)
            packer = _Packer(work, chosen, settings)
            packer.restore(documents)
            with tqdm(total=settings["max_tokens"], unit=" tokens", unit_scale=True, disable=not progress_bar) as bar:
                packer.run(documents, bar)
            packer.finish()
    except Exception:
        if not (work / "progress.npz").exists():  # nothing to go on from: the command, corrected, starts afresh
            shutil.rmtree(work, ignore_errors=True)
        raise
    for name in ("progress.npz", "progress.tmp", "settings.json"):
        (work / name).unlink(missing_ok=True)
    os.replace(work, output)
    manifest = read_manifest(output)
    _check_same_settings(output, manifest["settings"], settings)
    return manifest


def _check_options(
    tokenizer: TokenizerSource | None,
    train_tokenizer: int | None,
    sequence_length: int,
    validation_fraction: float,
    max_tokens: int | None,
    shard_tokens: int,
) -> None:
    if tokenizer is not None and train_tokenizer is not None:
        raise ValueError("`tokenizer` and `train_tokenizer` exclude each other: give one of them.")
    if train_tokenizer is not None and train_tokenizer < MIN_VOCAB_SIZE:
        raise ValueError(
            f"`train_tokenizer` is {train_tokenizer}; it must be at least {MIN_VOCAB_SIZE}: all bytes and end-of-text."
        )
    if sequence_length < 2:
        raise ValueError(f"`sequence_length` is {sequence_length}; a row needs at least 2 tokens.")
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"`validation_fraction` is {validation_fraction}; it must lie in [0, 1).")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"`max_tokens` is {max_tokens}; it must be at least 1, or None.")
    if shard_tokens < sequence_length:
        raise ValueError(
            f"`shard_tokens` is {shard_tokens}, less than one row of `sequence_length` {sequence_length}."
        )


def _checked_output(output_dir: str | os.PathLike) -> Path:
    output = Path(output_dir)
    if output.name in ("", ".."):
        raise ValueError(f"`output_dir` is {os.fspath(output_dir)!r}; it must be the name of a folder to create.")
    return output


class _Packer:
    """Cuts the token stream of each split into rows, writes full shards, and remembers how far it came."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, settings: dict):
        self.folder, self.tokenizer, self.settings = folder, tokenizer, settings
        self.length = settings["sequence_length"]
        self.shard_rows = settings["shard_tokens"] // self.length
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        self.pieces: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        self.counts: dict[str, dict[str, Any]] = {
            split: {"documents": 0, "tokens": 0, "rows": 0, "shards": []} for split in SPLITS
        }

    @property
    def num_tokens(self) -> int:
        return sum(counts["tokens"] for counts in self.counts.values())

    def run(self, documents: Documents, bar: tqdm) -> None:
        bar.update(self.num_tokens)
        if self.is_full():
            return
        for batch, position in _read_ahead(_batches(documents)):
            before, shards = self.num_tokens, len(self._shards())
            self.add(batch)
            for split in SPLITS:
                while self.pending_rows(split) >= self.shard_rows:
                    self.write_shard(split, self.shard_rows)
            if len(self._shards()) > shards:
                self.save(position)
            bar.update(self.num_tokens - before)
            if self.is_full():
                return

    def is_full(self) -> bool:
        return self.settings["max_tokens"] is not None and self.num_tokens >= self.settings["max_tokens"]

    def add(self, batch: list[str]) -> None:
        """Take in documents, until `max_tokens` is reached."""
        # Text that looks like a special token stays text: only this function ends documents.
        encoded = self.tokenizer(
            batch, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
        )["input_ids"]
        for text, tokens in zip(batch, encoded):
            split = _split_of(text, self.settings["validation_fraction"])
            self.pieces[split].append(np.array([*tokens, self.tokenizer.eos_token_id], dtype=self.dtype))
            self.counts[split]["documents"] += 1
            self.counts[split]["tokens"] += len(tokens) + 1
            if self.is_full():
                return

    def pending_rows(self, split: str) -> int:
        counts = self.counts[split]
        return counts["tokens"] // self.length - counts["rows"]

    def write_shard(self, split: str, rows: int) -> None:
        pieces, size = self.pieces[split], rows * self.length
        flat = np.concatenate(pieces)
        document_starts = np.cumsum([0, *map(len, pieces)])[:-1]
        rest_starts = document_starts[document_starts > size] - size
        self.pieces[split] = np.split(flat[size:], rest_starts) if len(flat) > size else []
        counts = self.counts[split]
        path = self.folder / split / f"{len(counts['shards']):05d}.arrow"
        path.parent.mkdir(exist_ok=True)
        _write_arrow(path, flat[:size].reshape(rows, self.length), document_starts[document_starts < size])
        counts["shards"].append({"file": f"{split}/{path.name}", "rows": rows, "sha256": _file_hash(path)})
        counts["rows"] += rows

    def save(self, position: object) -> None:
        """One file with everything that the rest of the work depends on."""
        arrays: dict[str, Any] = {}
        for split in SPLITS:
            arrays[f"{split}_tokens"] = np.concatenate([np.zeros(0, self.dtype), *self.pieces[split]])
            arrays[f"{split}_lengths"] = np.array([len(piece) for piece in self.pieces[split]], dtype=np.int64)
        state = json.dumps({"position": position, "counts": self.counts})
        with open(self.folder / "progress.tmp", "wb") as file:
            np.savez(file, state=np.array(state), **arrays)
        os.replace(self.folder / "progress.tmp", self.folder / "progress.npz")

    def restore(self, documents: Documents) -> None:
        if not (self.folder / "progress.npz").exists():
            return
        with np.load(self.folder / "progress.npz") as saved:
            state = json.loads(str(saved["state"]))
            for split in SPLITS:
                ends = np.cumsum(saved[f"{split}_lengths"])
                self.pieces[split] = np.split(saved[f"{split}_tokens"], ends[:-1]) if len(ends) else []
        self.counts = state["counts"]
        documents.resume(state["position"])

    def finish(self) -> None:
        """The last, shorter shards and the manifest. Less than a row is left over per split, and dropped."""
        try:
            self._check_sizes()
        except ValueError:
            shutil.rmtree(self.folder)
            raise
        for split in SPLITS:
            if rows := self.pending_rows(split):
                self.write_shard(split, rows)
        manifest = {
            "format": FORMAT,
            "settings": self.settings,
            "tokenizer": {
                "name": self.settings["tokenizer"],
                "sha256": _tokenizer_hash(self.tokenizer),
                "vocab_size": self.vocab_size,
                "eos_token_id": self.tokenizer.eos_token_id,
            },
            "splits": {split: counts for split, counts in self.counts.items() if counts["rows"]},
        }
        _write_json(self.folder / "manifest.json", manifest)

    def _check_sizes(self) -> None:
        if not self.num_tokens:
            raise ValueError("the corpus is empty: no document has any text.")
        wanted = SPLITS if self.settings["validation_fraction"] else SPLITS[:1]
        for split in wanted:
            tokens, documents = self.counts[split]["tokens"], self.counts[split]["documents"]
            if tokens < self.length:
                raise ValueError(
                    f"the corpus is too small: the {split} split has {tokens} tokens ({documents} documents), less "
                    f"than one row of `sequence_length` {self.length}; shorten it or change `validation_fraction` "
                    f"({self.settings['validation_fraction']}; 0 makes no validation split)."
                )

    def _shards(self) -> list[dict]:
        return [shard for counts in self.counts.values() for shard in counts["shards"]]


def _batches(documents: Documents) -> Iterator[tuple[list[str], object]]:
    """Lists of documents that are not empty, and where each list ends."""
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


def _read_ahead(items: Iterator) -> Iterator:
    """The same items, the next one read while one is worked on (tokenizers run in threads of their own)."""
    end = object()
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = reader.submit(next, items, end)
            yield item


def _split_of(text: str, validation_fraction: float) -> str:
    """Depends on nothing but the text."""
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    return "validation" if int.from_bytes(digest) / 2**48 < validation_fraction else "train"


def _write_arrow(path: Path, rows: np.ndarray, document_starts: np.ndarray) -> None:
    """rows [N, length] of tokens; where documents start, counted through all rows."""
    length = rows.shape[1]
    row_starts = np.arange(0, rows.size + 1, length)
    starts = np.union1d(document_starts, row_starts[:-1])  # a row starts afresh, whatever it starts with
    features = Features(
        {
            "input_ids": List(Value(rows.dtype.name), length=length),
            "document_starts": List(Value("int32")),
        }
    )
    table = pa.table(
        {
            "input_ids": pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), length),
            "document_starts": pa.ListArray.from_arrays(
                pa.array(np.searchsorted(starts, row_starts).astype(np.int32)),
                pa.array((starts % length).astype(np.int32)),
            ),
        }
    )
    temporary = path.with_suffix(".tmp")
    with ArrowWriter(path=str(temporary), features=features) as writer:
        writer.write_table(table)
        writer.finalize()
    os.replace(temporary, path)


def _start_or_resume(work: Path, settings: dict) -> None:
    known = work / "settings.json"
    if known.exists():
        _check_same_settings(work, json.loads(known.read_text()), settings)
        return
    work.mkdir(parents=True, exist_ok=True)
    _write_json(known, settings)


def _write_json(path: Path, content: dict) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)


def _verify_finished(folder: Path, settings: dict, progress_bar: bool) -> dict:
    if not (folder / "manifest.json").exists():
        raise ValueError(f"{folder} exists and holds no prepared tokens (no manifest.json): choose another folder.")
    manifest = read_manifest(folder)
    _check_same_settings(folder, manifest["settings"], settings)
    verify(folder, progress_bar)
    return manifest


def _check_same_settings(folder: Path, there: dict, here: dict) -> None:
    for key, value in json.loads(json.dumps(here)).items():
        if there.get(key) != value:
            raise ValueError(
                f"{folder} was made with other settings (`{key}` is {there.get(key)} there, {value} here): choose "
                "another folder, or delete this one."
            )


def verify(folder: str | os.PathLike, progress_bar: bool = False) -> None:
    """Compare every shard of a prepared folder with the hash in its manifest."""
    folder = Path(folder)
    shards = [shard for counts in read_manifest(folder)["splits"].values() for shard in counts["shards"]]
    for shard in tqdm(shards, desc="Checking", unit=" shards", disable=not progress_bar):
        path = folder / shard["file"]
        if not path.exists() or _file_hash(path) != shard["sha256"]:
            raise ValueError(f"{path} is missing or damaged: delete {folder} and prepare it again.")


def read_manifest(folder: str | os.PathLike) -> dict:
    """What `prepare` wrote about a folder."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except FileNotFoundError as error:
        partial = folder.with_name(folder.name + ".partial")
        hint = f"{partial} is unfinished: run the same `prepare` again" if partial.exists() else "run `prepare` first"
        raise ValueError(f"{folder} holds no prepared tokens (no manifest.json); {hint}.") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / 'manifest.json'} cannot be read: {error}") from error
    if not isinstance(manifest, dict):
        raise ValueError(f"{folder / 'manifest.json'} is not a JSON object: prepare the folder again.")
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{folder} has format {manifest.get('format')}, this version reads {FORMAT}: prepare it again."
        )
    for key in ("settings", "tokenizer", "splits"):
        if not isinstance(manifest.get(key), dict):
            raise ValueError(f"{folder / 'manifest.json'} has no `{key}`: prepare the folder again.")
    for part, key in (("settings", "sequence_length"), ("tokenizer", "vocab_size"), ("tokenizer", "eos_token_id")):
        if not isinstance(manifest[part].get(key), int):
            raise ValueError(f"{folder / 'manifest.json'} has no `{key}` in `{part}`: prepare the folder again.")
    return manifest


def load_data_tokenizer(folder: str | os.PathLike) -> PreTrainedTokenizerBase:
    """The tokenizer that a folder was prepared with."""
    folder = Path(folder) / "tokenizer"
    try:
        if not folder.is_dir():
            raise FileNotFoundError("there is no such folder")
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # `tokenizers` raises nothing more special
        reason = one_line(error).rstrip(".")
        raise ValueError(f"the tokenizer {folder} cannot be loaded ({reason}): prepare the data again.") from error


def _tokenizer_name(tokenizer: TokenizerSource | None) -> str:
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return f"{tokenizer.name_or_path or type(tokenizer).__name__} {_tokenizer_hash(tokenizer)[:16]}"
    return "cl100k_base" if tokenizer is None else os.fspath(tokenizer)


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of the vocabulary, the specials and, in a fast tokenizer, of everything else that decides about tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(f"{content}{tokenizer.eos_token_id}".encode()).hexdigest()


def _tokenizer_in(
    work: Path,
    given: TokenizerSource | None,
    vocab_size: int | None,
    documents: Documents,
    fraction: float,
    progress_bar: bool,
) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder; at the first start, the given one or a new one is put there."""
    folder = work / "tokenizer"
    if not folder.exists():
        if vocab_size is not None:
            start = documents.position
            texts = (text for text in documents if _split_of(text, fraction) == "train")
            given = train_tokenizer(texts, vocab_size, progress_bar=progress_bar)
            documents.resume(start)
        tokenizer = _load_tokenizer(given)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer {_tokenizer_name(given)} has no end-of-text token: set its `eos_token`.")
        shutil.rmtree(work / "tokenizer.tmp", ignore_errors=True)
        tokenizer.save_pretrained(work / "tokenizer.tmp")
        os.replace(work / "tokenizer.tmp", folder)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _load_tokenizer(given: TokenizerSource | None) -> PreTrainedTokenizerBase:
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    if given is None or given == "cl100k_base" or Path(given).is_file():
        return cl100k_tokenizer(None if given == "cl100k_base" else given)
    try:
        return AutoTokenizer.from_pretrained(given, trust_remote_code=False)
    except Exception as error:  # `tokenizers` raises nothing more special
        raise ValueError(
            f"the tokenizer {os.fspath(given)!r} cannot be loaded; give a folder or repository with a tokenizer.json, "
            f"or a cl100k_base.tiktoken file ({one_line(error)})"
        ) from error


def _file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class PackedTokens(torch.utils.data.Dataset):
    """A split of a prepared folder, memory-mapped. Row -> `input_ids`, `position_ids`, `labels`, each int64 [length].

    `position_ids` restart with each document, so the model keeps documents apart; the end-of-text token is the last of
    its document. `labels` are the `input_ids`, but -100 for the first token of a document: nothing before predicts it.
    """

    def __init__(self, folder: str | os.PathLike, split: str = "train"):
        self.folder, self.split = Path(folder), split
        self.manifest = read_manifest(folder)
        if split not in self.manifest["splits"]:
            raise ValueError(f"{folder} has no split {split!r}; it has {', '.join(self.manifest['splits'])}.")
        self.sequence_length = self.manifest["settings"]["sequence_length"]
        shards = [self._open(shard) for shard in self.manifest["splits"][split]["shards"]]
        # Views of the mapped files, chunk by chunk: tokens [rows, length], and the list of starts of each row.
        self._chunks = [chunk for shard in shards for chunk in self._views(shard)]
        self._ends = np.cumsum([len(tokens) for tokens, _, _ in self._chunks])

    def __reduce__(self) -> tuple:
        return PackedTokens, (self.folder, self.split)  # a worker process maps the files itself

    def _open(self, shard: dict) -> Dataset:
        path = self.folder / shard["file"]
        try:
            rows = Dataset.from_file(str(path))
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{path} is missing or damaged ({error}): prepare the folder again.") from error
        if len(rows) != shard["rows"]:
            raise ValueError(f"{path} has {len(rows)} rows, the manifest says {shard['rows']}: prepare it again.")
        return rows

    def _views(self, shard: Dataset) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        columns = (shard.data.column(name).chunks for name in ("input_ids", "document_starts"))
        for tokens, starts in zip(*columns):
            rows = tokens.flatten().to_numpy().reshape(-1, self.sequence_length)
            yield rows, starts.offsets.to_numpy(), starts.values.to_numpy()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        chunk = int(np.searchsorted(self._ends, index, side="right"))
        tokens, offsets, all_starts = self._chunks[chunk]
        row = index - int(self._ends[chunk])  # from the chunk's end: negative
        starts = all_starts[offsets[row - 1] : offsets[row]]
        input_ids = tokens[row].astype(np.int64)
        position_ids = np.arange(self.sequence_length) - np.repeat(
            starts, np.diff(starts, append=self.sequence_length)
        )
        labels = np.where(position_ids == 0, -100, input_ids)
        columns = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
        return {name: torch.from_numpy(values) for name, values in columns.items()}


def check_fits(vocab_size: int, max_position_embeddings: int, manifest: dict) -> None:
    """Raise where a model of these sizes cannot read the data."""
    tokens, length = manifest["tokenizer"]["vocab_size"], manifest["settings"]["sequence_length"]
    if vocab_size < tokens:
        raise ValueError(f"`vocab_size` is {vocab_size}, but the data has {tokens} different tokens.")
    if max_position_embeddings < length:
        raise ValueError(f"`max_position_embeddings` is {max_position_embeddings}, less than a row ({length} tokens).")
