"""Upgrade a pretrained Llama, Mistral, Qwen2 or Qwen3 to an LR-AttnRes model with the same logits.

With zero queries every read is the mean of its sources. The RMSNorm after it ignores scale, so the mean gives the same
result as the residual sum. All old weights are kept; zero queries and, in `projected`, random key rows are added.
"""

import os
import zlib
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..configuration_lr_attnres import LRAttnResConfig, ResidualType
from ..data.tokenizers import check_vocabulary
from ..errors import LRAttnResError, explain_field_error
from ..modeling_lr_attnres import LRAttnResForCausalLM
from .loading import model_from_weights
from .pretrained_source import PretrainedSource, open_source
from .staging import check_absent, check_tensor, compare_logits, staged_folder, write_model


logger = logging.get_logger(__name__)

# model_type -> the only class that can be upgraded; `lr_attnres` is for `standard` models.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "lr_attnres": "LRAttnResForCausalLM",
}
COPIED_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range"),
    *("rms_norm_eps", "use_cache", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
)
# Fields that change the maths, of the config or its `rope_parameters`, each with the values that can be upgraded.
# A missing field counts as None.
ALLOWED_VALUES = {
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
    "partial_rotary_factor": (1, None),
    "rope_type": ("default", "linear", "dynamic", "yarn", "llama3", "longrope"),
}
QUERIES, EMBEDDING_KEY = "model.depth_queries.weight", "model.depth_embedding_key.weight"


def upgraded_config(
    config: PreTrainedConfig,
    residual_type: ResidualType = "sliced",
    num_depth_blocks: int | Literal["full"] | None = 8,
    depth_key_rank: int = 64,
    depth_heads: int = 1,
) -> LRAttnResConfig:
    """The config of the upgraded model; raises for a field that it cannot express."""
    if config.model_type not in ARCHITECTURES:
        raise LRAttnResError(f"`model_type` is {config.model_type!r}; {', '.join(ARCHITECTURES)} can be upgraded.")
    if getattr(config, "residual_type", "standard") != "standard":
        raise LRAttnResError(f"`residual_type` is {config.residual_type!r} already; only `standard` can be upgraded.")
    for name, allowed in ALLOWED_VALUES.items():
        if (value := config.rope_parameters.get(name, getattr(config, name, None))) not in allowed:
            known = " or ".join(repr(known) for known in allowed if known is not None or len(allowed) == 1)
            raise LRAttnResError(f"`{name}` is {value!r}; only models with {known} can be upgraded.")
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"}):
        raise LRAttnResError(f"`layer_types` has {other}; only 'full_attention' can be upgraded.")
    is_own = config.model_type == "lr_attnres"
    if not is_own and getattr(config, "attention_bias", False):  # Qwen2's biases are in no field
        biases = "which adds a bias to `o_proj`; only biases of q, k and v, as in Qwen2, can be upgraded"
        raise LRAttnResError(f"`attention_bias` is {config.attention_bias!r}, {biases}.")
    fields = {name: getattr(config, name) for name in COPIED_FIELDS if getattr(config, name, None) is not None}
    try:
        return LRAttnResConfig(
            **fields,
            attention_dropout=config.attention_dropout or 0.0,
            rope_parameters=dict(config.rope_parameters),
            qk_norm=config.qk_norm if is_own else config.model_type == "qwen3",
            norm_weight=config.norm_weight if is_own else True,
            attention_bias=config.attention_bias if is_own else config.model_type == "qwen2",
            residual_type=residual_type,
            num_depth_blocks=num_depth_blocks,
            depth_key_rank=depth_key_rank,
            depth_heads=depth_heads,
            depth_scaled_eps=True,
            architectures=["LRAttnResForCausalLM"],
        )
    except StrictDataclassError as error:
        raise LRAttnResError(f"The upgrade gives no valid config: {explain_field_error(error)}") from error


class UpgradedWeights:
    """The state dict of the upgraded model: `tensors` has shapes and dtypes (meta), `make` one tensor's contents."""

    def __init__(self, source: PretrainedSource, seed: int, depth: dict[str, Any]):
        self.source, self.seed = source, seed
        self.config = config = upgraded_config(source.config, **depth)
        expected = ARCHITECTURES[source.config.model_type]
        if source.architecture not in (None, expected):
            raise LRAttnResError(f"`architectures` has {source.architecture}; only {expected} can be upgraded.")
        with torch.device("meta"):
            self.tensors = LRAttnResForCausalLM(config).state_dict()
        if config.tie_word_embeddings:
            del self.tensors["lm_head.weight"]
        unused = dict(source.tensors)
        for name, tensor in self.tensors.items():
            if name not in (QUERIES, EMBEDDING_KEY):
                shape = (config.hidden_size, tensor.shape[1]) if self.has_key_rows(name) else tuple(tensor.shape)
                self.tensors[name] = tensor.to(check_tensor(name, unused.pop(name, None), shape).dtype)
        config.dtype = self.tensors["model.embed_tokens.weight"].dtype
        if EMBEDDING_KEY in self.tensors:
            self.tensors[EMBEDDING_KEY] = self.tensors[EMBEDDING_KEY].to(config.dtype)
        self._check_unused(unused)

    def has_key_rows(self, name: str) -> bool:
        """Whether the projection gets `depth_key_rank` new rows, which emit the routing key."""
        return self.config.residual_type == "projected" and name.endswith((".o_proj.weight", ".down_proj.weight"))

    def make(self, name: str) -> torch.Tensor:
        shape, dtype = self.tensors[name].shape, self.tensors[name].dtype
        if name == QUERIES:
            return torch.zeros(shape, dtype=dtype)
        if name == EMBEDDING_KEY:
            return self._random_rows(name, *shape).to(dtype)
        if self.has_key_rows(name):
            keys = self._random_rows(name, self.config.depth_key_rank, shape[1])
            return torch.cat([self.source.read(name), keys.to(dtype)])
        return self.source.read(name)

    def _random_rows(self, name: str, *shape: int) -> torch.Tensor:
        """Depends on name and seed alone, not on the order in which tensors are made."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        return torch.randn(shape, generator=generator) * self.config.initializer_range

    def _check_unused(self, unused: dict[str, torch.Tensor]) -> None:
        """Raise for unused tensors, except RoPE buffers and the copy of a tied embedding."""
        names = sorted(name for name in unused if not name.endswith(".rotary_emb.inv_freq"))
        if self.config.tie_word_embeddings and "lm_head.weight" in names:
            names.remove("lm_head.weight")
            if not torch.equal(self.source.read("lm_head.weight"), self.source.read("model.embed_tokens.weight")):
                raise LRAttnResError("`tie_word_embeddings` is True, but lm_head.weight is not the embedding.")
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise LRAttnResError(f"The model has tensors that an upgraded model does not use: {shown}.")


def load_upgraded(
    model_or_path: PreTrainedModel | str | os.PathLike,
    *,
    seed: int = 0,
    revision: str | None = None,
    token: str | None = None,
    **depth: Any,
) -> LRAttnResForCausalLM:
    """The upgraded model in memory, with copied weights; for the arguments see `upgrade_model`."""
    weights = UpgradedWeights(open_source(model_or_path, revision, token), seed, depth)
    return model_from_weights(weights.config, {name: weights.make(name).clone() for name in weights.tensors})


def upgrade_model(
    model_or_path: PreTrainedModel | str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    residual_type: ResidualType = "sliced",
    num_depth_blocks: int | Literal["full"] | None = 8,
    depth_key_rank: int = 64,
    depth_heads: int = 1,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    base_model: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    max_shard_size: str = "2GB",
    verify: bool = False,
) -> Path:
    """Write the upgraded model as a folder that `from_pretrained` loads and `push` sends; returns the folder.

    Only one shard of the weights is in memory at a time. If anything fails, no folder is left behind.

    Args:
        model_or_path: a folder, a Hub repository or a model of type llama, mistral (no sliding window), qwen2 or
            qwen3, a GGUF file of one (a path, or `owner/name:file.gguf`), or a `standard` model of this project.
        residual_type, num_depth_blocks, depth_key_rank, depth_heads: as in `LRAttnResConfig`.
        seed: for the random key projections of `projected`.
        tokenizer: by default that of the source.
        base_model: the name of the source in the card; by default its Hub name or the name of its folder.
        revision, token: of a Hub repository.
        max_shard_size: a larger model is split into several files.
        verify: load the result in a fresh process and compare its logits with those of the source, in float32.
    """
    output_dir = Path(output_dir)
    check_absent(output_dir)
    source = open_source(model_or_path, revision, token)
    depth: dict[str, Any] = {"residual_type": residual_type, "num_depth_blocks": num_depth_blocks}
    depth |= {"depth_key_rank": depth_key_rank, "depth_heads": depth_heads}
    weights = UpgradedWeights(source, seed, depth)
    tokenizer = tokenizer or source.tokenizer()
    if tokenizer is None:
        logger.warning(f"No tokenizer was found for {source.name}, so none was written. Give one as `tokenizer`.")
    else:
        check_vocabulary(tokenizer, weights.config.vocab_size, source.name)
    with staged_folder(output_dir) as folder:
        source.copy_files(folder)
        write_model(
            folder,
            weights.config,
            weights.tensors,
            weights.make,
            max_shard_size,
            tokenizer=tokenizer,
            card_title=output_dir.name,
            base_model=base_model or source.name,
            license=source.license,
        )
        if verify:
            # float32 sums in another order
            compare_logits(folder, source.probe_logits(), tolerance=1e-4, dtype="float32")
    return output_dir
