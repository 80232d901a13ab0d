"""Write a new model folder: beside its final place first, and renamed when it is complete."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from .. import modeling_lr_attnres
from ..configuration_lr_attnres import LRAttnResConfig
from ..errors import LRAttnResError, explain_file_error
from .card import model_card, write_provenance
from .clean_process import load_in_clean_process


LOCK_FILE = ".lr-attnres.lock"  # its process holds a lock on it, which the kernel releases when the process ends


def check_tensor(name: str, tensor: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Raise unless the source of a model has this weight in a form that can be copied."""
    if tensor is None:
        raise LRAttnResError(f"The source lacks the tensor {name} of shape {list(shape)}.")
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in dtypes or tensor.layout != torch.strided:
        kind = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise LRAttnResError(f"{name} ({kind}) is not a dense tensor of float16, bfloat16, float32 or float64.")
    if tuple(tensor.shape) != shape:
        raise LRAttnResError(f"The tensor {name} has shape {list(tensor.shape)}; expected {list(shape)}.")
    return tensor


def check_absent(output_dir: Path) -> None:
    """Raise unless `output_dir` can be created; call it before long work."""
    if os.path.lexists(output_dir):
        raise LRAttnResError(f"{output_dir} exists already; choose a folder that does not.")
    parent = next(parent for parent in output_dir.absolute().parents if os.path.lexists(parent))
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise LRAttnResError(f"{output_dir} cannot be written: {parent} is not a folder that you may write to.")


@contextmanager
def staged_folder(output_dir: Path, replace: bool = False) -> Iterator[Path]:
    """A hidden folder beside `output_dir` to write into; when the block ends it is renamed to `output_dir`.

    If the block raises, the hidden folder is deleted; if the process is killed, the next call with the same parent
    deletes it. With `replace`, an existing `output_dir` is deleted after the new one is on the disk; a killed process
    leaves at most `.NAME.partial` and `.NAME.deleted`, which the next call deletes.
    """
    name = output_dir.name
    staging = output_dir.with_name(f".{name}.partial" if replace else f".{name}-{token_hex(4)}")
    old = output_dir.with_name(f".{name}.deleted")
    lock = None
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        if not replace:
            _delete_abandoned(output_dir.absolute().parent)
            lock = _lock(staging)
        yield staging
        sync_to_disk(staging)
        (staging / LOCK_FILE).unlink(missing_ok=True)
        if replace and output_dir.exists():
            shutil.rmtree(old, ignore_errors=True)
            output_dir.rename(old)
        try:
            staging.rename(output_dir)
        except OSError:
            if replace and old.exists():
                old.rename(output_dir)
            raise
        _sync(output_dir.parent)
        if replace:
            shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise LRAttnResError(f"{output_dir} cannot be written: {explain_file_error(error)}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(staging: Path) -> int:
    """Lock the folder until the returned descriptor is closed.

    The file gets its name only when it is locked, so that no other process finds it unlocked.
    """
    unnamed = staging / f"{LOCK_FILE}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        unnamed.rename(staging / LOCK_FILE)
    except OSError:  # a file system without locks: without the file, no process deletes this folder
        unnamed.unlink()
    return descriptor


def _delete_abandoned(parent: Path) -> None:
    """Delete the hidden folders of killed processes; the folder of a living process is locked."""
    for lock_file in parent.glob(f".*-{'[0-9a-f]' * 8}/{LOCK_FILE}"):
        # An OSError: the file is locked, belongs to another user, or was just deleted or renamed.
        with suppress(OSError), open(lock_file, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_file.parent, ignore_errors=True)


def sync_to_disk(folder: Path) -> None:
    """Flush every file below `folder`, so that a power cut after the rename loses none of them."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_model(
    folder: Path,
    config: LRAttnResConfig,
    tensors: dict[str, torch.Tensor],
    make: Callable[[str], torch.Tensor],
    max_shard_size: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    card_title: str,
    **provenance: Any,
) -> None:
    """Write config, code, tokenizer, provenance, card and weights (see `write_weights`)."""
    config.save_pretrained(folder)
    for path in code_files():
        shutil.copyfile(path, folder / path.name)
    if tokenizer is not None:
        tokenizer.init_kwargs.pop("auto_map", None)  # names code of the source, which is not copied
        tokenizer.save_pretrained(folder)
    write_provenance(folder, **provenance)
    model_card(folder, config, card_title).save(folder / "README.md")
    write_weights(folder, tensors, make, max_shard_size)


def code_files() -> list[Path]:
    """The modeling file and every module that it imports from this package."""
    main = Path(modeling_lr_attnres.__file__)
    return [main, *map(Path, get_relative_import_files(main))]


def write_weights(
    folder: Path, tensors: dict[str, torch.Tensor], make: Callable[[str], torch.Tensor], max_shard_size: str
) -> None:
    """Write `make(name)` for every name in `tensors`, which are meta tensors: shapes and dtypes without contents.

    Only the tensors of one shard are in memory at a time.
    """
    try:
        plan = split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise LRAttnResError(f"`max_shard_size` {max_shard_size}: {error}") from error
    for filename, names in tqdm(plan.filename_to_tensors.items(), desc="Writing weights", unit=" files"):
        save_file({name: make(name) for name in names}, folder / filename, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def compare_logits(folder: Path, expected: torch.Tensor, tolerance: float, dtype: str = "auto") -> None:
    """Raise unless the folder, loaded in a clean process, gives the `expected` logits of `probe_tokens`.

    The tolerance is relative to the largest logit.
    """
    logits = load_in_clean_process(folder, dtype)["output"]
    difference = (logits - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
    if not difference <= tolerance:  # also when it is NaN
        raise LRAttnResError(f"The result's logits differ from the source's by {difference:.1e} of the largest.")
