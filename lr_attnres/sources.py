"""What a user names: a file or folder on this machine, or a Hub repository; and JSON files in it."""

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from .errors import HubError, LRAttnResError, clear_hub_errors, explain_file_error, one_line


REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")
SPECIAL_FILES = {
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


def check_not_special(path: Path) -> None:
    """Raise for a pipe, socket or device, or a link to one: reading it may never end."""
    kind = SPECIAL_FILES.get(stat.S_IFMT(path.stat().st_mode))
    if kind is not None:
        raise LRAttnResError(f"{path} is a {kind}, not a file or folder: copy its contents into a file.")


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LRAttnResError(f"{path} cannot be read: {explain_file_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise LRAttnResError(f"{path} is not JSON: {one_line(error)}.") from error
    if not isinstance(content, dict):
        raise LRAttnResError(f"{path} is not a JSON object.")
    return content


def public_name(name_or_path: str) -> str:
    """For a card, which is public: the name on the Hub, or the last part of a folder's path."""
    is_hub_name = REPO_ID.fullmatch(name_or_path) and not Path(name_or_path).exists()
    return name_or_path if is_hub_name else Path(name_or_path).name


def local_path(source: str | os.PathLike, revision: str | None = None) -> Path | None:
    """The path if `source` exists on this machine; None if it looks like a Hub repository (owner/name)."""
    path, name = Path(source), os.fspath(source)
    if name and path.exists():
        check_not_special(path)
        if revision is not None:
            raise LRAttnResError(f"`revision` goes with a Hub repository; {source} is on this machine.")
        return path
    if not REPO_ID.fullmatch(name) or name.endswith(".pt"):
        raise LRAttnResError(f"{name!r} is not on this machine, nor a Hub repository of the form owner/name.")
    return None


@contextmanager
def hub_source(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn errors of a download into a `HubError` that also says that `repo_id` is no local path."""
    try:
        with clear_hub_errors(repo_id, revision):
            yield
    except HubError as error:
        raise HubError(f"{repo_id} is not on this machine, and {error}") from error


def check_has_file(source: str | os.PathLike, filename: str, revision: str | None, token: str | None) -> None:
    """Raise unless `source` is a folder or Hub repository with this file."""
    folder, name = local_path(source, revision), os.fspath(source)
    if folder is not None:
        if not folder.is_dir():
            raise LRAttnResError(f"{source} is a file; give the folder of the model.")
        if not (folder / filename).is_file():
            raise LRAttnResError(f"{source} has no {filename}; give a folder saved with a model and tokenizer.")
        return
    with hub_source(name, revision):
        hf_hub_download(name, filename, revision=revision, token=token)
