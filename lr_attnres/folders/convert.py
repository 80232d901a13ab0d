"""Convert released training checkpoints (`.pt`) into folders that `from_pretrained` loads."""

import math
import os
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from ..configuration_lr_attnres import LRAttnResConfig
from ..data.tokenizers import CL100K_VOCAB_SIZE, open_tokenizer
from ..errors import LRAttnResError
from ..modeling_lr_attnres import LRAttnResForCausalLM
from .clean_process import probe_logits
from .loading import model_from_weights
from .released_format import read_released_file
from .released_source import find_released_file
from .staging import check_absent, compare_logits, staged_folder, write_model


logger = logging.get_logger(__name__)


def load_released_model(source: str | os.PathLike) -> LRAttnResForCausalLM:
    """The model of a released `.pt` file, in memory."""
    config, state_dict, _ = read_released_file(source)
    return model_from_weights(config, state_dict)


def convert_released_checkpoint(
    source: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    filename: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    tokenizer: str | os.PathLike | None = None,
    verify: bool = False,
) -> Path:
    """Convert a released checkpoint into a folder that `from_pretrained` loads and `push` sends; returns the folder.

    If anything fails, no folder is left behind.

    Args:
        source: a `.pt` file, a folder of them, or a Hub repository.
        filename: the `.pt` file in that folder or repository; by default the final one, or else the last step.
        revision, token: of a Hub repository.
        dtype: of the weights, by default as in the file; the queries stay float32.
        max_shard_size: a larger model is split into several files.
        tokenizer: a `cl100k_base.tiktoken` file, or a folder or Hub repository with a tokenizer. By default a model
            with the vocabulary of cl100k_base gets that tokenizer from tiktoken, and other models get none.
        verify: load the result in a fresh process and compare its logits with those of the source.
    """
    output_dir = Path(output_dir)
    check_absent(output_dir)
    path = find_released_file(source, filename, revision, token)
    config, state_dict, other_entries = read_released_file(path)
    config.dtype = dtype or config.dtype
    dtypes: dict[str, Any] = {name: torch.float32 if "depth_queries" in name else config.dtype for name in state_dict}
    new_tokenizer = _find_tokenizer(tokenizer, config)
    generation_config = GenerationConfig.from_model_config(config)
    generation_config.pad_token_id = config.eos_token_id
    with staged_folder(output_dir) as folder:
        generation_config.save_pretrained(folder)
        write_model(
            folder,
            config,
            {name: torch.empty_like(tensor, dtype=dtypes[name], device="meta") for name, tensor in state_dict.items()},
            lambda name: state_dict[name].to(dtypes[name]).contiguous(),
            max_shard_size,
            tokenizer=new_tokenizer,
            card_title=output_dir.name,
            source=_describe_source(source, path),
            step=_whole_number(other_entries.get("step")),
            tokens=_whole_number(other_entries.get("tokens_processed")),
        )
        if verify:
            expected = probe_logits(model_from_weights(config, state_dict))
            # Same weights, dtype and kernels: only the split of the work over threads may differ.
            half = config.dtype in (torch.float16, torch.bfloat16)
            compare_logits(folder, expected, tolerance=2e-2 if half else 2e-5)
    return output_dir


def _find_tokenizer(source: str | os.PathLike | None, config: LRAttnResConfig) -> PreTrainedTokenizerBase | None:
    if source is None and config.vocab_size != CL100K_VOCAB_SIZE:
        size = config.vocab_size
        logger.warning(f"No tokenizer was written: {size} tokens are not cl100k_base. Give one as `tokenizer`.")
        return None
    try:
        return open_tokenizer(source, config.max_position_embeddings, config.vocab_size)
    except LRAttnResError as error:
        if source is not None:
            raise
        logger.warning(f"No tokenizer was written: {error}")
        return None


def _describe_source(source: str | os.PathLike, path: Path) -> str:
    """A Hub name or a file name; the card is public, so it must not show the folders of this machine."""
    if path == Path(source):
        return path.name
    return f"{Path(source).name if Path(source).is_dir() else source}, {path.name}"


def _whole_number(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else None
