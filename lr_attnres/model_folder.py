"""A new model folder: staged beside its place, weights written shard by shard, logits compared with a source's."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from .clean_process import CleanProcessError, load_in_clean_process
from .errors import explain_os_error


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # that weights are saved in


class FolderError(ValueError):
    """A folder that cannot be written, or that is not what it should be; the message names it."""


def check_absent(output_dir: Path) -> None:
    """To be called before any work is done for `output_dir`."""
    if os.path.lexists(output_dir):
        raise FolderError(f"{output_dir} exists already; choose a folder that does not.")
    parent = next(parent for parent in output_dir.absolute().parents if os.path.lexists(parent))
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise FolderError(f"{output_dir} cannot be written: {parent} is not a folder that you may write to.")


@contextmanager
def staged_folder(output_dir: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `output_dir` if all goes well and vanishes if not."""
    try:
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}-", dir=output_dir.parent))
    except OSError as error:
        raise FolderError(f"{output_dir} cannot be written: {explain_os_error(error)}") from error
    try:
        yield staging
        staging.chmod(0o755)
        staging.rename(output_dir)
    except (OSError, SafetensorError) as error:
        reason = explain_os_error(error) if isinstance(error, OSError) else error
        raise FolderError(f"{output_dir} cannot be written: {reason}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_weights(
    folder: Path, tensors: dict[str, torch.Tensor], make: Callable[[str], torch.Tensor], max_shard_size: str
) -> None:
    """Write `make(name)` for every name of `tensors`, which has shapes and dtypes alone (meta tensors).

    Only the tensors of one shard exist at a time.
    """
    try:
        plan = split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise FolderError(f"`max_shard_size` {max_shard_size}: {error}") from error
    for filename, names in tqdm(plan.filename_to_tensors.items(), desc="Writing weights", unit=" files"):
        save_file({name: make(name) for name in names}, folder / filename, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def compare_logits(folder: Path, expected: torch.Tensor, tolerance: float, dtype: str = "auto") -> None:
    """Fail if the folder, loaded in a clean process, gives other logits of `probe_tokens` than `expected`.

    The tolerance is relative to the largest logit.
    """
    try:
        logits = load_in_clean_process(folder, dtype)["output"]
    except CleanProcessError as error:
        raise FolderError(f"The result cannot be verified: {error}") from error
    difference = (logits - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
    if not difference <= tolerance:  # NaN is not
        raise FolderError(f"The result's logits differ from the source's by {difference:.1e} of the largest.")
