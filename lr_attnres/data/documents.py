"""Documents from text files, JSONL files or a dataset of `datasets`, in a fixed order that can be resumed."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import LRAttnResError
from ..sources import check_not_special


# The source name of the text that ships with the package, see corpora/LICENSE.md.
EMBEDDED = "sotu"
EMBEDDED_CORPUS = Path(__file__).parent / "corpora/state_of_the_union.jsonl"
SUFFIXES = (".txt", ".jsonl")
DATASET_SUFFIXES = (".parquet", ".arrow", ".csv", ".json")
ENDS_BYTES = 2**16


def open_documents(
    sources: Sequence[str | os.PathLike], column: str = "text", name: str | None = None, split: str = "train"
) -> "Documents":
    """The documents of files and folders, or of one dataset: an iterable of texts.

    Its `position` (JSON) is the end of the last text, `resume(position)` continues there, and `describe()` (JSON)
    identifies the sources: a resumed `prepare_data` must find the same.

    A `.txt` file is one document. A `.jsonl` file has one in the field `column` of every line. A dataset, from the
    Hub or a local folder, is streamed; `name` is its configuration.
    """
    if not sources:
        raise LRAttnResError(f"`sources` is empty: give files, folders, a dataset or {EMBEDDED!r} (built-in text).")
    if not all(os.fspath(source).strip() for source in sources):
        raise LRAttnResError("`sources` has an empty name; for the current folder give '.'.")
    files = [_files_of(os.fspath(source)) for source in sources]
    if all(files):
        if name is not None or split != "train":
            raise LRAttnResError("`name` and `split` choose a part of a dataset; text files have none.")
        return FileDocuments([path for paths in files for path in paths], column)
    if len(sources) > 1:
        dataset = sources[files.index([])]
        raise LRAttnResError(f"{dataset} is a dataset, which must be the only source; prepare it on its own.")
    return DatasetDocuments(os.fspath(sources[0]), column, name, split)


def _files_of(source: str) -> list[Path]:
    """The text files of a source; empty if the source is a dataset."""
    path = EMBEDDED_CORPUS if source == EMBEDDED else Path(source)
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        texts = [file for file in inside if file.suffix in SUFFIXES]
        tables = [file.name for file in inside if file.suffix in DATASET_SUFFIXES]
        if texts and tables:
            raise LRAttnResError(
                f"{source} holds texts ({texts[0].name}) and a dataset ({tables[0]}): give one of them."
            )
        return texts
    if path.suffix in SUFFIXES:
        if not path.exists():
            raise FileNotFoundError(f"{source} does not exist")
        check_not_special(path)
        return [path]
    if path.exists() or source.startswith((".", "/", "~")):
        raise LRAttnResError(f"{source} is neither a folder nor a {' or '.join(SUFFIXES)} file.")
    return []


class FileDocuments:
    def __init__(self, paths: list[Path], column: str):
        self.paths, self.column = paths, column
        self.position = [0, 0, 0]  # file, offset in bytes, line

    def resume(self, position: Any) -> None:
        self.position = position

    def describe(self) -> list[dict]:
        return [_describe_file(path) for path in self.paths]

    def __iter__(self) -> Iterator[str]:
        while (number := self.position[0]) < len(self.paths):
            path = self.paths[number]
            try:
                if path.suffix == ".jsonl":
                    yield from self._lines(path)
                    self.position = [number + 1, 0, 0]
                else:
                    text = path.read_text(encoding="utf-8-sig")
                    self.position = [number + 1, 0, 0]  # before the yield: the end of the text
                    yield text
            except UnicodeDecodeError as error:
                raise LRAttnResError(f"{path} is not UTF-8 ({error.reason}): convert it, e.g. with iconv.") from error

    def _lines(self, path: Path) -> Iterator[str]:
        number, offset, num_lines = self.position
        with open(path, "rb") as file:
            file.seek(offset)
            for line in file:
                offset, num_lines = offset + len(line), num_lines + 1
                self.position = [number, offset, num_lines]
                if not line.strip():
                    continue
                place, content = f"{path}, line {num_lines}", line.decode("utf-8-sig")
                try:
                    record = json.loads(content)
                except (ValueError, RecursionError) as error:
                    raise LRAttnResError(f"{place} is not JSON: {error}.") from error
                if not isinstance(record, dict):
                    raise LRAttnResError(f"{place} is not a JSON object.")
                yield _checked_text(record, self.column, place)


def _describe_file(path: Path) -> dict:
    """Name, size, and a hash of the first and the last 64 KiB: cheap for a large file, and the same for a copy."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        ends = file.read(ENDS_BYTES)
        file.seek(max(file.tell(), size - ENDS_BYTES))
        digest = hashlib.sha256(ends + file.read()).hexdigest()
    return {"file": path.name, "bytes": size, "ends_sha256": digest}


class DatasetDocuments:
    def __init__(self, path: str, column: str, name: str | None, split: str):
        from datasets import load_dataset

        self.column, self.path, self.source = column, path, {"dataset": path, "name": name, "split": split}
        try:
            self.dataset = load_dataset(path, name, split=split, streaming=True)
        except (OSError, ValueError) as error:
            raise LRAttnResError(f"the dataset {path!r} (split {split!r}) cannot be opened: {error}") from error
        columns = self.dataset.column_names
        if columns is not None:
            _check_column(columns, column, path)
            self.dataset = self.dataset.select_columns(column)  # do not read the others

    def resume(self, position: Any) -> None:
        self.dataset.load_state_dict(position)

    @property
    def position(self) -> dict:
        return self.dataset.state_dict()

    def describe(self) -> list[dict]:
        return [self.source]

    def __iter__(self) -> Iterator[str]:
        for record in self.dataset:
            yield _checked_text(record, self.column, self.path)


Documents: TypeAlias = FileDocuments | DatasetDocuments


def _check_column(columns: Iterable[str], column: str, place: str) -> None:
    if column not in columns:
        has = ", ".join(sorted(columns))
        raise LRAttnResError(f"{place} has no column {column!r}; it has {has}: name one as `column` of `prepare`.")


def _checked_text(record: dict, column: str, place: str) -> str:
    _check_column(record, column, place)
    text = record[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise LRAttnResError(f"{place}: {column!r} is a {type(text).__name__}, not a text: name another `column`.")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair: valid in JSON, not in UTF-8
        raise LRAttnResError(f"{place}: {column!r} is not Unicode text ({error.reason}).") from error
    return text
