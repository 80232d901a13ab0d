"""The configuration of an LR-AttnRes model: every architecture field, typed and validated."""

import math
import os
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters


# Fields of other models that Transformers' masks and caches would obey, and the values with which they do nothing.
OTHER_ATTENTION: dict[str, tuple] = {
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "attention_chunk_size": (None,),
    "is_causal": (None, True),
    "num_kv_shared_layers": (None, 0),
}

# Every entry point of a saved folder. Written into each config, so that a folder saved from one head also loads as
# the bare model or as another head with `trust_remote_code=True`.
AUTO_MAP = {
    "AutoConfig": "configuration_lr_attnres.LRAttnResConfig",
    "AutoModel": "modeling_lr_attnres.LRAttnResModel",
    "AutoModelForCausalLM": "modeling_lr_attnres.LRAttnResForCausalLM",
    "AutoModelForSequenceClassification": "modeling_lr_attnres.LRAttnResForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_lr_attnres.LRAttnResForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_lr_attnres.LRAttnResForQuestionAnswering",
}

ResidualType = Literal["standard", "attnres", "projected", "sliced"]


@strict
class LRAttnResConfig(PreTrainedConfig):
    r"""
    Configuration of a decoder whose residual sum is replaced by attention over depth. The defaults are the paper's
    Pareto model: sliced keys of rank 64 over 8 blocks, 0.5B parameters.

    Args:
        residual_type (`"standard"`, `"attnres"`, `"projected"` or `"sliced"`, defaults to `"sliced"`):
            What a site reads. `standard` is the ordinary residual sum. The others attend over the sources written so
            far and differ in the routing key of a source: the whole value (`attnres`), a key emitted by the output
            projection beside the value (`projected`), or the last `depth_key_rank` coordinates of the value
            (`sliced`).
        num_depth_blocks (`int`, *optional*, defaults to 8):
            Number of blocks into which the `2 * num_hidden_layers` sub-layers are summed; `None`, or as many as there
            are sub-layers, keeps every sub-layer as a source of its own. Ignored by `standard`.
        depth_key_rank (`int`, defaults to 64):
            Width of the routing keys and queries. Ignored by `standard`, always `hidden_size` for `attnres`.
        depth_key_norm (`bool`, defaults to `True`):
            RMS-normalise the routing keys.
        depth_query_norm (`bool`, defaults to `False`):
            RMS-normalise the queries.
        depth_logit_scale (`float`, defaults to 1.0):
            Constant factor of the depth logits.
        depth_block_exponent (`float`, defaults to 0.0):
            A block of `count` sub-layers has the value `sum / count ** depth_block_exponent`.
        depth_count_prior (`float`, defaults to 0.0):
            `depth_count_prior * log(count)` is added to the logit of a block of `count` sub-layers.
        depth_scaled_eps (`bool`, defaults to `False`):
            The norm after a read of `n` sources takes `rms_norm_eps / n**2`. The read is then normalised as the sum of
            its sources would be, `eps` included, so that zero queries give the logits of `standard` for any `eps`.
            Upgraded models have it on: their `eps` is larger than the default here, and their embeddings are small.
        qk_norm (`bool`, defaults to `True`):
            RMS-normalise the queries and keys of token attention, per head, before RoPE.
        norm_weight (`bool`, defaults to `False`):
            Learn a weight in every RMSNorm except the one of the routing keys.

    The other fields have the meaning they have in [`Qwen3Config`].

    ```python
    >>> from lr_attnres import LRAttnResConfig, LRAttnResForCausalLM

    >>> config = LRAttnResConfig(residual_type="projected", num_depth_blocks=8, depth_key_rank=32)
    >>> model = LRAttnResForCausalLM(config)
    ```
    """

    model_type = "lr_attnres"
    keys_to_ignore_at_inference = ["past_key_values"]
    default_theta = 500_000.0
    _auto_class = "AutoConfig"

    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    # The queries form their own group: FSDP2 wants one dtype per group and they are float32 in a model of any dtype.
    base_model_fsdp_plan = {
        "embed_tokens": "free_full_weight",
        "depth_queries": "free_full_weight",
        "depth_embedding_key": "free_full_weight",
        "layers.*": "free_full_weight",
        "norm": "keep_full_weight",
    }

    vocab_size: int = 100277
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 2**-23
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters | dict | None = None
    attention_dropout: float | int = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    residual_type: ResidualType = "sliced"
    num_depth_blocks: int | None = 8
    depth_key_rank: int = 64
    depth_key_norm: bool = True
    depth_query_norm: bool = False
    depth_logit_scale: float | int = 1.0
    depth_block_exponent: float | int = 0.0
    depth_count_prior: float | int = 0.0
    depth_scaled_eps: bool = False
    qk_norm: bool = True
    norm_weight: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        # Left at None when it cannot be derived: the validation then says why.
        if self.head_dim is None and self.num_attention_heads > 0 and self.hidden_size % self.num_attention_heads == 0:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.residual_type == "attnres":
            self.depth_key_rank = self.hidden_size
        self.auto_map = dict(AUTO_MAP)
        if isinstance(self.dtype, str) and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"`dtype` is {self.dtype!r}; it must be a dtype of torch, such as 'float32'.")
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        # A config loaded from the Hub points back to its repository; a saved folder carries its own code.
        self.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def attention_sizes(self) -> tuple[int, int]:
        """Key-value heads and the width of a head, which `__post_init__` has derived where they were None."""
        assert self.num_key_value_heads is not None and self.head_dim is not None
        return self.num_key_value_heads, self.head_dim

    @property
    def has_full_sources(self) -> bool:
        """Whether every sub-layer is a source of its own: without blocks, or with as many as there are sub-layers."""
        return self.num_depth_blocks is None or self.num_depth_blocks >= 2 * self.num_hidden_layers

    def validate_rope(self) -> None:
        """As in Transformers, but what is missing is an error of the config like any other."""
        try:
            super().validate_rope()
        except KeyError as error:
            raise ValueError(error.args[0]) from error

    def validate_architecture(self) -> None:
        """Part of the `@strict` validation, at construction and before saving."""
        self._check_sizes()
        self._check_attention()
        if self.residual_type != "standard":
            self._check_depth_routing()

    def _check_sizes(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
        for name in (*sizes, "num_attention_heads", "num_key_value_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        if not (self.rms_norm_eps > 0 and math.isfinite(self.rms_norm_eps)):
            raise ValueError(f"`rms_norm_eps` is {self.rms_norm_eps}; it must be a positive finite number.")
        if not (self.initializer_range >= 0 and math.isfinite(self.initializer_range)):
            raise ValueError(f"`initializer_range` is {self.initializer_range}; it must be finite and not negative.")
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"`attention_dropout` is {self.attention_dropout}; it must lie in [0, 1).")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` is {self.hidden_act!r}; it must be one of {', '.join(sorted(ACT2FN))}.")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"`pad_token_id` is {self.pad_token_id}; it must lie in 0..vocab_size - 1 = {self.vocab_size - 1}."
            )

    def _check_attention(self) -> None:
        if self.head_dim is None:
            raise ValueError(
                f"`hidden_size` is {self.hidden_size}, not a multiple of `num_attention_heads` = "
                f"{self.num_attention_heads}; change one of them or set `head_dim`."
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"`head_dim` is {self.head_dim}; RoPE rotates pairs, so it must be even and at least 2.")
        if self.num_key_value_heads and self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_key_value_heads` is {self.num_key_value_heads}; it must divide `num_attention_heads` = "
                f"{self.num_attention_heads}."
            )

        for name, neutral in OTHER_ATTENTION.items():
            if (value := getattr(self, name, None)) not in neutral:
                raise ValueError(f"`{name}` is {value!r}; every layer attends to all tokens before, so leave it out.")
        if other := set(getattr(self, "layer_types", None) or ()) - {"full_attention"}:
            raise ValueError(
                f"`layer_types` has {', '.join(map(repr, sorted(other)))}; 'full_attention' is all there is."
            )
        self._check_rope()

    def _check_rope(self) -> None:
        parameters: dict[str, Any] = {**(self.rope_parameters or {})}
        rope_type = parameters.get("rope_type")
        if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
            raise ValueError(f"`rope_parameters` has rope_type={rope_type!r}; it must be one of {known}.")
        if (part := parameters.get("partial_rotary_factor")) not in (None, 1):
            raise ValueError(
                f"`rope_parameters` has partial_rotary_factor={part!r}; whole heads are rotated: leave it out."
            )
        for name, least in (("rope_theta", 0), ("factor", 1)):
            value = parameters.get(name, 1)
            if type(value) not in (int, float) or not (math.isfinite(value) and value >= least) or value == 0:
                rule = "of at least 1" if least else "above 0"
                raise ValueError(f"`rope_parameters` has {name}={value!r}; it must be a finite number {rule}.")

    def _check_depth_routing(self) -> None:
        if self.num_depth_blocks is not None and self.num_depth_blocks < 1:
            raise ValueError(
                f"`num_depth_blocks` is {self.num_depth_blocks}; it must be at least 1, or None for one source per "
                "sub-layer."
            )
        if not 1 <= self.depth_key_rank <= self.hidden_size:
            raise ValueError(
                f"`depth_key_rank` is {self.depth_key_rank}; it must lie in 1..hidden_size = {self.hidden_size}."
            )
        if self.residual_type == "attnres" and self.depth_key_rank != self.hidden_size:
            raise ValueError(
                f"`depth_key_rank` is {self.depth_key_rank}; the key of `attnres` is the whole value, so it must be "
                f"hidden_size = {self.hidden_size}."
            )
        if not math.isfinite(self.depth_logit_scale):
            raise ValueError(f"`depth_logit_scale` is {self.depth_logit_scale}; it must be finite.")
        if self.depth_scaled_eps and self.depth_block_exponent != 0:
            raise ValueError(
                f"`depth_block_exponent` is {self.depth_block_exponent}; with `depth_scaled_eps`, which takes blocks "
                "for plain sums, it must be 0."
            )
        for name in ("depth_block_exponent", "depth_count_prior"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be finite and not negative.")


__all__ = ["LRAttnResConfig"]
