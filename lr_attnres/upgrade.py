"""A pretrained Llama, Mistral or Qwen3 becomes an LR-AttnRes model with the same logits, ready to learn to route.

With zero queries every read is the mean of its sources, which the norm that follows cannot tell from their sum. So the
old weights stay as they are; what is new are zero queries and, in `projected`, random rows that emit the routing keys.
"""

import os
import zlib
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .configuration_lr_attnres import LRAttnResConfig, ResidualType
from .errors import explain_field_error
from .hub_upload import copy_code
from .model_card import model_card, write_provenance
from .model_folder import DTYPES, check_absent, compare_logits, staged_folder, write_weights
from .modeling_lr_attnres import LRAttnResForCausalLM
from .pretrained_source import ModelInMemory, SavedModel, UpgradeError, open_source


logger = logging.get_logger(__name__)

# model_type -> the class that is upgraded; `lr_attnres` is a `standard` model of this project.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "lr_attnres": "LRAttnResForCausalLM",
}
CARRIED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range"),
    *("rms_norm_eps", "use_cache", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
)
# Fields that change the maths, or ask for maths of another architecture, and when they do not. Missing means None.
NEUTRAL = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (1, None),
    "logits_scaling": (1, None),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "attention_multiplier": (None,),
    "clip_qkv": (None,),
    "is_causal": (True, None),
}
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
QUERIES, EMBEDDING_KEY = "model.depth_queries.weight", "model.depth_embedding_key.weight"


def upgraded_config(
    config: PreTrainedConfig,
    residual_type: ResidualType = "sliced",
    num_depth_blocks: int | None = 8,
    depth_key_rank: int = 64,
) -> LRAttnResConfig:
    """The config of `config`'s model with depth routing; a `UpgradeError` names what cannot be expressed."""
    if config.model_type not in ARCHITECTURES:
        raise UpgradeError(f"`model_type` is {config.model_type!r}; {', '.join(ARCHITECTURES)} can be upgraded.")
    if getattr(config, "residual_type", "standard") != "standard":
        raise UpgradeError(f"`residual_type` is {config.residual_type!r} already; only `standard` can be upgraded.")
    for name, neutral in NEUTRAL.items():
        if (value := getattr(config, name, None)) not in neutral:
            raise UpgradeError(f"`{name}` is {value!r}; a model can be upgraded only where it is {neutral[0]!r}.")
    if other := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise UpgradeError(f"`layer_types` has {', '.join(map(repr, sorted(other)))}; only 'full_attention' upgrades.")
    is_ours = config.model_type == "lr_attnres"
    fields = {name: getattr(config, name) for name in CARRIED if getattr(config, name, None) is not None}
    try:
        return LRAttnResConfig(
            **fields,
            attention_dropout=config.attention_dropout or 0.0,
            rope_parameters=_rope_parameters(config),
            qk_norm=config.qk_norm if is_ours else config.model_type == "qwen3",
            norm_weight=config.norm_weight if is_ours else True,
            residual_type=residual_type,
            num_depth_blocks=num_depth_blocks,
            depth_key_rank=depth_key_rank,
            depth_scaled_eps=True,
            architectures=["LRAttnResForCausalLM"],
        )
    except StrictDataclassError as error:
        raise UpgradeError(f"The upgrade gives no valid config: {explain_field_error(error)}") from error


def _rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    parameters = dict(config.rope_parameters)
    if (rope_type := parameters.get("rope_type")) not in ROPE_TYPES:
        raise UpgradeError(f"`rope_parameters` has rope_type={rope_type!r}; {', '.join(ROPE_TYPES)} can be upgraded.")
    if parameters.get("partial_rotary_factor") not in (None, 1):
        raise UpgradeError(
            f"`partial_rotary_factor` is {parameters['partial_rotary_factor']}; only a model that rotates whole heads "
            "can be upgraded."
        )
    return parameters


class UpgradedWeights:
    """The state dict of the upgraded model: names, shapes and dtypes at once, contents one tensor at a time."""

    def __init__(self, source: ModelInMemory | SavedModel, config: LRAttnResConfig, seed: int = 0):
        self.source, self.config, self.seed = source, config, seed
        with torch.device("meta"):
            self.tensors = LRAttnResForCausalLM(config).state_dict()
        if config.tie_word_embeddings:
            del self.tensors["lm_head.weight"]
        given = dict(source.tensors)
        for name, tensor in self.tensors.items():
            if name not in (QUERIES, EMBEDDING_KEY):
                shape = (config.hidden_size, tensor.shape[1]) if self.is_grown(name) else tuple(tensor.shape)
                self.tensors[name] = tensor.to(_checked(name, given.pop(name, None), shape).dtype)
        config.dtype = self.tensors["model.embed_tokens.weight"].dtype
        if EMBEDDING_KEY in self.tensors:
            self.tensors[EMBEDDING_KEY] = self.tensors[EMBEDDING_KEY].to(config.dtype)
        self._check_rest(given)

    def is_grown(self, name: str) -> bool:
        """Projections that emit keys beside values, from rows below those that they had."""
        return self.config.residual_type == "projected" and name.endswith((".o_proj.weight", ".down_proj.weight"))

    def make(self, name: str) -> torch.Tensor:
        shape, dtype = self.tensors[name].shape, self.tensors[name].dtype
        if name == QUERIES:
            return torch.zeros(shape, dtype=dtype)
        if name == EMBEDDING_KEY:
            return self._random_rows(name, *shape).to(dtype)
        if self.is_grown(name):
            keys = self._random_rows(name, self.config.depth_key_rank, shape[1])
            return torch.cat([self.source.read(name), keys.to(dtype)])
        return self.source.read(name)

    def _random_rows(self, name: str, *shape: int) -> torch.Tensor:
        """The same for a name and seed, in whichever order the tensors are made."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        return torch.randn(shape, generator=generator) * self.config.initializer_range

    def _check_rest(self, rest: dict[str, torch.Tensor]) -> None:
        """What has no place in the upgraded model. Buffers of old files, and the head of a tied model, are no loss."""
        rest = {name: tensor for name, tensor in rest.items() if not name.endswith(".rotary_emb.inv_freq")}
        if self.config.tie_word_embeddings and "lm_head.weight" in rest:
            del rest["lm_head.weight"]
            if not torch.equal(self.source.read("lm_head.weight"), self.source.read("model.embed_tokens.weight")):
                raise UpgradeError("`tie_word_embeddings` is True, but lm_head.weight is not the embedding.")
        if rest:
            names = sorted(rest)
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise UpgradeError(f"The model has tensors that an upgraded model has no place for: {shown}.")


def _checked(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    if tensor is None:
        raise UpgradeError(f"The model lacks the tensor {name} of shape {list(shape)}.")
    if tensor.dtype not in DTYPES:
        raise UpgradeError(f"The tensor {name} is {tensor.dtype}: quantised weights cannot be upgraded.")
    if tuple(tensor.shape) != shape:
        raise UpgradeError(f"The tensor {name} has shape {list(tensor.shape)}; expected {list(shape)}.")
    return tensor


def _prepare(source: ModelInMemory | SavedModel, seed: int, depth: dict[str, Any]) -> UpgradedWeights:
    config = upgraded_config(source.config, **depth)
    expected = ARCHITECTURES[source.config.model_type]
    if source.architecture not in (None, expected):
        raise UpgradeError(f"`architectures` has {source.architecture}; only {expected} can be upgraded.")
    return UpgradedWeights(source, config, seed)


def load_upgraded(
    model_or_path: PreTrainedModel | str | os.PathLike,
    *,
    seed: int = 0,
    revision: str | None = None,
    token: str | None = None,
    **depth: Any,
) -> LRAttnResForCausalLM:
    """The upgraded model in memory, its weights a copy; for the arguments see `upgrade_model`."""
    weights = _prepare(open_source(model_or_path, revision, token), seed, depth)
    state_dict = {name: weights.make(name).clone() for name in weights.tensors}
    dtype = weights.config.dtype
    return LRAttnResForCausalLM.from_pretrained(None, config=weights.config, state_dict=state_dict, dtype=dtype)


def upgrade_model(
    model_or_path: PreTrainedModel | str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    residual_type: ResidualType = "sliced",
    num_depth_blocks: int | None = 8,
    depth_key_rank: int = 64,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    base_model: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    max_shard_size: str = "2GB",
    verify: bool = False,
) -> Path:
    """Write the upgraded model as a folder that `from_pretrained` loads and `push` sends; returns the folder.

    Weights go from file to file: no more than one shard of them is in memory. The folder appears complete or not at
    all.

    Args:
        model_or_path: a folder, a Hub repository or a model of type llama, mistral (no sliding window) or qwen3, or a
            `standard` model of this project.
        residual_type, num_depth_blocks, depth_key_rank: as in `LRAttnResConfig`.
        seed: of the random key projections of `projected`.
        tokenizer: by default the one of the source.
        base_model: what the card calls the source; by default the repository or the name of the folder.
        revision, token: of a Hub repository.
        max_shard_size: a model above this size is split into several files.
        verify: load the result in a fresh process, and compare its logits with the source's, both in float32.
    """
    output_dir = Path(output_dir)
    check_absent(output_dir)
    source = open_source(model_or_path, revision, token)
    depth = {"residual_type": residual_type, "num_depth_blocks": num_depth_blocks, "depth_key_rank": depth_key_rank}
    weights = _prepare(source, seed, depth)
    with staged_folder(output_dir) as staging:
        weights.config.save_pretrained(staging)
        copy_code(staging)
        source.copy_files(staging)
        _write_tokenizer(staging, tokenizer or source.tokenizer(), weights.config.vocab_size)
        write_provenance(staging, base_model=base_model or source.name, license=source.license())
        model_card(staging, weights.config, output_dir.name).save(staging / "README.md")
        write_weights(staging, weights.tensors, weights.make, max_shard_size)
        if verify:
            # Sums in another order, rounded to float32.
            compare_logits(staging, source.probe_logits(), tolerance=1e-4, dtype="float32")
    return output_dir


def _write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
    if tokenizer is None:
        logger.warning("No tokenizer was written: there is none beside the model.")
        return
    if (size := max(tokenizer.get_vocab().values()) + 1) > vocab_size:
        raise UpgradeError(
            f"The tokenizer beside the model has {size} tokens, the model's `vocab_size` is {vocab_size}."
        )
    tokenizer.save_pretrained(folder)
