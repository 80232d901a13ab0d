"""The folder of a run, for one at a time, and its checkpoints: complete or absent, refused where they do not fit."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, load
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging

from .errors import explain_os_error


logger = logging.get_logger(__name__)

STATE_FILE = "training_state.json"
STATE_FIELDS: dict[str, Any] = {"step": int, "settings": dict, "validation_loss": (int, float, type(None))}
RANDOM_STATES = ("random_state", "numpy_random_seed", "torch_manual_seed")
STEP_FOLDER = re.compile(r"step-(\d{8})")
# How torch, safetensors and the file system say that a file cannot be written or read.
FILE_ERRORS = (
    OSError,
    RuntimeError,
    SafetensorError,
    KeyError,
    ValueError,
    EOFError,
    TypeError,
    pickle.UnpicklingError,
)


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or used for this run; the message says which and why."""


@contextmanager
def hold_run_folder(folder: str | os.PathLike, accelerator: Accelerator) -> Iterator[None]:
    """Make the folder of a run and keep other runs out of it; if nothing was written, it is not left behind."""
    folder, lock, problem = Path(folder), None, None
    if accelerator.is_main_process:
        created = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / "run.lock")
            lock.acquire(timeout=0)
        except Timeout:
            problem = f"another run is at work in {folder}: wait for it, or choose another --output-dir."
        except FileExistsError:
            problem = f"`output_dir` is {folder}, which is a file: choose a folder."
        except OSError as error:
            problem = f"`output_dir` is {folder}, which cannot be written: {explain_os_error(error)}"
    problem = broadcast_object_list([problem])[0]  # all processes end, not the first alone
    if problem:
        raise CheckpointError(problem)
    try:
        yield
    finally:
        if lock is not None:
            Path(lock.lock_file).unlink(missing_ok=True)
            if created and not any(folder.iterdir()):
                folder.rmdir()
            lock.release()


class Checkpoints:
    """The folder `checkpoints` of a run. Each checkpoint is a folder `step-N`; without sharding it is also a folder
    that `from_pretrained` loads."""

    def __init__(self, run_folder: str | os.PathLike, accelerator: Accelerator):
        self.folder = Path(run_folder) / "checkpoints"
        self.accelerator = accelerator
        accelerator.register_save_state_pre_hook(self._save_weights)
        accelerator.register_load_state_pre_hook(self._load_weights)

    def steps(self) -> list[int]:
        """Of the complete checkpoints, in order."""
        names = (STEP_FOLDER.fullmatch(path.name) for path in self.folder.glob("step-*"))
        return sorted(int(match[1]) for match in names if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def last(self) -> Path | None:
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def clean(self) -> None:
        """Remove what a process that was killed has left half-written or half-deleted."""
        if self.accelerator.is_main_process:
            for leftover in [*self.folder.glob(".step-*.partial"), *self.folder.glob(".step-*.deleted")]:
                shutil.rmtree(leftover, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def save(self, step: int, **state: Any) -> Path:
        """Everything that the rest of the run depends on. It gets its name when all of it is on the disk."""
        temporary = self.folder / f".{self.path(step).name}.partial"
        is_main = self.accelerator.is_main_process
        try:
            if is_main:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            self.accelerator.save_state(str(temporary))
            if is_main:
                (temporary / STATE_FILE).write_text(json.dumps({"step": step} | state, indent=2) + "\n")
            self.accelerator.wait_for_everyone()
            if is_main:
                sync_to_disk(temporary)
                self._remove(step)
                os.replace(temporary, self.path(step))
                _sync(self.folder)
        except FILE_ERRORS as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written: {_reason(error)} Last good one: {self.last()}."
            ) from error
        self.accelerator.wait_for_everyone()
        return self.path(step)

    def prune(self, keep_last: int) -> None:
        """Delete all but the last ones and the one with the lowest validation loss."""
        if not self.accelerator.is_main_process:
            return
        steps = self.steps()
        losses = {step: self._validation_loss(step) for step in steps}
        known = {step: loss for step, loss in losses.items() if loss is not None}
        kept = {*steps[-keep_last:], *([min(known, key=known.__getitem__)] if known else [])}
        for step in steps:
            if step not in kept:
                self._remove(step)

    def _validation_loss(self, step: int) -> float | None:
        try:
            return read_state(self.path(step))["validation_loss"]
        except CheckpointError as error:  # an old one that is damaged does not end a run
            logger.warning(f"{error} It counts as one without a validation loss.")
            return None

    def find(self, resume: str | None) -> Path | None:
        """The checkpoint to go on from: None starts anew, which a folder with checkpoints refuses."""
        last = self.last()
        if resume is None and last is not None:
            raise CheckpointError(
                f"{self.folder.parent} already holds a run (up to {last.name}): go on with --resume, or choose "
                "another --output-dir."
            )
        if resume in (None, "last"):
            return last
        checkpoint = Path(resume)
        step = read_state(checkpoint)["step"]
        if last is not None and self.steps()[-1] > step:
            raise CheckpointError(
                f"{self.folder.parent} holds checkpoints after step {step} (up to {last.name}): delete them, or "
                "choose another --output-dir."
            )
        return checkpoint

    def load(self, checkpoint: Path, settings: dict[str, Any]) -> int:
        """Restore everything from a checkpoint with the same settings; returns its step."""
        state = read_state(checkpoint)
        for name in {**settings, **state["settings"]}:
            there, here = state["settings"].get(name), settings.get(name)
            if there != here:
                raise CheckpointError(
                    f"{checkpoint} belongs to another run: `{name}` is {there} there and {here} here. Use the same "
                    "settings, or start a new run with another --output-dir."
                )
        self._check_random_states(checkpoint)
        try:
            self.accelerator.load_state(str(checkpoint))
        except FILE_ERRORS as error:
            raise CheckpointError(f"{checkpoint} cannot be read: {_reason(error)}") from error
        return state["step"]

    def _check_random_states(self, checkpoint: Path) -> None:
        """Accelerate goes on without them, and the run would not be the same."""
        here, there = self.accelerator.num_processes, len([*checkpoint.glob("random_states_*.pkl")])
        files = [checkpoint / f"random_states_{process}.pkl" for process in range(here)]
        missing = [file for file in files if not file.exists()]
        if missing:  # in all processes alike: none is left waiting
            raise CheckpointError(
                f"{missing[0]} is missing: the checkpoint has random states of {there} processes, the run has {here}. "
                "Resume with as many processes as wrote it."
            )
        file = files[self.accelerator.process_index]
        try:
            states = load(file)
            lacking = [name for name in RANDOM_STATES if name not in states]
        except FILE_ERRORS as error:
            raise CheckpointError(f"{file} cannot be read: {_reason(error)}") from error
        if lacking:
            raise CheckpointError(f"{file} cannot be read: it has no {lacking[0]}.")
        if there != here:
            logger.warning(f"{checkpoint} was written by {there} processes, not {here}: dropout will differ.")

    def _remove(self, step: int) -> None:
        """First out of sight, so that being killed here leaves no half checkpoint."""
        path = self.path(step)
        if path.exists():
            hidden = path.with_name(f".{path.name}.deleted")
            shutil.rmtree(hidden, ignore_errors=True)
            os.replace(path, hidden)
            shutil.rmtree(hidden)

    def _save_weights(self, models: list[torch.nn.Module], weights: list[dict], folder: str) -> None:
        """In place of Accelerate's file: names without wrappers, with the config and the code beside it."""
        if weights:  # sharded models are not among them
            weights.clear()
            if self.accelerator.is_main_process:
                with without_progress_bar():
                    self._unwrap(models[0]).save_pretrained(folder, max_shard_size="1TB")

    def _load_weights(self, models: list[torch.nn.Module], folder: str) -> None:
        if models:
            safetensors.torch.load_model(self._unwrap(models.pop()), Path(folder) / "model.safetensors")

    def _unwrap(self, model: torch.nn.Module) -> PreTrainedModel:
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says about itself."""
    if not checkpoint.is_dir():
        raise CheckpointError(f"the checkpoint {checkpoint} does not exist.")
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint of a training run (no {STATE_FILE}); give a folder checkpoints/step-N."
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / STATE_FILE} cannot be read: {error}.") from error
    for name, kind in STATE_FIELDS.items():
        if not isinstance(state, dict) or name not in state or not isinstance(state[name], kind):
            raise CheckpointError(f"{checkpoint / STATE_FILE} cannot be read: no usable `{name}`.")
    if checkpoint.resolve().name != f"step-{state['step']:08d}":
        raise CheckpointError(f"{checkpoint / STATE_FILE} has `step` = {state['step']}: it is not of this folder.")
    return state


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Of Transformers, for every file it writes."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def sync_to_disk(folder: Path) -> None:
    """Wait until every file below `folder` is on the disk, so that a power cut after the renaming loses none."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return explain_os_error(error)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0].rstrip('.')}."
