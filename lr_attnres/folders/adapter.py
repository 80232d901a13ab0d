"""Routing adapters: the depth queries alone, in a small file beside the model that they were trained on.

folder/routing_adapter.safetensors    the queries, and samples of the base's weights
folder/routing_adapter.json           the base: its name, and the config fields that change its maths
folder/README.md                      the card
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData, snapshot_download
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..configuration_lr_attnres import LRAttnResConfig
from ..errors import LRAttnResError
from ..modeling_lr_attnres import LRAttnResModel
from ..sources import REPO_ID, hub_source, local_path, public_name
from ..variants import variant_name
from .card import GENERATED
from .loading import open_weights
from .staging import check_absent, staged_folder


WEIGHTS_FILE, CONFIG_FILE, CARD = "routing_adapter.safetensors", "routing_adapter.json", "README.md"
ADAPTER_FILES = (WEIGHTS_FILE, CONFIG_FILE, CARD)
QUERIES, SAMPLE, HEAD_SAMPLE = "depth_queries.weight", "base_sample", "head_sample"
BASE_WEIGHTS = ("embed_tokens.", "layers.", "norm.", "depth_embedding_key.")  # all but the queries and the head
HEAD_WEIGHTS = ("lm_head.",)
SAMPLE_SIZE = 8  # numbers of each weight, its first and last among them: the last rows may emit the keys
# Everything that changes the maths of the base, apart from its weights.
BASE_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "residual_type"),
    *("num_depth_blocks", "depth_key_rank", "depth_heads", "depth_key_norm", "depth_query_norm", "depth_logit_scale"),
    *("depth_block_exponent", "depth_count_prior", "depth_scaled_eps", "qk_norm", "norm_weight", "attention_bias"),
)


def save_routing_adapter(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    base_model: str | None = None,
    license: str | None = None,
) -> Path:
    """Write the depth queries of `model` as an adapter for the model without them; returns the folder.

    `base_model` is the name of that model on the card, by default its Hub name or the name of its folder.
    """
    base, folder = _base_of(model), Path(folder)  # raises for a model that has no queries
    check_absent(folder)
    name = public_name(base_model or model.name_or_path or "")
    with staged_folder(folder) as staging:
        write_adapter(staging, base.config, model.state_dict(), name or None, license)
    return folder


def write_adapter(
    folder: Path, config: LRAttnResConfig, weights: Mapping[str, torch.Tensor], base_model: str | None, license: Any
) -> None:
    """Write the files of an adapter; `weights` is a state dict with or without a head."""
    weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    tensors = {QUERIES: weights[QUERIES].float().cpu().contiguous(), **_samples(weights)}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    content = {
        "base_model": base_model,
        "license": license,
        "base_dtype": str(weights["embed_tokens.weight"].dtype).removeprefix("torch."),
        "base_config": _base_fields(config),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    adapter_card(content, variant_name(config)).save(folder / CARD)


def load_routing_adapter(
    model: PreTrainedModel,
    source: str | os.PathLike,
    name: str = "default",
    *,
    revision: str | None = None,
    token: str | None = None,
) -> None:
    """Load an adapter (folder or Hub repository) onto `model` and make it the active one.

    A model holds any number of adapters: `set_routing_adapter(model, name)` chooses one. Saving the model merges the
    active one. Raises if the adapter was trained on another base.
    """
    if not isinstance(name, str) or not name:  # None is the name of the base's own queries
        raise LRAttnResError(f"`name` is {name!r}; give the adapter a name, such as 'default'.")
    folder = local_path(source, revision)
    if folder is None:
        with hub_source(os.fspath(source), revision):
            patterns = [WEIGHTS_FILE, CONFIG_FILE]
            folder = Path(
                snapshot_download(os.fspath(source), revision=revision, token=token, allow_patterns=patterns)
            )
    content, tensors = read_adapter(folder)
    base = _base_of(model)
    _check_base(model, content, tensors, source)
    adapters = base.__dict__.setdefault("routing_adapters", {None: base.depth_queries.weight.detach().cpu().clone()})
    adapters[name] = tensors[QUERIES]
    set_routing_adapter(model, name)


def set_routing_adapter(model: PreTrainedModel, name: str | None) -> None:
    """Make a loaded adapter the active one; None: the queries that the model had before the first was loaded."""
    base = _base_of(model)
    adapters = base.__dict__.get("routing_adapters", {})
    if name not in adapters:
        loaded = ", ".join(repr(known) for known in adapters if known is not None) or "none"
        raise LRAttnResError(f"`name` is {name!r}; the routing adapters of this model are: {loaded}.")
    with torch.no_grad():
        base.depth_queries.weight.copy_(adapters[name])


def is_adapter(folder: Path) -> bool:
    """Whether the folder is an adapter alone; one that also holds a model is the model's."""
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The checked contents of an adapter's two files."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise LRAttnResError(f"{folder} has no {name}; give a folder written by `save_routing_adapter`.")
    try:
        content = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        fields, dtype = content["base_config"], getattr(torch, content["base_dtype"])
        usable = isinstance(fields, dict) and isinstance(dtype, torch.dtype) and dtype.is_floating_point
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        usable = False
    if not usable:
        raise LRAttnResError(f"{folder / CONFIG_FILE} is not the config of a routing adapter: save the adapter again.")
    file = open_weights(folder / WEIGHTS_FILE)
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name in {QUERIES, SAMPLE} | tensors.keys():
        if name not in tensors or tensors[name].dtype != torch.float32 or not tensors[name].isfinite().all():
            raise LRAttnResError(
                f"{folder / WEIGHTS_FILE} has no finite float32 tensor {name}: save the adapter again."
            )
    return content, tensors


def adapter_card(content: dict[str, Any], variant: str, repo_id: str | None = None) -> ModelCard:
    base = content["base_model"]
    metadata = ModelCardData(
        base_model=base if base and REPO_ID.fullmatch(base) else None,  # the Hub refuses other names
        base_model_relation="adapter" if base and REPO_ID.fullmatch(base) else None,
        license=content["license"],
        library_name="lr_attnres",
        tags=["lr_attnres", "routing-adapter"],
    )
    body = f"""# {repo_id.split("/")[-1] if repo_id else "A routing adapter"}

{GENERATED}

The depth queries of a `{variant}` model, trained alone. Base: {base or "not recorded"}. A model upgraded from the same
weights with the same options fits too; another one is refused.

```python
from lr_attnres import LRAttnResForCausalLM, load_routing_adapter

model = LRAttnResForCausalLM.from_pretrained("path/to/the/base")
load_routing_adapter(model, "{repo_id or "path/to/this/folder"}")
```"""
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}\n")


def copy_adapter(folder: Path, target: Path, repo_id: str) -> None:
    """Check an adapter and copy its files, with a card that names `repo_id` unless the card is the user's own."""
    content, _ = read_adapter(folder)
    for name in ADAPTER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    card = target / CARD
    if not card.is_file() or GENERATED in card.read_text(encoding="utf-8"):
        adapter_card(content, variant_name(LRAttnResConfig(**content["base_config"])), repo_id).save(card)


def _base_of(model: PreTrainedModel) -> LRAttnResModel:
    """The model without its head."""
    base = model if hasattr(model, "embed_tokens") else getattr(model, "model", None)
    if getattr(model.config, "model_type", None) != LRAttnResConfig.model_type or not hasattr(base, "embed_tokens"):
        kind = type(model).__name__
        raise LRAttnResError(
            f"{kind} cannot take a routing adapter; give an LR-AttnRes model, not one wrapped by PEFT."
        )
    if not hasattr(base, "depth_queries"):
        raise LRAttnResError(
            "`residual_type` is 'standard', which has no depth queries: a routing adapter needs them."
        )
    return base  # type: ignore[return-value]


def _base_fields(config: LRAttnResConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in BASE_FIELDS if hasattr(config, name)}
    return json.loads(json.dumps(fields))


def _samples(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Evenly spaced numbers of every weight, in the order of their names: of the base, and of a head for text."""
    samples = {}
    for key, prefixes in ((SAMPLE, BASE_WEIGHTS), (HEAD_SAMPLE, HEAD_WEIGHTS)):
        parts = []
        for name in sorted(name for name in weights if name.startswith(prefixes)):
            flat = weights[name].detach().reshape(-1)
            # In integers: float32 does not hold the last index of a large weight.
            places = torch.arange(SAMPLE_SIZE, device=flat.device) * (len(flat) - 1) // (SAMPLE_SIZE - 1)
            parts.append(flat[places].float().cpu())
        if parts:
            samples[key] = torch.cat(parts)
    return samples


def _check_base(
    model: PreTrainedModel, content: dict[str, Any], tensors: dict[str, torch.Tensor], source: str | os.PathLike
) -> None:
    trained_on = f"the routing adapter {source} was trained on {content.get('base_model') or 'another base'}"
    base = _base_of(model)
    fields, expected = _base_fields(base.config), content["base_config"]
    for name in fields | expected:
        if fields.get(name) != expected.get(name):
            difference = f"whose `{name}` is {expected.get(name)}; this model's is {fields.get(name)}"
            raise LRAttnResError(f"{trained_on}, {difference}: load it onto its own base.")
    # Equal up to the rounding of the coarser dtype.
    dtypes = (getattr(torch, content["base_dtype"]), base.embed_tokens.weight.dtype)
    tolerance = max(torch.finfo(dtype).eps for dtype in dtypes)
    for key, sample in _samples({name.removeprefix("model."): w for name, w in model.state_dict().items()}).items():
        stored = tensors.get(key, sample)  # a model without a head for text has no sample of it
        if sample.shape != stored.shape or not torch.allclose(sample, stored, tolerance, atol=1e-7):
            raise LRAttnResError(f"{trained_on}, which has other weights than this model: load it onto its own base.")
    queries = base.depth_queries.weight
    if tensors[QUERIES].shape != queries.shape:
        shapes = f"{list(tensors[QUERIES].shape)}; this model has {list(queries.shape)}"
        raise LRAttnResError(f"{source}: {QUERIES} has shape {shapes}.")
