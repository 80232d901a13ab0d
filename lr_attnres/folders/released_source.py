"""Find the `.pt` file of a released checkpoint in a folder or a Hub repository."""

import os
import re
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download

from ..errors import LRAttnResError
from ..sources import hub_source, local_path


FINAL = "final_model.pt"
STEP = re.compile(r"ckpt_step:(\d+)\.pt")


def find_released_file(
    source: str | os.PathLike, filename: str | None = None, revision: str | None = None, token: str | None = None
) -> Path:
    """The `.pt` file that `source` is, or that a folder or Hub repository holds; the Hub's cache keeps downloads.

    Without `filename` this is `final_model.pt`, or else `ckpt_step:N.pt` with the highest N.
    """
    path, name = local_path(source, revision), str(source)
    if path is not None:
        if path.is_dir():
            names = [file.relative_to(path).as_posix() for file in path.rglob("*.pt")]
            return path / choose_file(names, filename, name)
        if filename is not None:
            raise LRAttnResError(f"`filename` goes with a folder or a Hub repository; {source} is a file.")
        return path
    with hub_source(name, revision):
        repo = HfApi().model_info(name, revision=revision, token=token)
    chosen = choose_file([file.rfilename for file in repo.siblings or []], filename, name)
    with hub_source(name, revision):
        return Path(hf_hub_download(name, chosen, revision=revision, token=token))


def choose_file(names: list[str], filename: str | None, source: str) -> str:
    """Choose among the file names found in `source`."""
    steps = {int(match[1]): name for name in names if (match := STEP.fullmatch(name))}
    if filename is not None:
        if filename in names:
            return filename
    elif FINAL in names:
        return FINAL
    elif steps:
        return steps[max(steps)]
    wanted = filename or f"{FINAL} or ckpt_step:N.pt"
    found = ", ".join(sorted(name for name in names if name.endswith(".pt"))) or "none"
    raise LRAttnResError(f"{source} has no {wanted}; its .pt files are: {found}. Choose one with `filename`.")
