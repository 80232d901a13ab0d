"""Where a released checkpoint is: a `.pt` file, a folder of them, or a Hub repository."""

import os
import re
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, hf_hub_download

from .errors import HubError, clear_hub_errors
from .loading import local_path


FINAL = "final_model.pt"
STEP = re.compile(r"ckpt_step:(\d+)\.pt")


class ConversionError(ValueError):
    """A released checkpoint that cannot be found or converted; the message names the option, tensor or file."""


def find_released_file(
    source: str | os.PathLike,
    filename: str | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> Path:
    """The `.pt` file of `source`, downloaded into the Hub's cache if it is in a repository.

    Without `filename`, a folder or repository gives `final_model.pt`, else the `ckpt_step:N.pt` of the highest N.
    """
    path, name = local_path(source, revision, ConversionError), str(source)
    if path is not None:
        if path.is_dir():
            return path / choose_file(
                [file.relative_to(path).as_posix() for file in path.rglob("*.pt")], filename, name
            )
        if filename is not None:
            raise ConversionError(f"`filename` goes with a folder or a Hub repository; {source} is a file.")
        return path
    try:
        with clear_hub_errors(name, revision):
            repo = HfApi().model_info(name, revision=revision, token=token)
        chosen = choose_file([file.rfilename for file in repo.siblings or []], filename, name)
        with clear_hub_errors(name, revision):
            return Path(hf_hub_download(name, chosen, revision=revision, token=token))
    except HubError as error:
        raise ConversionError(f"{source} is not on this machine, and {error}") from error


def choose_file(names: list[str], filename: str | None, place: str) -> str:
    """One of the file names found at `place`."""
    steps = {int(match[1]): name for name in names if (match := STEP.fullmatch(name))}
    if filename is not None:
        if filename in names:
            return filename
    elif FINAL in names:
        return FINAL
    elif steps:
        return steps[max(steps)]
    wanted = filename or f"{FINAL} or ckpt_step:N.pt"
    found = sorted(name for name in names if PurePosixPath(name).suffix == ".pt")
    raise ConversionError(
        f"{place} has no {wanted}; its .pt files are: {', '.join(found) or 'none'}. Choose one with `filename`."
    )
