"""The folder of a run, locked while the run works, and its checkpoints, which are complete or absent."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, load
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging

from ..data.packed_tokens import file_hash
from ..errors import LRAttnResError, explain_file_error
from ..folders.staging import staged_folder
from ..sources import read_json_object


logger = logging.get_logger(__name__)

STATE_FILE = "training_state.json"
CHECKSUM_FILE = "checksums.sha256"  # in the format of `sha256sum`
STATE_FIELDS: dict[str, Any] = {"step": int, "settings": dict, "validation_loss": (int, float, type(None))}
RANDOM_STATES = ("random_state", "numpy_random_seed", "torch_manual_seed")
# What torch, safetensors and the file system raise when a file cannot be written or read.
FILE_ERRORS = (OSError, RuntimeError, SafetensorError, LookupError, ValueError, EOFError, TypeError, UnpicklingError)


def in_main_process(accelerator: Accelerator, action: Callable[[], object]) -> None:
    """Call `action` in the main process. If it raises an error of the user's input or files, all processes raise."""
    problem = None
    if accelerator.is_main_process:
        try:
            action()
        except (LRAttnResError, OSError) as error:
            problem = explain_file_error(error)
    problem = broadcast_object_list([problem])[0]
    if problem:
        raise LRAttnResError(problem)


@contextmanager
def hold_run_folder(folder: str | os.PathLike, accelerator: Accelerator) -> Iterator[None]:
    """Create the folder of a run and lock it; delete it afterwards if nothing was written."""
    folder = Path(folder)
    lock, existed = FileLock(folder / "run.lock"), folder.exists()

    def create_and_lock() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout as error:
            advice = "wait for it, or choose another --output-dir"
            raise LRAttnResError(f"another run works in {folder}: {advice}.") from error
        except FileExistsError as error:
            raise LRAttnResError(f"`output_dir` is {folder}, which is a file: choose a folder.") from error
        except OSError as error:
            reason = explain_file_error(error)
            raise LRAttnResError(f"`output_dir` is {folder}, which cannot be written: {reason}") from error

    in_main_process(accelerator, create_and_lock)
    try:
        yield
    finally:
        if lock.is_locked:  # in the main process
            Path(lock.lock_file).unlink(missing_ok=True)
            if not existed and not any(folder.iterdir()):
                folder.rmdir()
            lock.release()


class Checkpoints:
    """The folder `checkpoints` of a run, with folders `step-N`. `from_pretrained` can load one that is not sharded."""

    def __init__(self, run_folder: str | os.PathLike, accelerator: Accelerator):
        self.folder = Path(run_folder) / "checkpoints"
        self.accelerator = accelerator
        accelerator.register_save_state_pre_hook(self._save_weights)
        accelerator.register_load_state_pre_hook(self._load_weights)

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-" + "[0-9]" * 8))

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def last(self) -> Path | None:
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def delete_leftovers(self) -> None:
        """Delete half-written and half-deleted checkpoints of a process that was killed."""
        if self.accelerator.is_main_process:
            for leftover in [*self.folder.glob(".step-*.partial"), *self.folder.glob(".step-*.deleted")]:
                shutil.rmtree(leftover, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def save(self, step: int, **state: Any) -> None:
        """Save everything that the rest of the run depends on, in a folder that is renamed when it is on the disk."""
        is_main = self.accelerator.is_main_process
        try:
            # The main process creates and renames the folder; all processes write their shards into it.
            with staged_folder(self.path(step), replace=True) if is_main else nullcontext() as created:
                staging = broadcast_object_list([created])[0]
                self.accelerator.save_state(str(staging))
                self.accelerator.wait_for_everyone()
                if is_main:
                    (staging / STATE_FILE).write_text(json.dumps({"step": step} | state, indent=2) + "\n")
                    write_checksums(staging)
                self.accelerator.wait_for_everyone()
        except FILE_ERRORS as error:
            reason = explain_file_error(error.__cause__ or error)  # the cause, if `staged_folder` adds the path
            problem = f"the checkpoint of step {step} cannot be written: {reason}"
            raise LRAttnResError(f"{problem} Last good one: {self.last()}.") from error
        self.accelerator.wait_for_everyone()

    def prune(self, keep_last: int) -> None:
        """Delete all checkpoints but the last `keep_last` and the one with the lowest validation loss."""
        if not self.accelerator.is_main_process:
            return
        steps = self.steps()
        losses = {}
        for step in steps:
            try:
                losses[step] = read_state(self.path(step))["validation_loss"]
            except LRAttnResError as error:  # a damaged old checkpoint must not end the run
                logger.warning(f"{error} It is treated as a checkpoint without a validation loss.")
        best = sorted((step for step in losses if losses[step] is not None), key=losses.__getitem__)[:1]
        for step in sorted({*steps} - {*steps[-keep_last:], *best}):
            # Rename, then delete: a process that is killed in between leaves no half checkpoint under its name.
            path = self.path(step)
            hidden = path.with_name(f".{path.name}.deleted")
            shutil.rmtree(hidden, ignore_errors=True)
            os.replace(path, hidden)
            shutil.rmtree(hidden)

    def find(self, resume: str | None) -> Path | None:
        """The checkpoint to resume from, or None for a new run, which the folder must not already hold."""
        last, run = self.last(), self.folder.parent
        if resume is None and last is not None:
            advice = "resume with --resume, or choose another --output-dir"
            raise LRAttnResError(f"{run} already holds a run (up to {last.name}): {advice}.")
        if resume in (None, "last"):
            return last
        step = read_state(Path(resume))["step"]
        if last is not None and self.steps()[-1] > step:
            advice = "delete them, or choose another --output-dir"
            raise LRAttnResError(f"{run} holds checkpoints after step {step} (up to {last.name}): {advice}.")
        return Path(resume)

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Restore everything from a checkpoint; returns its state (see `read_state`)."""
        state = read_state(checkpoint)
        in_main_process(self.accelerator, lambda: verify_checksums(checkpoint))
        self._check_random_states(checkpoint)
        try:
            self.accelerator.load_state(str(checkpoint))
        except FILE_ERRORS as error:
            raise LRAttnResError(f"{checkpoint} cannot be read: {explain_file_error(error)}") from error
        return state

    def _check_random_states(self, checkpoint: Path) -> None:
        """Raise if the random states cannot be restored: Accelerate would only log it, and dropout would differ."""
        num_processes, num_saved = self.accelerator.num_processes, len([*checkpoint.glob("random_states_*.pkl")])
        files = [checkpoint / f"random_states_{process}.pkl" for process in range(num_processes)]
        for file in files:  # every process checks all files, so that all of them raise
            if not file.exists():
                found = f"the checkpoint has random states of {num_saved} processes, the run has {num_processes}"
                raise LRAttnResError(f"{file} is missing: {found}. Resume with as many processes as wrote it.")
        file = files[self.accelerator.process_index]
        try:
            states = load(file)
            if lacking := [name for name in RANDOM_STATES if name not in states]:
                raise ValueError(f"it has no {lacking[0]}")
        except FILE_ERRORS as error:
            raise LRAttnResError(f"{file} cannot be read: {explain_file_error(error)}") from error
        if num_saved != num_processes:
            logger.warning(f"{checkpoint} was written by {num_saved} processes, not {num_processes}: dropout differs.")

    def _save_weights(self, models: list[torch.nn.Module], weights: list[dict], folder: str) -> None:
        """Replaces Accelerate's weight file by `save_pretrained`: plain names, with the config and the code."""
        if weights:  # empty for sharded models
            weights.clear()
            if self.accelerator.is_main_process:
                model = self.accelerator.unwrap_model(models[0], keep_torch_compile=False)
                save_quietly(model, folder, max_shard_size="1TB")

    def _load_weights(self, models: list[torch.nn.Module], folder: str) -> None:
        if models:
            model = self.accelerator.unwrap_model(models.pop(), keep_torch_compile=False)
            safetensors.torch.load_model(model, Path(folder) / "model.safetensors")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The step, settings and validation loss of a checkpoint."""
    file = checkpoint / STATE_FILE
    if not checkpoint.is_dir():
        raise LRAttnResError(f"the checkpoint {checkpoint} does not exist.")
    if not file.exists():
        what = f"not a checkpoint of a training run (no {STATE_FILE})"
        raise LRAttnResError(f"{checkpoint} is {what}; give a folder checkpoints/step-N.")
    state = read_json_object(file)
    for name, kind in STATE_FIELDS.items():
        if name not in state or not isinstance(state[name], kind):
            raise LRAttnResError(f"{file} cannot be used: it has no usable `{name}`.")
    if checkpoint.resolve().name != f"step-{state['step']:08d}":
        raise LRAttnResError(f"{file} has `step` = {state['step']}, but its folder is {checkpoint.name}.")
    return state


def check_same_settings(folder: Path, saved: dict[str, Any], settings: dict[str, Any]) -> None:
    for name in settings | saved:
        before, now = saved.get(name), settings.get(name)
        if before != now:
            advice = "Use the same settings, or start a new run with another --output-dir"
            raise LRAttnResError(f"{folder} belongs to another run: `{name}` was {before}, now it is {now}. {advice}.")


def write_checksums(checkpoint: Path) -> None:
    """Record the SHA-256 of every file, when all of them are complete."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    lines = [f"{file_hash(path)}  {path.relative_to(checkpoint).as_posix()}\n" for path in files]
    (checkpoint / CHECKSUM_FILE).write_text("".join(lines))


def verify_checksums(checkpoint: Path) -> None:
    """Raise if a file of the checkpoint has changed since it was written."""
    listing = checkpoint / CHECKSUM_FILE
    if not listing.exists():
        logger.warning(f"{checkpoint} has no {CHECKSUM_FILE}: its files cannot be verified.")
        return
    lines = [line.partition("  ") for line in listing.read_text(errors="replace").splitlines()]
    for checksum, _, name in lines:
        path = checkpoint / name
        if not path.is_file() or file_hash(path) != checksum:
            advice = "copy the checkpoint again, or delete it and resume from an earlier one"
            raise LRAttnResError(f"{path} is missing or damaged (its SHA-256 is not that of {listing}): {advice}.")
    files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    if unlisted := sorted(files - {name for *_, name in lines} - {CHECKSUM_FILE}):
        logger.warning(f"{listing} does not list {', '.join(unlisted)}: not verified.")


def save_quietly(model: PreTrainedModel, folder: str | os.PathLike, **options: Any) -> None:
    """`save_pretrained` without the progress bar that Transformers shows for every file it writes."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, **options)
    finally:
        if shown:
            logging.enable_progress_bar()
