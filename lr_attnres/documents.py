"""Documents of text files, JSONL files or a dataset of `datasets`, in a fixed order that can be resumed anywhere."""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


# The text that ships with the package, see corpora/LICENSE.md; a source of this name means it.
EMBEDDED = "sotu"
EMBEDDED_CORPUS = Path(__file__).parent / "corpora/state_of_the_union.jsonl"
SUFFIXES = (".txt", ".jsonl")
DATASET_SUFFIXES = (".parquet", ".arrow", ".csv", ".json")
ENDS_BYTES = 2**16


class Documents(ABC):
    """Iterate for the texts; `position` is where the last one ended, as JSON, and `resume(position)` goes on there."""

    @abstractmethod
    def __iter__(self) -> Iterator[str]: ...

    @property
    @abstractmethod
    def position(self) -> object: ...

    @abstractmethod
    def resume(self, position: Any) -> None: ...

    @abstractmethod
    def describe(self) -> list[dict]:
        """What identifies the sources, as JSON."""


def open_documents(
    sources: Sequence[str | os.PathLike], column: str = "text", name: str | None = None, split: str = "train"
) -> Documents:
    """The documents of `.txt` files (one each), `.jsonl` files (the field `column` of each line), folders of such
    files, or of one dataset of the Hub or of a local folder (streamed: configuration `name`, `split`, `column`)."""
    if not sources:
        raise ValueError(f"`sources` is empty: give files, folders, a dataset, or {EMBEDDED!r}, the embedded text.")
    if not all(os.fspath(source).strip() for source in sources):
        raise ValueError("`sources` has an empty name; for the current folder give '.'.")
    files = [_files_of(os.fspath(source)) for source in sources]
    if all(files):
        if name is not None or split != "train":
            raise ValueError("`name` and `split` choose a part of a dataset; text files have none.")
        return FileDocuments([path for paths in files for path in paths], column)
    if len(sources) > 1:
        dataset = sources[files.index([])]
        raise ValueError(f"{dataset} is read as a dataset, which must be the only source; prepare it on its own.")
    return DatasetDocuments(os.fspath(sources[0]), column, name, split)


def _files_of(source: str) -> list[Path]:
    """The text files that a source stands for; none for a dataset."""
    path = EMBEDDED_CORPUS if source == EMBEDDED else Path(source)
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        texts = [file for file in inside if file.suffix in SUFFIXES]
        others = [file for file in inside if file.suffix in DATASET_SUFFIXES]
        if texts and others:
            raise ValueError(
                f"{source} holds texts ({texts[0].name}) and a dataset ({others[0].name}): give one of them."
            )
        return texts
    if path.suffix not in SUFFIXES and (path.exists() or source.startswith((".", "/", "~"))):
        raise ValueError(f"{source} is neither a folder nor a file in {' or '.join(SUFFIXES)}.")
    if path.suffix in SUFFIXES and not path.exists():
        raise FileNotFoundError(f"{source} does not exist")
    return [path] if path.suffix in SUFFIXES else []


class FileDocuments(Documents):
    def __init__(self, paths: list[Path], column: str):
        self.paths, self.column = paths, column
        self.resume((0, 0, 0))

    def resume(self, position: Sequence[int]) -> None:
        self._file, self._offset, self._line = position

    @property
    def position(self) -> list[int]:
        return [self._file, self._offset, self._line]

    def describe(self) -> list[dict]:
        return [
            {"file": path.name, "bytes": path.stat().st_size, "ends_sha256": _hash_of_ends(path)}
            for path in self.paths
        ]

    def __iter__(self) -> Iterator[str]:
        while self._file < len(self.paths):
            path = self.paths[self._file]
            try:
                yield from self._texts(path) if path.suffix == ".txt" else self._lines(path)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not UTF-8 ({error.reason}): convert it first, e.g. with iconv."
                ) from error
            if path.suffix == ".jsonl":
                self.resume((self._file + 1, 0, 0))

    def _texts(self, path: Path) -> Iterator[str]:
        text = path.read_text(encoding="utf-8-sig")
        self.resume((self._file + 1, 0, 0))
        yield text

    def _lines(self, path: Path) -> Iterator[str]:
        with open(path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                self._offset, self._line = self._offset + len(line), self._line + 1
                if line.strip():
                    yield self._text(line, f"{path}, line {self._line}")

    def _text(self, line: bytes, place: str) -> str:
        content = line.decode("utf-8-sig")
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place} is not JSON: {error}.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{place} is not a JSON object.")
        return _checked_text(record, self.column, place)


def _hash_of_ends(path: Path) -> str:
    """Of the first and the last 64 KiB: cheap for a large file, and the same for a copy of it."""
    with open(path, "rb") as file:
        ends = file.read(ENDS_BYTES)
        file.seek(max(file.tell(), path.stat().st_size - ENDS_BYTES))
        return hashlib.sha256(ends + file.read()).hexdigest()


class DatasetDocuments(Documents):
    def __init__(self, path: str, column: str, name: str | None, split: str):
        from datasets import load_dataset

        self.path = path
        self.source = {"dataset": path, "name": name, "split": split}
        self.column = column
        try:
            self.dataset = load_dataset(path, name, split=split, streaming=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"the dataset {path!r} (split {split!r}) cannot be opened: {error}") from error
        columns = self.dataset.column_names
        if columns is not None:
            _check_column(columns, column, path)
            self.dataset = self.dataset.select_columns(column)  # leaves the others unread

    def resume(self, position: dict) -> None:
        self.dataset.load_state_dict(position)

    @property
    def position(self) -> dict:
        return self.dataset.state_dict()

    def describe(self) -> list[dict]:
        return [self.source]

    def __iter__(self) -> Iterator[str]:
        for record in self.dataset:
            yield _checked_text(record, self.column, self.path)


def _check_column(columns: Iterable[str], column: str, place: str) -> None:
    if column not in columns:
        has = ", ".join(sorted(columns))
        raise ValueError(f"{place} has no column {column!r}; it has {has}: name one as `column` of `prepare`.")


def _checked_text(record: dict, column: str, place: str) -> str:
    _check_column(record, column, place)
    text = record[column]
    if text is not None and not isinstance(text, str):
        raise ValueError(
            f"{place}: {column!r} is a {type(text).__name__}, not a text: name another `column` of `prepare`."
        )
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can express and UTF-8 cannot
        raise ValueError(f"{place}: {column!r} is not Unicode text ({error.reason}).") from error
    return text or ""
