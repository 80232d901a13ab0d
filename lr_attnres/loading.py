"""Config, tokenizer and weights of a folder or Hub repository; what does not load is told in one line."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from .configuration_lr_attnres import LRAttnResConfig
from .errors import REPO_ID, HubError, clear_hub_errors, explain_field_error, one_line
from .modeling_lr_attnres import LRAttnResForCausalLM


# What Transformers and the readers of files raise for files that are damaged or not what their names say.
UNLOADABLE = (
    *(OSError, SafetensorError, ValueError, RuntimeError),
    *(KeyError, TypeError, AttributeError, pickle.UnpicklingError),
)


class LoadingError(ValueError):
    """A model or tokenizer that cannot be found or used; the message names the folder and what is wrong with it."""


def load_config(source: str | os.PathLike, revision: str | None = None, token: str | None = None) -> LRAttnResConfig:
    """The config of a saved folder or Hub repository."""
    _find(source, CONFIG_NAME, revision, token)
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, token=token, trust_remote_code=False)
    except StrictDataclassError as error:
        raise LoadingError(f"{source}: {explain_field_error(error)}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LoadingError(f"the {CONFIG_NAME} of {source} cannot be used: {one_line(error)}") from error
    if config.model_type != LRAttnResConfig.model_type:
        raise LoadingError(
            f"{source} holds a {config.model_type} model, not an lr_attnres one; `lr-attnres upgrade` makes one of a "
            "Llama, Mistral or Qwen3."
        )
    return config


def load_tokenizer(
    source: str | os.PathLike,
    config: LRAttnResConfig | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub repository, which must not have more tokens than `config`, if that is given."""
    _find(source, "tokenizer_config.json", revision, token)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, token=token, trust_remote_code=False)
    except Exception as error:  # `tokenizers` raises nothing more special
        raise LoadingError(f"the tokenizer of {source} cannot be loaded: {one_line(error)}") from error
    size = max(tokenizer.get_vocab().values()) + 1
    if config is not None and size > config.vocab_size:
        raise LoadingError(f"the tokenizer of {source} has {size} tokens, its model knows {config.vocab_size}.")
    return tokenizer


def tokenizer_beside(model: PreTrainedModel, token: str | None = None) -> PreTrainedTokenizerBase | None:
    """That of the folder or repository that a model in memory was loaded from, if there is one."""
    if not model.name_or_path:
        return None
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path, token=token, trust_remote_code=False)
    except (OSError, ValueError):
        return None


def load_language_model(
    source: str | os.PathLike,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    token: str | None = None,
) -> LRAttnResForCausalLM:
    """The model of a folder or Hub repository, on `device`: an accelerator if there is one, or the one named."""
    place = usable_device(device)
    load_config(source, revision, token)
    try:
        # Any: the hint of Transformers leaves out the second value.
        loaded: Any = LRAttnResForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            revision=revision or "main",
            token=token,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below
        )
    except UNLOADABLE as error:
        raise LoadingError(f"the weights of {source} cannot be loaded: {one_line(error)}") from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise LoadingError(f"{source} lacks {len(missing)} weights that its config asks for, such as {missing[0]}.")
    for name, there, expected in sorted(loading["mismatched_keys"]):
        raise LoadingError(
            f"the weight {name} of {source} has shape {list(there)}; its config asks for {list(expected)}."
        )
    model.to(place)
    return model


def local_path(source: str | os.PathLike, revision: str | None, error_class: type[ValueError]) -> Path | None:
    """The file or folder that `source` names, or None if it can only be a Hub repository."""
    path, name = Path(source), os.fspath(source)
    if name and path.exists():
        if revision is not None:
            raise error_class(f"`revision` goes with a Hub repository; {source} is on this machine.")
        return path
    if not REPO_ID.fullmatch(name) or name.endswith(".pt"):
        raise error_class(f"{name!r} is not on this machine, nor a Hub repository of the form owner/name.")
    return None


def _find(source: str | os.PathLike, filename: str, revision: str | None, token: str | None) -> None:
    """Raise if `source` is no folder or Hub repository with this file."""
    folder, name = local_path(source, revision, LoadingError), os.fspath(source)
    if folder is not None:
        if not folder.is_dir():
            raise LoadingError(f"{source} is a file; give the folder of the model.")
        if not (folder / filename).is_file():
            raise LoadingError(f"{source} has no {filename}; give a folder that was saved with a model and tokenizer.")
        return
    try:
        with clear_hub_errors(name, revision):
            hf_hub_download(name, filename, revision=revision, token=token)
    except HubError as error:
        raise LoadingError(f"{source} is not on this machine, and {error}") from error


def usable_device(name: str) -> torch.device:
    """The device of this name, or for `auto` an accelerator if there is one."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        torch.zeros(1, device=name).item()
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # how torch says that there is no such device
        raise LoadingError(f"`device` {name} cannot be used: {one_line(error)}") from error
