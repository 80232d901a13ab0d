"""The configuration of an LR-AttnRes model: every architecture field, typed and validated."""

import dataclasses
import difflib
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers.activations import ACT2FN
from transformers.utils.quantization_config import QuantizationConfigMixin


# Before the imports that older versions lack. Since 5.4 a config is a validated dataclass.
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 4):
    raise ImportError(
        f"LR-AttnRes needs transformers 5.4 or newer; {transformers.__version__} is installed. "
        "Upgrade it: pip install --upgrade 'transformers>=5.4,<6'"
    )

from transformers.configuration_utils import PreTrainedConfig  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters  # noqa: E402


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
    Configuration of a decoder whose residual sum is replaced by attention over depth. Every attention and MLP (a
    sub-layer) writes its output as a *source*, or adds it to a *block* of sub-layers that is one source. Wherever an
    ordinary Transformer reads its residual sum (a *site*), this model reads a softmax-weighted mix of the sources.
    The defaults are the paper's Pareto model: sliced keys of rank 64 over 8 blocks, 0.5B parameters. A wrong field
    raises huggingface_hub's `StrictDataclassError`, which names it.

    Args:
        residual_type (`"standard"`, `"attnres"`, `"projected"` or `"sliced"`, defaults to `"sliced"`):
            What a site reads. `standard` is the ordinary residual sum. The others attend over the sources written so
            far and differ in the routing key of a source: the whole value (`attnres`), a key emitted by the output
            projection beside the value (`projected`), or the last `depth_key_rank` coordinates of the value
            (`sliced`).
        num_depth_blocks (`int` or `"full"`, *optional*, defaults to 8):
            Number of blocks into which the `2 * num_hidden_layers` sub-layers are summed. `None` or `"full"`, or as
            many as there are sub-layers, makes every sub-layer a source. Ignored by `standard`.
        depth_key_rank (`int`, defaults to 64):
            Width of the routing keys and queries. Ignored by `standard`, always `hidden_size` for `attnres`.
        depth_heads (`int`, defaults to 1):
            Number of reads side by side. Each head has its own slice of keys, queries and values, of
            `depth_key_rank / depth_heads` and `hidden_size / depth_heads` coordinates, and its own depth weights.
            Ignored by `standard`.
        depth_key_norm (`bool`, defaults to `True`):
            RMS-normalise the routing keys, each depth head on its own.
        depth_query_norm (`bool`, defaults to `False`):
            RMS-normalise the queries, each depth head on its own.
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
        attention_bias (`bool`, defaults to `False`):
            Biases in the query, key and value projections of token attention, as in Qwen2; the output projection has
            none.

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
    num_depth_blocks: int | Literal["full"] | None = 8
    depth_key_rank: int = 64
    depth_heads: int = 1
    depth_key_norm: bool = True
    depth_query_norm: bool = False
    depth_logit_scale: float | int = 1.0
    depth_block_exponent: float | int = 0.0
    depth_count_prior: float | int = 0.0
    depth_scaled_eps: bool = False
    qk_norm: bool = True
    norm_weight: bool = False
    attention_bias: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        try:
            self._check_unknown(kwargs)
            if self.num_key_value_heads is None:
                self.num_key_value_heads = self.num_attention_heads
            # Stays None when it cannot be derived; the validation then explains.
            heads = self.num_attention_heads
            if self.head_dim is None and heads > 0 and self.hidden_size % heads == 0:
                self.head_dim = self.hidden_size // heads
            if self.num_depth_blocks == "full":
                self.num_depth_blocks = None
            if self.residual_type == "attnres":
                self.depth_key_rank = self.hidden_size
            self.auto_map = dict(AUTO_MAP)
            super().__post_init__(**kwargs)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # One kind of error for everything that is wrong with a config.
            raise StrictDataclassClassValidationError("__post_init__", error) from error

    def _check_unknown(self, unknown: dict[str, Any]) -> None:
        """Transformers keeps unknown fields: refuse those that it would trip over, and misspelt ones of ours."""
        attention = unknown.get("attn_implementation")
        if isinstance(attention, str) and attention.startswith((".", "/", "~")):  # else taken for a kernel on the Hub
            raise ValueError(f"`attn_implementation` is {attention!r}, a path; give a name such as 'sdpa' or 'eager'.")
        known = [field.name for field in dataclasses.fields(self)]
        for name, value in unknown.items():
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if name.startswith("depth_") or (near and not hasattr(type(self), name)):
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise ValueError(f"LRAttnResConfig has no field `{name}`{hint}; remove it or correct its name.")
            if name in OTHER_MODELS:
                _check_neutral(name, value)
            elif name in RANGES:
                _check_range(name, value)
            elif hasattr(type(self), name) and name not in SETTABLE:
                raise ValueError(f"`{name}` is an attribute of every config, not a field: remove it.")
            elif name in INHERITED_TYPES and not isinstance(value, INHERITED_TYPES[name]):
                raise ValueError(f"`{name}` is {value!r}; expected {INHERITED_TYPES[name]}.")
        for label in self.id2label or {}:
            if not str(label).isdecimal():
                raise ValueError(f"`id2label` has the key {label!r}; keys must be whole numbers.")
        for dtype in (self.dtype, unknown.get("torch_dtype")):
            torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
            if dtype is not None and not (isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point):
                raise ValueError(f"`dtype` is {dtype!r}; it must be a floating dtype of torch, such as 'float32'.")

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        # A config loaded from the Hub points back to its repository; a saved folder carries its own code.
        self.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def attention_sizes(self) -> tuple[int, int]:
        """`num_key_value_heads` and `head_dim`, which `__post_init__` derives where they are None."""
        assert self.num_key_value_heads is not None and self.head_dim is not None
        return self.num_key_value_heads, self.head_dim

    @property
    def has_full_sources(self) -> bool:
        """Whether every sub-layer is a source: no blocks, or as many as there are sub-layers."""
        return not isinstance(self.num_depth_blocks, int) or self.num_depth_blocks >= 2 * self.num_hidden_layers

    def validate_rope(self) -> None:
        """As in Transformers, but a missing key raises a ValueError like every other mistake in a config."""
        try:
            super().validate_rope()
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"`rope_parameters` is {self.rope_parameters}: {error}") from error

    def validate_architecture(self) -> None:
        """Part of the `@strict` validation, at construction and before saving."""
        for name in RANGES:
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name))
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"`attention_dropout` is {self.attention_dropout}; it must lie in [0, 1).")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` is {self.hidden_act!r}; it must be one of {', '.join(sorted(ACT2FN))}.")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            ids = getattr(self, name)
            if not all(0 <= token < self.vocab_size for token in (ids if isinstance(ids, list) else [ids or 0])):
                raise ValueError(f"`{name}` is {ids}; it must lie in 0..vocab_size - 1 = {self.vocab_size - 1}.")
        self._check_attention()
        self._check_rope()
        if self.residual_type != "standard":
            self._check_depth_routing()

    def _check_attention(self) -> None:
        if self.head_dim is None:
            raise ValueError(
                f"`hidden_size` is {self.hidden_size}, not a multiple of `num_attention_heads` = "
                f"{self.num_attention_heads}; change one of them or set `head_dim`."
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` is {self.head_dim}; RoPE rotates pairs, so it must be even.")
        if self.num_key_value_heads and self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_key_value_heads` is {self.num_key_value_heads}; it must divide `num_attention_heads` = "
                f"{self.num_attention_heads}."
            )
        for name in OTHER_MODELS:
            _check_neutral(name, getattr(self, name, None))
        layer_types = getattr(self, "layer_types", None)
        if layer_types is not None and list(layer_types) != ["full_attention"] * len(layer_types):
            raise ValueError(f"`layer_types` is {layer_types!r}; only 'full_attention' exists here.")

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
        for name in [name for name in ROPE_RANGES if name in parameters]:
            self._check_rope_number(name, parameters[name])
        low, high = parameters.get("low_freq_factor", 0), parameters.get("high_freq_factor", math.inf)
        if rope_type == "llama3" and low >= high:
            raise ValueError(f"`rope_parameters` has low_freq_factor={low}; it must be below high_freq_factor={high}.")
        if rope_type == "yarn" and parameters["rope_theta"] <= 1:
            raise ValueError(f"`rope_parameters` has rope_theta={parameters['rope_theta']}; yarn needs more than 1.")
        if rope_type == "dynamic" and self.head_dim == 2:
            raise ValueError("`head_dim` is 2; `rope_parameters` of the type dynamic need at least 4.")

    def _check_rope_number(self, name: str, value: Any) -> None:
        if name in ("short_factor", "long_factor"):
            size = self.attention_sizes()[1] // 2
            if not isinstance(value, Sequence) or len(value) != size:
                raise ValueError(f"`rope_parameters` has {name}={value!r}; it must be a list of {size} numbers.")
            for number in value:
                _check_range(f"{name} of rope_parameters", number, ROPE_RANGES[name])
        elif value is not None or name in ("rope_theta", "factor"):
            _check_range(f"{name} of rope_parameters", value, ROPE_RANGES[name])

    def _check_depth_routing(self) -> None:
        if not 1 <= self.depth_key_rank <= self.hidden_size:
            raise ValueError(
                f"`depth_key_rank` is {self.depth_key_rank}; it must lie in 1..hidden_size = {self.hidden_size}."
            )
        if self.residual_type == "attnres" and self.depth_key_rank != self.hidden_size:
            raise ValueError(
                f"`depth_key_rank` is {self.depth_key_rank}; the key of `attnres` is the whole value, so it must be "
                f"hidden_size = {self.hidden_size}."
            )
        for name in ("hidden_size", "depth_key_rank"):
            if getattr(self, name) % self.depth_heads:
                raise ValueError(
                    f"`depth_heads` is {self.depth_heads}; it must divide `{name}` = {getattr(self, name)}."
                )
        if self.depth_scaled_eps and self.depth_block_exponent != 0:
            raise ValueError(
                f"`depth_block_exponent` is {self.depth_block_exponent}; with `depth_scaled_eps`, which assumes "
                "that a block is a plain sum, it must be 0."
            )


# Smallest and largest value. The upper bounds stop a typo before it overflows float32 or fills the memory.
RANGES: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 10**7),
    "hidden_size": (1, 10**6),
    "intermediate_size": (1, 10**7),
    "num_hidden_layers": (1, 10_000),
    "num_attention_heads": (1, 10**5),
    "num_key_value_heads": (1, 10**5),
    "head_dim": (2, 10**5),
    "max_position_embeddings": (1, 10**9),
    "initializer_range": (0, 100),
    "rms_norm_eps": (1e-30, 1),
    "num_labels": (1, 10**6),
    "num_depth_blocks": (1, 10**5),
    "depth_heads": (1, 10**6),
    "depth_logit_scale": (-(10**6), 10**6),
    "depth_block_exponent": (0, 10),
    "depth_count_prior": (0, 10**6),
}
ROPE_RANGES: dict[str, tuple[float, float]] = {
    "rope_theta": (1e-3, 1e30),
    "factor": (1, 10**6),
    "original_max_position_embeddings": (2, 10**9),  # longrope divides by its logarithm
    "low_freq_factor": (1e-3, 10**6),
    "high_freq_factor": (1e-3, 10**6),
    "beta_fast": (1e-3, 10**6),
    "beta_slow": (1e-3, 10**6),
    "attention_factor": (1e-3, 10**3),
    "mscale": (0, 10**3),
    "mscale_all_dim": (0, 10**3),
    "short_factor": (1e-3, 10**6),
    "long_factor": (1e-3, 10**6),
}
# Fields that Transformers' shared code obeys or that other models have, with the values that switch them off.
OTHER_MODELS: dict[str, tuple] = {
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "attention_chunk_size": (None,),
    "is_causal": (None, True),
    "num_kv_shared_layers": (None, 0),
    "is_encoder_decoder": (None, False),
    "experts_implementation": (None,),
    "mlp_bias": (None, False),
}
# Types of fields that Transformers takes beside those of the class.
INHERITED_TYPES: dict[str, Any] = {
    "attn_implementation": str | dict | None,
    "layer_types": list | tuple | None,
    "mtp_layer_types": list | tuple | None,
    "output_attentions": bool | None,
    "torch_dtype": str | torch.dtype | None,
    "quantization_config": dict | QuantizationConfigMixin | None,
}
# Class attributes of Transformers' config that a config.json may set; other names would overwrite a method.
SETTABLE = {"model_type", "name_or_path", "num_labels", "output_attentions", "rope_scaling", "torch_dtype"}


def _check_range(name: str, value: Any, bounds: tuple[float, float] | None = None) -> None:
    low, high = bounds or RANGES[name]
    if type(value) not in (int, float) or not low <= value <= high:  # also refuses NaN
        raise ValueError(f"`{name}` is {value!r}; it must be a number of at least {low:g} and at most {high:g}.")


def _check_neutral(name: str, value: Any) -> None:
    neutral = OTHER_MODELS[name]
    if not any(type(value) is type(other) and value == other for other in neutral):
        raise ValueError(f"`{name}` is {value!r}; this model has no such feature: leave it out.")


__all__ = ["LRAttnResConfig"]
