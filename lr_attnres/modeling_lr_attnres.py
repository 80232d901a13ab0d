"""The LR-AttnRes decoder: a PreNorm Transformer whose residual sum is attention over depth.

Shape letters: B batch, T tokens, D hidden size, R key rank, H heads, S sources of a site, L layers.
"""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.utils import GenerateOutput
from transformers.masking_utils import create_causal_mask
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, auto_docstring, can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_lr_attnres import LRAttnResConfig
from .depth_routing import (
    DepthSite,
    depth_merge,
    depth_mix,
    depth_rms_norm,
    inference_rms_norm,
    is_eager_on_cpu,
    split_heads,
)
from .depth_routing_triton import INTERPRETED, triton
from .depth_routing_triton import depth_merge as triton_depth_merge
from .depth_routing_triton import depth_mix as triton_depth_mix
from .depth_state import (
    DepthBank,
    DepthState,
    KernelBank,
    Source,
    emit,
    read_site,
    scaled_queries,
    site_weights,
    start_state,
    unflatten_depth,
    write_source,
)


logger = logging.get_logger(__name__)

# Phase 1 and phase 2 of a read: both backends give the same results, see `set_depth_backend`.
DEPTH_BACKENDS = {"torch": (depth_mix, depth_merge), "triton": (triton_depth_mix, triton_depth_merge)}
# With at most this many tokens, norms use fewer operators and reads a `DepthBank`, which is slower with more.
FEW_TOKENS = 64
# Inside a `generate` with `output_depth_weights=True`, each step appends its depth weights; None otherwise.
generated_depth_weights: ContextVar[list | None] = ContextVar("generated_depth_weights", default=None)


@dataclass
class LRAttnResModelOutputWithPast(BaseModelOutputWithPast):
    r"""
    depth_weights (`tuple(torch.FloatTensor)`, *optional*, returned with `output_depth_weights=True`):
        One tensor `[batch, tokens, sources]`, or `[batch, tokens, heads, sources]` with several depth heads, per site
        1..2L: the softmax of its read, sources oldest first.
    """

    depth_weights: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class LRAttnResCausalLMOutputWithPast(CausalLMOutputWithPast):
    r"""
    depth_weights (`tuple(torch.FloatTensor)`, *optional*, returned with `output_depth_weights=True`):
        One tensor `[batch, tokens, sources]`, or `[batch, tokens, heads, sources]` with several depth heads, per site
        1..2L: the softmax of its read, sources oldest first.
    """

    depth_weights: tuple[torch.FloatTensor, ...] | None = None


class LRAttnResRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` (float32 inside), with weights only if the config asks for them."""

    def __init__(self, size: int, config: LRAttnResConfig):
        super().__init__(size, eps=config.rms_norm_eps, elementwise_affine=config.norm_weight)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # Only a step of generation, or another forward of few tokens, gains; elsewhere the logits stay, bit for bit,
        # those of the norm of Transformers' models. Not in training: reentrant checkpointing computes each layer a
        # second time, first without gradients. Check the size last: under a compiler it may depend on data.
        is_inference = not self.training and not torch.is_grad_enabled() and is_eager_on_cpu(hidden_states)
        if not (is_inference and (hidden_states.shape[1] == 1 or hidden_states.shape[:2].numel() <= FEW_TOKENS)):
            return super().forward(hidden_states)
        normalized = inference_rms_norm(hidden_states, cast(float, self.eps))
        if self.elementwise_affine:
            normalized = normalized * self.weight
        return normalized if normalized.dtype == hidden_states.dtype else normalized.to(hidden_states.dtype)


class KeptInFloat32(nn.Module):
    """Stays in float32 when the model is cast to half precision."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "KeptInFloat32":
        def keep_precision(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in (torch.float16, torch.bfloat16) else moved

        return super()._apply(keep_precision, recurse)


class LRAttnResDepthQueries(KeptInFloat32):
    """The learned static queries of sites 1..2L, in float32: in half precision small updates would round away.

    They start at zero, so that every read is the mean of its sources."""

    def __init__(self, config: LRAttnResConfig):
        super().__init__()
        self.query_norm_eps = config.rms_norm_eps if config.depth_query_norm else None
        self.key_norm_eps = config.rms_norm_eps if config.depth_key_norm else None
        self.logit_scale, self.heads = config.depth_logit_scale, config.depth_heads
        shape = (2 * config.num_hidden_layers, config.depth_key_rank)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float32))

    def forward(self, as_learned: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries [2L, R], or [2L, H, R / H] of H depth heads, in float32 or better, and the floor of the key norm, if
        any: see `depth_logits`. As they were learned, they are [2L, R], not scaled."""
        if as_learned:
            return self.weight, None
        queries = split_heads(self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)), self.heads)
        if self.query_norm_eps is not None:
            queries = depth_rms_norm(queries, self.query_norm_eps)
        return scaled_queries(queries, self.key_norm_eps, self.logit_scale)


class LRAttnResDepthRead(nn.Module):
    """The site after a sub-layer: writes the sub-layer's output as a source, then reads all sources."""

    def __init__(self, config: LRAttnResConfig, site: DepthSite):
        super().__init__()
        self.config, self.site = config, site
        self.backend = "torch"

    def forward(
        self,
        hidden_states: torch.Tensor,
        output: torch.Tensor,
        depth_state: DepthState | DepthBank,
        output_depth_weights: bool | None = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, DepthState | DepthBank]:
        """-> hidden [B, T, D]; depth weights [B, T, S] or [B, T, H, S] if asked for; the state for the next site.

        Only `standard` adds to `hidden_states`. The others replace them and take their dtype."""
        if self.config.residual_type == "standard":
            return hidden_states + output, None, depth_state
        if isinstance(depth_state, DepthBank):
            hidden_states, weights = depth_state.read(self.site, output, hidden_states.dtype, output_depth_weights)
            return hidden_states, weights, depth_state

        state, partial_source, weights = self.write(output, depth_state, output_depth_weights)
        backend = DEPTH_BACKENDS[self.backend]
        hidden_states, state = read_site(state, partial_source, self.site, hidden_states.dtype, *backend)
        return hidden_states, weights, state

    def write(
        self, output: torch.Tensor, depth_state: DepthState, output_depth_weights: bool | None
    ) -> tuple[DepthState, Source | None, torch.Tensor | None]:
        """-> the state with the output; inside a block, its sum so far as a source; the depth weights if asked for."""
        parts: tuple[torch.Tensor, ...] = (output,)
        if self.config.residual_type == "projected":  # value [B, T, D] and key [B, T, R]
            parts = output.split([self.config.hidden_size, self.config.depth_key_rank], dim=-1)
        state, partial_source = write_source(depth_state, emit(self.config, *parts), self.site, self.config)
        return state, partial_source, site_weights(state, partial_source, self.site) if output_depth_weights else None


def sublayer_output_size(config: LRAttnResConfig) -> int:
    """A sub-layer emits its value and, in `projected`, its routing key from one matrix product."""
    return config.hidden_size + (config.depth_key_rank if config.residual_type == "projected" else 0)


class LRAttnResMLP(nn.Module):
    def __init__(self, config: LRAttnResConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, sublayer_output_size(config), bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


def rope_parameters(config: LRAttnResConfig) -> dict[str, Any]:
    return {**(config.rope_parameters or {})}


class LRAttnResRotaryEmbedding(KeptInFloat32):
    """RoPE in float32: rounded frequencies give wrong angles at far positions."""

    def __init__(self, config: LRAttnResConfig):
        super().__init__()
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.config = config
        self.rope_type = rope_parameters(config)["rope_type"]
        init_function: Callable = self.compute_default_rope_parameters
        if self.rope_type != "default":
            init_function = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = init_function(config)
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)
        self.original_inv_freq = nn.Buffer(inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: LRAttnResConfig, **kwargs: Any) -> tuple[torch.Tensor, float]:
        _, head_dim = config.attention_sizes()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return rope_parameters(config)["rope_theta"] ** -exponents, 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def rotation_factors(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of `rotate` [B, 1, T, head_dim], made once for all layers."""
    first, second = sin.chunk(2, dim=-1)
    return cos.unsqueeze(1), torch.cat((-first, second), dim=-1).unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of all heads."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * signed_sin


def repeat_kv(states: torch.Tensor, groups: int) -> torch.Tensor:
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


def eager_attention_forward(
    module: "LRAttnResAttention",
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = repeat_kv(key, module.num_key_value_groups), repeat_kv(value, module.num_key_value_groups)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class LRAttnResAttention(nn.Module):
    def __init__(self, config: LRAttnResConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        num_key_value_heads, self.head_dim = config.attention_sizes()
        self.num_key_value_groups = config.num_attention_heads // num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, sublayer_output_size(config), bias=False)
        self.q_norm = LRAttnResRMSNorm(self.head_dim, config) if config.qk_norm else nn.Identity()
        self.k_norm = LRAttnResRMSNorm(self.head_dim, config) if config.qk_norm else nn.Identity()

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[FlashAttentionKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        head_shape = (*input_shape, -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(head_shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(head_shape)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(head_shape).transpose(1, 2)
        query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)

        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*input_shape, -1).contiguous()), weights


class LRAttnResDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: LRAttnResConfig, layer_idx: int, sites: list[DepthSite]):
        super().__init__()
        self.self_attn = LRAttnResAttention(config, layer_idx)
        self.mlp = LRAttnResMLP(config)
        self.input_layernorm = LRAttnResRMSNorm(config.hidden_size, config)
        self.post_attention_layernorm = LRAttnResRMSNorm(config.hidden_size, config)
        self.attn_read = LRAttnResDepthRead(config, sites[2 * layer_idx])
        self.mlp_read = LRAttnResDepthRead(config, sites[2 * layer_idx + 1])

    def forward(  # type: ignore[misc]
        self,
        hidden_states: torch.Tensor,
        *depth_tensors: torch.Tensor | DepthBank,
        depth_counts: tuple[int, ...] | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        output_depth_weights: bool | None = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Any, ...]:
        """Hidden states as read at site 2i and a flat depth state (see `DepthState.flatten`) -> hidden states as read
        at site 2i + 2, then the counts and the tensors that the two sub-layers have written."""
        start = unflatten_depth(depth_tensors, depth_counts)
        output, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states, _, state = self.attn_read(hidden_states, output, start, output_depth_weights)
        output = self.mlp(self.post_attention_layernorm(hidden_states))
        hidden_states, _, state = self.mlp_read(hidden_states, output, state, output_depth_weights)
        tensors, counts = state.written_since(start).flatten()
        return hidden_states, counts, *tensors


@auto_docstring
class LRAttnResPreTrainedModel(PreTrainedModel):
    config_class = LRAttnResConfig
    config: LRAttnResConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LRAttnResDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": LRAttnResDecoderLayer,
        "attentions": LRAttnResAttention,
        "depth_weights": OutputRecorder(LRAttnResDepthRead, index=1),
    }

    def __init__(self, config: LRAttnResConfig, *args: Any, **kwargs: Any):
        config.validate()  # again: `from_pretrained` sets overrides after the config was made
        super().__init__(config, *args, **kwargs)
        if config.residual_type != "standard":
            self._keep_in_fp32_modules_strict = ["depth_queries"]

    @property
    def depth_backend(self) -> str | None:
        """The backend of the reads; None in `standard`."""
        if self.config.residual_type == "standard":
            return None
        first = next(cast(LRAttnResModel, self.base_model).layers.children())  # a pipeline stage has a dict of them
        return cast(LRAttnResDecoderLayer, first).attn_read.backend

    def set_depth_backend(self, backend: str) -> None:
        """Compute the reads with `"torch"`, the default on every device, or with the `"triton"` kernels, on a GPU."""
        if backend not in DEPTH_BACKENDS:
            raise ValueError(f"The depth backend {backend!r} does not exist; choose one of {list(DEPTH_BACKENDS)}.")
        if self.config.residual_type == "standard":
            raise ValueError(f"The depth backend {backend!r} has nothing to read: `residual_type` is 'standard'.")
        if backend == "triton" and triton is None:
            raise ImportError("The depth backend 'triton' needs triton: `pip install triton`, or choose 'torch'.")
        if backend == "triton" and not (INTERPRETED or torch.cuda.is_available() or torch.xpu.is_available()):
            raise ValueError("The depth backend 'triton' needs a GPU, and torch sees none: choose 'torch'.")
        for module in self.modules():
            if isinstance(module, LRAttnResDepthRead):
                module.backend = backend

    def compile_layers(self, **options: Any) -> None:
        """Compile attention and feed-forward modules in place, each kind once for all layers; `options` are those of
        `torch.compile`. This takes much less time than to compile the whole model. Reads stay eager: a compiler would
        make a graph for each number of sources."""
        for module in self.modules():
            if isinstance(module, (LRAttnResAttention, LRAttnResMLP)):
                module.compile(**options)

    @property
    def supports_pp_plan(self) -> bool:
        """Engines ask this before they cut the model into pipeline stages. vLLM would cut it even without a plan."""
        raise NotImplementedError(
            "This engine cannot cut LR-AttnRes into pipeline stages: its stages pass on one tensor, but a layer reads "
            "what all earlier layers wrote. Use one stage, and tensor parallelism instead (vLLM: "
            "--tensor-parallel-size). For training there is `lr_attnres.pipeline_stage`."
        )

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:  # type: ignore[override]
        """Check the model and send it in one commit, as `lr_attnres.push` does. Remote code without the `lr_attnres`
        package falls back to the method of Transformers."""
        try:
            from lr_attnres.hub_upload import push_model
        except ImportError as error:
            if getattr(error, "name", None) != "lr_attnres":  # damaged, or another version
                logger.warning(f"The checks of `lr_attnres` are left out, because it cannot be imported: {error}")
            return super().push_to_hub(repo_id, **kwargs)  # type: ignore[arg-type]
        return push_model(self, repo_id, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LRAttnResDepthQueries):
            init.zeros_(module.weight)


@auto_docstring
class LRAttnResModel(LRAttnResPreTrainedModel):
    _auto_class = "AutoModel"

    def __init__(self, config: LRAttnResConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.residual_type != "standard":
            self.depth_queries = LRAttnResDepthQueries(config)
        if config.residual_type == "projected":
            self.depth_embedding_key = nn.Linear(config.hidden_size, config.depth_key_rank, bias=False)
        sites = DepthSite.schedule(2 * config.num_hidden_layers, config.num_depth_blocks)
        self.num_sources = sites[-1].num_sources
        layers = [LRAttnResDecoderLayer(config, layer_idx, sites) for layer_idx in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = LRAttnResRMSNorm(config.hidden_size, config)
        if config.depth_scaled_eps and config.residual_type != "standard":
            norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
            for site, norm in zip(sites, [*norms[1:], self.norm]):  # the first norm follows site 0: no read
                norm.eps = config.rms_norm_eps / site.num_sources**2
        self.rotary_emb = LRAttnResRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def start_depth_state(self, embeddings: torch.Tensor, may_use_bank: bool = True) -> DepthState | DepthBank:
        """The depth state with one source, the embedding."""
        if self.config.residual_type == "standard":
            return DepthState()
        key = self.depth_embedding_key(embeddings) if self.config.residual_type == "projected" else None
        has_bank = may_use_bank and self.reads_from_bank(embeddings)
        if has_bank and self.depth_backend == "triton":
            queries, _ = self.depth_queries(as_learned=True)
            return KernelBank(self.config, self.num_sources, embeddings, key, queries)
        queries, floor = self.depth_queries()
        if has_bank:
            return DepthBank(self.config, self.num_sources, embeddings, key, queries, floor)
        return start_state(self.config, embeddings, key, queries, floor)

    def reads_from_bank(self, embeddings: torch.Tensor) -> bool:
        """True in an eager forward of at most `FEW_TOKENS` tokens without gradients, such as a step of generation. A
        compiler fuses the general reads better."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or embeddings.shape[:2].numel() > FEW_TOKENS:
            return False
        if torch._C._are_functorch_transforms_active():  # which cannot batch writes in place
            return False
        if self.config.depth_block_exponent != 0 or self.config.depth_count_prior != 0:
            return False
        return embeddings.is_meta or not torch.is_autocast_enabled(embeddings.device.type)

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(  # type: ignore[misc]
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LRAttnResModelOutputWithPast:
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        # `config.output_depth_weights` also turns the recording on; the reads must know.
        kwargs.setdefault("output_depth_weights", getattr(self.config, "output_depth_weights", False))

        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)

        hidden_states, _ = self.run_layers(
            self.layers[: self.config.num_hidden_layers],
            inputs_embeds,  # site 0 reads the embedding alone
            self.start_depth_state(inputs_embeds),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        return LRAttnResModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states),
            past_key_values=past_key_values if use_cache else None,
        )

    def run_layers(
        self,
        layers: Iterable[nn.Module],
        hidden_states: torch.Tensor,
        depth_state: DepthState | DepthBank,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, DepthState | DepthBank]:
        """Consecutive layers, all of them or those of a pipeline stage: what the first one reads and the depth state
        before it -> what the layer after the last one reads and the depth state before that layer."""
        # `create_causal_mask` looks for packed documents in `position_ids` only without a cache: hide an empty one.
        is_empty_cache = isinstance(past_key_values, DynamicCache) and past_key_values.get_seq_length() == 0
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=None if is_empty_cache else past_key_values,
            position_ids=position_ids,
        )
        if position_ids is None:
            past_seen_tokens = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)
        position_embeddings = rotation_factors(*self.rotary_emb(hidden_states, position_ids))
        for decoder_layer in cast(Iterable[LRAttnResDecoderLayer], layers):
            tensors, counts = depth_state.flatten()
            hidden_states, counts, *written = decoder_layer(
                hidden_states,
                *tensors,
                depth_counts=counts,
                attention_mask=causal_mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                **kwargs,
            )
            depth_state = depth_state.with_written(written, counts, decoder_layer.mlp_read.site)
        return hidden_states, depth_state


def positions_to_keep(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """The last `logits_to_keep` positions (0: all), or those of a tensor: positions of all rows [P], positions of each
    row [B, P], or a mask [B, T], which gives [kept, D]. Transformers has this function only since 5.21."""
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:]
    if logits_to_keep.ndim == 1:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep[..., None], dim=1)


@auto_docstring
class LRAttnResForCausalLM(LRAttnResPreTrainedModel, GenerationMixin):
    _auto_class = "AutoModelForCausalLM"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: LRAttnResConfig):
        super().__init__(config)
        self.model = LRAttnResModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Set by `use_chunked_loss`: (head, hidden states, labels, **kwargs) -> loss, without logits of the whole batch
        self.chunked_loss: Callable | None = None
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(  # type: ignore[misc]
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_depth_weights: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LRAttnResCausalLMOutputWithPast:
        r"""
        output_depth_weights (`bool`, *optional*):
            Whether to return the depth weights of every site. `generate` takes it too.
        """
        if output_depth_weights is not None:  # else the config decides
            kwargs["output_depth_weights"] = output_depth_weights
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        loss, logits = None, None
        if labels is not None and self.chunked_loss is not None:
            loss = self.chunked_loss(self.lm_head, outputs.last_hidden_state, labels, **kwargs)
        else:
            logits = self.lm_head(positions_to_keep(outputs.last_hidden_state, logits_to_keep))
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)

        return LRAttnResCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            depth_weights=outputs.depth_weights,
        )

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> GenerateOutput | torch.LongTensor:
        """As in Transformers. With `output_depth_weights=True, return_dict_in_generate=True` the output also has
        `depth_weights`: for each step one tuple over the sites of `[batch, tokens, sources]`, or `[batch, tokens,
        heads, sources]` with depth heads, where the first step has the tokens of the prompt and every later one the
        token that it continues."""
        steps: list[tuple] | None = [] if kwargs.get("output_depth_weights") else None
        returns_dict = (generation_config or self.generation_config).return_dict_in_generate
        if steps is not None and not kwargs.get("return_dict_in_generate", returns_dict):
            raise ValueError("`output_depth_weights=True` in `generate` needs `return_dict_in_generate=True`.")
        token = generated_depth_weights.set(steps)
        try:
            outputs = super().generate(inputs, generation_config, *args, **kwargs)  # type: ignore[misc]
        finally:
            generated_depth_weights.reset(token)
        if steps is not None and isinstance(outputs, ModelOutput):
            outputs["depth_weights"] = tuple(steps)
        return outputs

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        steps = generated_depth_weights.get()
        if steps is not None:
            # Assisted decoding also reads candidates that it then rejects; it alone passes `num_new_tokens`.
            num_rejected = outputs.logits.shape[1] - kwargs["num_new_tokens"] if "num_new_tokens" in kwargs else 0
            # Clone: compiled decoding reuses the memory for the next step.
            steps.append(tuple(weights[:, : -num_rejected or None].clone() for weights in outputs.depth_weights))
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)


# The generic heads of Transformers build their base model with AutoModel, which fails for remote code. So each
# `__init__` below names `LRAttnResModel`. For depth weights call `model.model`.


class LRAttnResForSequenceClassification(GenericForSequenceClassification, LRAttnResPreTrainedModel):
    _auto_class = "AutoModelForSequenceClassification"

    def __init__(self, config: LRAttnResConfig):
        LRAttnResPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = LRAttnResModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()


class LRAttnResForTokenClassification(GenericForTokenClassification, LRAttnResPreTrainedModel):
    _auto_class = "AutoModelForTokenClassification"

    def __init__(self, config: LRAttnResConfig):
        LRAttnResPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = LRAttnResModel(config)
        dropout = getattr(config, "classifier_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()


class LRAttnResForQuestionAnswering(GenericForQuestionAnswering, LRAttnResPreTrainedModel):
    _auto_class = "AutoModelForQuestionAnswering"

    def __init__(self, config: LRAttnResConfig):
        LRAttnResPreTrainedModel.__init__(self, config)
        self.model = LRAttnResModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


__all__ = [
    "LRAttnResForCausalLM",
    "LRAttnResForQuestionAnswering",
    "LRAttnResForSequenceClassification",
    "LRAttnResForTokenClassification",
    "LRAttnResModel",
    "LRAttnResPreTrainedModel",
]
