"""Load config and weights of a folder or Hub repository, with errors of one line."""

import json
import os
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..configuration_lr_attnres import LRAttnResConfig
from ..errors import LRAttnResError, explain_field_error, one_line
from ..modeling_lr_attnres import LRAttnResForCausalLM
from ..sources import check_has_file, hub_source, local_path


# Raised by Transformers and safetensors for damaged files.
UNLOADABLE = (OSError, SafetensorError, ValueError, RuntimeError, KeyError, TypeError, AttributeError)
DOWNLOADED = (
    "config.json",
    "generation_config.json",
    SAFE_WEIGHTS_NAME,
    "model-*.safetensors",
    SAFE_WEIGHTS_INDEX_NAME,
)
FLOATS = ("F64", "F32", "F16", "BF16")
# Files that `from_pretrained` would load instead of, or on top of, the weights of the folder.
OTHER_WEIGHTS = {
    "adapter_config.json": "an adapter: merge it into its model and save that",
    "shard-?????-model-?????-of-?????.safetensors": "a distributed checkpoint: save the whole model",
}


def read_config(source: str | os.PathLike, revision: str | None = None, token: str | None = None) -> PreTrainedConfig:
    """The config of a saved folder or Hub repository, for a model of any type."""
    check_has_file(source, CONFIG_NAME, revision, token)
    try:
        return AutoConfig.from_pretrained(source, revision=revision, token=token, trust_remote_code=False)
    except StrictDataclassError as error:
        raise LRAttnResError(f"{source}: {explain_field_error(error)}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LRAttnResError(f"the {CONFIG_NAME} of {source} cannot be used: {one_line(error)}") from error


def load_config(source: str | os.PathLike, revision: str | None = None, token: str | None = None) -> LRAttnResConfig:
    """The config of a saved folder or Hub repository with an LR-AttnRes model."""
    config = read_config(source, revision, token)
    if not isinstance(config, LRAttnResConfig):
        advice = "`lr-attnres upgrade` makes one of a Llama, Mistral, Qwen2 or Qwen3"
        raise LRAttnResError(f"{source} holds a {config.model_type} model, not an lr_attnres one; {advice}.")
    return config


def check_generation_config(folder: Path) -> None:
    """Raise if the folder has a generation config that cannot be loaded."""
    path = folder / GENERATION_CONFIG_NAME
    try:
        if path.exists():
            GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LRAttnResError(f"{path} cannot be used: {one_line(error)}") from error


def load_language_model(
    source: str | os.PathLike,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    token: str | None = None,
    depth_backend: str = "torch",
) -> LRAttnResForCausalLM:
    """As `load_causal_lm`, for an LR-AttnRes model."""
    torch_device = usable_device(device)
    config = load_config(source, revision, token)
    if config.architectures not in (None, [], [LRAttnResForCausalLM.__name__]):
        raise LRAttnResError(f"`architectures` of {source} is {config.architectures}; expected LRAttnResForCausalLM.")
    return cast(LRAttnResForCausalLM, _load(source, config, torch_device, dtype, revision, token, depth_backend))


def load_causal_lm(
    source: str | os.PathLike,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    token: str | None = None,
    depth_backend: str = "torch",
) -> PreTrainedModel:
    """The model of a folder or Hub repository, with every weight present, of the right shape and finite: an LR-AttnRes
    model or an ordinary causal language model of Transformers.

    No code of the folder runs and no pickle is read. For `device` see `usable_device`.
    """
    torch_device = usable_device(device)
    config = read_config(source, revision, token)
    if isinstance(config, LRAttnResConfig):
        return load_language_model(source, device, dtype, revision, token, depth_backend)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise LRAttnResError(f"{source} holds a {config.model_type} model, which is no causal language model.")
    return _load(source, config, torch_device, dtype, revision, token, depth_backend)


def _load(
    source: str | os.PathLike,
    config: PreTrainedConfig,
    device: torch.device,
    dtype: str,
    revision: str | None,
    token: str | None,
    depth_backend: str,
) -> PreTrainedModel:
    folder = local_path(source, revision)
    if folder is None:
        with hub_source(str(source), revision):
            folder = Path(
                snapshot_download(str(source), revision=revision, token=token, allow_patterns=list(DOWNLOADED))
            )
    check_weight_files(folder, config)
    check_generation_config(folder)
    is_own = isinstance(config, LRAttnResConfig)
    model_class: Any = LRAttnResForCausalLM if is_own else MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        # Any: Transformers' type hint omits the second value.
        loaded: Any = model_class.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
        )
    except UNLOADABLE as error:
        raise LRAttnResError(f"the weights of {source} cannot be loaded: {one_line(error)}") from error
    model, loading = loaded
    model.name_or_path = model.config.name_or_path = os.fspath(source)  # not the folder of the Hub's cache
    if missing := sorted(loading["missing_keys"]):
        raise LRAttnResError(f"{source} lacks {len(missing)} weights that its config asks for, such as {missing[0]}.")
    for name, shape, expected in sorted(loading["mismatched_keys"]):
        raise LRAttnResError(
            f"the weight {name} of {source} has shape {list(shape)}; its config asks for {list(expected)}."
        )
    if unexpected := sorted(loading["unexpected_keys"]):
        shown = ", ".join(unexpected[:3]) + (" ..." if len(unexpected) > 3 else "")
        raise LRAttnResError(f"{source} has {len(unexpected)} weights that its config does not ask for: {shown}.")
    if config.tie_word_embeddings and _is_untied(model):
        raise LRAttnResError(f"{source}: `tie_word_embeddings` is True, but lm_head.weight is not the embedding.")
    use_depth_backend(model, depth_backend)
    model.to(device)
    if bad := [] if _is_quantized(config) else [name for name, w in model.named_parameters() if not _is_finite(w)]:
        raise LRAttnResError(f"{source} has {len(bad)} weights with NaN or infinite values, such as {bad[0]}.")
    return model


def use_depth_backend(model: PreTrainedModel, name: str) -> None:
    """For an option of a command: reads use torch unless another backend is asked for, in `standard` too."""
    if name == "torch":
        return
    if not isinstance(model, LRAttnResForCausalLM):
        raise LRAttnResError(f"`depth_backend` is {name!r}, but a {model.config.model_type} model has no depth reads.")
    model.set_depth_backend(name)


def _is_untied(model: PreTrainedModel) -> bool:
    return model.get_output_embeddings().weight is not model.get_input_embeddings().weight


def _is_quantized(config: PreTrainedConfig) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _is_finite(weight: torch.Tensor) -> bool:
    """In one pass and without a copy: NaN is the smallest and the largest value of a tensor that has one."""
    return weight.numel() == 0 or bool(torch.stack(weight.detach().aminmax()).isfinite().all())


def check_weight_files(folder: Path, config: PreTrainedConfig) -> None:
    """Raise unless the folder's safetensors files, with floats in them, are all that `from_pretrained` would read."""
    if (name := getattr(config, "transformers_weights", None)) is not None:
        raise LRAttnResError(f"{folder / CONFIG_NAME}: `transformers_weights` is {name!r}: remove this field.")
    if "/" in str(config._attn_implementation):
        kernel = f"`attn_implementation` is {config._attn_implementation!r}, code on the Hub"
        raise LRAttnResError(f"{folder / CONFIG_NAME}: {kernel}: remove this field.")
    for pattern, kind in OTHER_WEIGHTS.items():
        if found := sorted(folder.glob(pattern)):
            raise LRAttnResError(f"{folder} holds {kind} ({found[0].name}).")
    for path in weight_files(folder):
        file = open_weights(path)
        for name in file.keys():  # noqa: SIM118
            dtype = file.get_slice(name).get_dtype()
            if dtype not in FLOATS and not _is_quantized(config):
                raise LRAttnResError(
                    f"{path}: the weight {name} has dtype {dtype}; expected one of {', '.join(FLOATS)}."
                )


def open_weights(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise LRAttnResError(f"{path} cannot be read: {one_line(error)}.") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by its index if it has several."""
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if single.is_file():
        return [single]
    if not index.is_file():
        pickles = sorted(folder.glob("pytorch_model*.bin"))
        found = f", only {pickles[0].name}, which may run code when it is read" if pickles else ""
        advice = "save the model with `save_pretrained`, which writes safetensors"
        raise LRAttnResError(f"{folder} has no {SAFE_WEIGHTS_NAME}{found}: {advice}.")
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(content["weight_map"].values()))
        if not names or not isinstance(content["metadata"], dict):
            raise ValueError("no files or no metadata")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LRAttnResError(f"{index} is not an index of safetensors files.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise LRAttnResError(f"{index} names {name!r}, which is not a safetensors file of this folder.")
        if not (folder / name).is_file():
            raise LRAttnResError(f"{index} names {name}, which is not in the folder: copy all files of the model.")
    return [folder / name for name in names]


def model_from_weights(config: LRAttnResConfig, state_dict: dict[str, torch.Tensor]) -> LRAttnResForCausalLM:
    """The model in `config.dtype`; the tensors of `state_dict` become its weights."""
    return LRAttnResForCausalLM.from_pretrained(None, config=config, state_dict=state_dict, dtype=config.dtype)


def usable_device(name: str) -> torch.device:
    """The device of this name; `auto` is the accelerator, or the CPU without one."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        torch.zeros(1, device=name).item()
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has no common error for it
        raise LRAttnResError(f"`device` {name} cannot be used: {one_line(error)}") from error
