"""`prepare_data`: documents become a folder of packed rows of tokens, which `PackedTokens` maps into memory."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..errors import LRAttnResError
from . import tokenizers
from .documents import Documents, open_documents
from .manifest import FILENAME, Manifest, write_json
from .packed_tokens import verify_data
from .packer import PROGRESS_FILE, Packer, PackingSettings, split_of


SETTINGS_FILE = "settings.json"
# A folder, a Hub repository or a `cl100k_base.tiktoken` file; the object; or the size of a tokenizer to train
TokenizerSource = str | os.PathLike | PreTrainedTokenizerBase | int


def prepare_data(
    sources: str | os.PathLike | list[str | os.PathLike],
    output_dir: str | os.PathLike,
    tokenizer: str | os.PathLike | PreTrainedTokenizerBase | None = None,
    train_tokenizer: int | None = None,
    sequence_length: int = 2048,
    validation_fraction: float = 0.01,
    max_tokens: int | None = None,
    column: str = "text",
    name: str | None = None,
    split: str = "train",
    shard_tokens: int = 2**24,
    progress_bar: bool = True,
) -> Manifest:
    """Tokenize documents and pack them into rows of `sequence_length`; returns the manifest of the folder.

    After an interruption, the same call resumes after the last finished shard and gives the same result. On a
    finished folder, it checks every shard against its hash.

    Args:
        sources: files, folders or a dataset, see `open_documents` (also for `column`, `name` and `split`).
        output_dir: gets `train/`, `validation/`, `tokenizer/` and `manifest.json`.
        tokenizer: a folder, Hub repository, `cl100k_base.tiktoken` file or object; default: cl100k_base.
        train_tokenizer: train a byte-level BPE of this many tokens on the documents instead.
        validation_fraction: fraction of the documents to hold out, chosen by a hash of their text.
        max_tokens: stop after the document that reaches this number.
        shard_tokens: tokens per shard; a shard is held in memory until it is full.
    """
    sources = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    if tokenizer is not None and train_tokenizer is not None:
        raise LRAttnResError("`tokenizer` and `train_tokenizer` exclude each other: give one of them.")
    if train_tokenizer is not None:
        tokenizers.check_vocabulary_size(train_tokenizer, "train_tokenizer")
    output = Path(output_dir)
    if output.name in ("", ".."):
        raise LRAttnResError(f"`output_dir` is {os.fspath(output_dir)!r}; it must be the name of a folder to create.")
    documents = open_documents(sources, column, name, split)
    source = tokenizer if train_tokenizer is None else train_tokenizer
    settings = PackingSettings(
        sources=documents.describe(),
        column=column,
        tokenizer=_name_of(source),
        sequence_length=sequence_length,
        validation_fraction=validation_fraction,
        max_tokens=max_tokens,
        shard_tokens=shard_tokens,
    )
    is_new = not output.exists()  # a finished folder is complete and needs no lock
    if is_new:
        with _exclusive_access(output):
            if is_new := not output.exists():
                _pack_documents(documents, output, source, settings, progress_bar)
    if not (output / FILENAME).exists():
        raise LRAttnResError(f"{output} exists and holds no prepared tokens (no {FILENAME}): choose another folder.")
    manifest = Manifest.read(output)
    _check_same_settings(output, manifest.settings, settings)
    if not is_new:
        verify_data(output, progress_bar)
    return manifest


@contextmanager
def _exclusive_access(output: Path) -> Iterator[None]:
    """Let one process work on `output`; the others wait, and find the finished folder."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=output.parent).close()  # where files cannot be created, FileLock would retry forever
    except OSError as error:
        raise LRAttnResError(f"`output_dir` {output} cannot be created: {error.strerror}; choose another.") from error
    lock = FileLock(f"{output}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print(f"another process prepares {output}: waiting for it ({lock.lock_file})", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        # Delete before releasing: afterwards the file may belong to the next process.
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _pack_documents(
    documents: Documents, output: Path, source: TokenizerSource | None, settings: PackingSettings, progress_bar: bool
) -> None:
    """Work in `OUTPUT.partial`, where an interrupted call left its progress, and rename that at the end."""
    partial = output.with_name(output.name + ".partial")
    settings_file = partial / SETTINGS_FILE
    if settings_file.exists():
        _check_same_settings(partial, json.loads(settings_file.read_text()), settings)
    else:
        partial.mkdir(parents=True, exist_ok=True)
        write_json(settings_file, asdict(settings))
    try:
        if not (partial / FILENAME).exists():
            tokenizer = _save_tokenizer(partial, source, documents, settings, progress_bar)
            packer = Packer(partial, tokenizer, settings)
            packer.restore_progress(documents)
            with tqdm(total=settings.max_tokens, unit=" tokens", unit_scale=True, disable=not progress_bar) as bar:
                packer.pack(documents, bar)
            packer.finish()
    except Exception:
        if not (partial / PROGRESS_FILE).exists():  # nothing to resume from: the corrected command starts afresh
            shutil.rmtree(partial, ignore_errors=True)
        raise
    for name in (PROGRESS_FILE, "progress.tmp", SETTINGS_FILE):
        (partial / name).unlink(missing_ok=True)
    os.replace(partial, output)


def _check_same_settings(folder: Path, saved: dict[str, Any], settings: PackingSettings) -> None:
    for key, value in json.loads(json.dumps(asdict(settings))).items():
        if saved.get(key) != value:
            raise LRAttnResError(
                f"{folder} was made with other settings (`{key}` was {saved.get(key)}, now it is {value}): choose "
                "another folder, or delete this one."
            )


def _save_tokenizer(
    partial: Path, source: TokenizerSource | None, documents: Documents, settings: PackingSettings, progress_bar: bool
) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder. The first call loads or trains it, and saves it there."""
    folder = partial / "tokenizer"
    if not folder.exists():
        tokenizer: PreTrainedTokenizerBase
        if isinstance(source, PreTrainedTokenizerBase):
            tokenizer = source
        elif isinstance(source, int):
            start = documents.position
            texts = (text for text in documents if split_of(text, settings.validation_fraction) == "train")
            tokenizer = tokenizers.train_tokenizer(texts, source, progress_bar)
            documents.resume(start)
        else:
            tokenizer = tokenizers.open_tokenizer(source)
        if tokenizer.eos_token_id is None:
            raise LRAttnResError(f"the tokenizer {_name_of(source)} has no end-of-text token: set its `eos_token`.")
        temporary = partial / "tokenizer.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        tokenizer.save_pretrained(temporary)
        os.replace(temporary, folder)
    return tokenizers.load_tokenizer(folder)


def _name_of(source: TokenizerSource | None) -> str:
    if isinstance(source, int):
        return f"BPE of {source} tokens"
    if isinstance(source, PreTrainedTokenizerBase):
        return f"{source.name_or_path or type(source).__name__} {tokenizers.tokenizer_hash(source)[:16]}"
    return "cl100k_base" if source is None else os.fspath(source)
