"""Depth routing as modules of the model: the learned queries, and the read that follows a sub-layer.

Shape letters: B batch, T tokens, D hidden size, R key rank, S sources of a site, L layers.
"""

import math
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import nn

from .configuration_lr_attnres import LRAttnResConfig
from .depth_routing import DepthBank, DepthSite, depth_logits, depth_merge, depth_mix, depth_rms_norm
from .depth_routing_triton import depth_merge as triton_depth_merge
from .depth_routing_triton import depth_merge_norm as triton_depth_merge_norm
from .depth_routing_triton import depth_mix as triton_depth_mix
from .depth_routing_triton import triton


# Phase 1 of a read, phase 2, and phase 2 with the norm that follows it: the same results, see `set_depth_backend`.
DEPTH_BACKENDS = {
    "torch": (depth_mix, depth_merge, None),
    "triton": (triton_depth_mix, triton_depth_merge, triton_depth_merge_norm),
}


def default_depth_backend(value: torch.Tensor) -> str:
    """The kernels on a GPU, except in float64."""
    is_for_triton = value.device.type == "cuda" and value.dtype != torch.float64 and triton is not None
    return "triton" if is_for_triton else "torch"


def is_plain_norm(norm: nn.Module | None) -> TypeGuard[nn.RMSNorm]:
    """Whether a kernel may compute it: nobody has wrapped it, listens to it or keeps its weight elsewhere."""
    if norm is None or "forward" in vars(norm) or type(norm).forward is not nn.RMSNorm.forward:
        return False
    return not (norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks)


def sublayer_output_size(config: LRAttnResConfig) -> int:
    """Width of what a sub-layer emits: its value and, in `projected`, its routing key, from one GEMM."""
    return config.hidden_size + (config.depth_key_rank if config.residual_type == "projected" else 0)


def emit(config: LRAttnResConfig, value: torch.Tensor, key: torch.Tensor | None = None) -> list[torch.Tensor]:
    """What a block sums, of a sub-layer's output or of the embedding: a value [B, T, D], whose last R coordinates are
    its routing key, or a value and a key [B, T, R]."""
    if key is None:
        return [value]
    if config.has_full_sources:
        return [value, key]  # nothing is summed: both stay what the projection emitted
    # Keys that are summed into blocks are normalised one by one first. A view would keep the unsummed value alive.
    key = key.contiguous()
    return [value, depth_rms_norm(key, config.rms_norm_eps) if config.depth_key_norm else key]


class KeptInFloat32(nn.Module):
    """A module that `model.to(torch.bfloat16)` moves, no more."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "KeptInFloat32":
        def keep_precision(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in (torch.float16, torch.bfloat16) else moved

        return super()._apply(keep_precision, recurse)


class LRAttnResDepthQueries(KeptInFloat32):
    """The learned static queries of sites 1..2L, zero at first: every site then reads the mean of its sources. In half
    precision their small updates would round away."""

    def __init__(self, config: LRAttnResConfig):
        super().__init__()
        self.query_norm_eps = config.rms_norm_eps if config.depth_query_norm else None
        self.key_norm_eps = config.rms_norm_eps if config.depth_key_norm else None
        self.logit_scale = config.depth_logit_scale
        shape = (2 * config.num_hidden_layers, config.depth_key_rank)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float32))

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Queries [2L, R] in float32 or better and, where keys are normalised, their floor: see `depth_logits`."""
        queries = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        if self.query_norm_eps is not None:
            queries = depth_rms_norm(queries, self.query_norm_eps)
        if self.key_norm_eps is None:
            return (queries * self.logit_scale,)
        rank = queries.shape[1]
        floor = queries.new_full((), math.sqrt(rank * self.key_norm_eps))
        return queries * (self.logit_scale * math.sqrt(rank)), floor


class LRAttnResDepthRead(nn.Module):
    """What follows sub-layer number `site`: its output is written as a source, then the site reads all its sources.

    The depth state is a flat run of tensors, empty in `standard`: the queries (and the floor of the key norm); the
    value and the logits of each completed source, oldest first; inside a block, the partial sum of the values (in
    `projected`, and of the keys); inside a group, the mixes of its older sources for the sites to come, then their
    log-sum-exps. It is flat because checkpointing, FSDP2 and the device hooks look at positional tensors only.
    """

    def __init__(self, config: LRAttnResConfig, site: DepthSite):
        super().__init__()
        self.config, self.residual_type = config, config.residual_type
        self.key_rank, self.key_norm = config.depth_key_rank, config.depth_key_norm
        self.num_routing = 2 if config.depth_key_norm else 1  # tensors at the head of the state: queries, floor
        self.backend: str | None = None  # by device
        self.site = site
        # Logits end with the last site's: where they have this site's.
        from_last = site.index - 2 * config.num_hidden_layers - 1
        self.here = slice(from_last, from_last + 1 or None)
        self.here_to_group_end = slice(from_last, from_last + site.group_size or None)
        self.scale = site.count**-config.depth_block_exponent
        self.prior = config.depth_count_prior * math.log(site.count)

    def forward(
        self,
        hidden_states: torch.Tensor,
        output: torch.Tensor,
        *depth_state: Any,
        norm: nn.Module | None = None,
        output_depth_weights: bool | None = False,
    ) -> tuple[torch.Tensor | DepthBank | None, ...]:
        """The depth state: tensors, or one `DepthBank`.
        -> hidden [B, T, D]; depth weights [B, T, S] if asked for; `norm` of hidden if given; *depth state."""
        if self.residual_type == "standard":
            hidden_states = hidden_states + output
            return hidden_states, None, None if norm is None else norm(hidden_states)

        emitted = emit(self.config, *self.split(output))
        if isinstance(depth_state[0], DepthBank):
            bank = depth_state[0]
            hidden_states, row_weights = bank.read(self.site, emitted, hidden_states.dtype)
            own_weights = row_weights[..., : self.site.num_completed + 1] if output_depth_weights else None
            return hidden_states, own_weights, None if norm is None else norm(hidden_states), bank

        num_kept = self.num_routing + 2 * self.site.num_completed
        routing, completed = depth_state[: self.num_routing], [*depth_state[self.num_routing : num_kept]]
        partial, mixes = self.add_to_partial(emitted, [*depth_state[num_kept:]])
        written = self.make_source(partial, *routing)
        source = None if self.site.closes_block else written
        if self.site.closes_block:
            completed, partial = [*completed, *written], []
        hidden_states, normed, mixes = self.read(completed, source, mixes, hidden_states.dtype, norm)
        weights = self.depth_weights(completed, source) if output_depth_weights else None
        return hidden_states, weights, normed, *routing, *completed, *partial, *mixes

    def read(
        self,
        completed: list[torch.Tensor],
        source: tuple[torch.Tensor, torch.Tensor] | None,
        mixes: list[torch.Tensor],
        dtype: torch.dtype,
        norm: nn.Module | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
        """Values and logits of the completed sources and, inside a block, of the partial one; the mixes made by the
        group so far -> hidden [B, T, D]; its norm; the mixes for the rest of the group."""
        values, logits = completed[0::2], completed[1::2]
        mix_older, merge_younger, merge_and_norm = DEPTH_BACKENDS[self.backend or default_depth_backend(values[0])]
        if self.site.opens_group:
            here_to_group_end = [older[..., self.here_to_group_end] for older in logits]
            *mixes, lses = mix_older(values, torch.stack(here_to_group_end, dim=-1))
            mixes = [*mixes, *lses.split(1, dim=-1)]
        if self.site.num_older == 1:
            mix, lse = values[0], logits[0][..., self.here]
        else:
            mix, lse = mixes[0], mixes[self.site.group_size]
            mixes = [*mixes[1 : self.site.group_size], *mixes[self.site.group_size + 1 :]]
        recent = zip(values[self.site.num_older :], logits[self.site.num_older :])
        younger = [(value, its_logits[..., self.here]) for value, its_logits in recent]
        younger = younger if source is None else [*younger, source]
        if merge_and_norm is not None and is_plain_norm(norm) and norm.eps is not None:
            return *merge_and_norm(mix, lse, younger, dtype, norm.weight, norm.eps), mixes
        hidden = merge_younger(mix, lse, younger, dtype)
        return hidden, None if norm is None else norm(hidden), mixes

    def depth_weights(
        self, completed: list[torch.Tensor], source: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """[B, T, S], oldest source first."""
        logits = [older[..., self.here] for older in completed[1::2]]
        return torch.cat(logits if source is None else [*logits, source[1]], dim=-1).softmax(dim=-1)

    def split(self, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The output of a sub-layer -> value [B, T, D] and, in `projected`, key [B, T, R]."""
        if self.residual_type != "projected":
            return (output,)
        return output.split([self.config.hidden_size, self.key_rank], dim=-1)

    def add_to_partial(
        self, emitted: list[torch.Tensor], state: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The partial sums with what was emitted now; what else is in the state."""
        if self.site.count == 1:
            return emitted, state
        return [old + new for old, new in zip(state, emitted)], state[len(emitted) :]

    def make_source(
        self, partial: list[torch.Tensor], queries: torch.Tensor, floor: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Value [B, T, D] and logits [B, T, sites]: for this site alone or, at a block's end, for all from here on."""
        value = partial[0] if self.scale == 1 else partial[0] * self.scale
        if len(partial) == 2:
            key = partial[1] if self.key_norm or self.scale == 1 else partial[1] * self.scale
        else:
            key = value[..., -self.key_rank :]
        first = self.site.index - 1
        readers = queries[first:] if self.site.closes_block else queries[first : first + 1]
        logits = depth_logits(key, readers, floor)
        return value, logits if self.prior == 0 else logits + self.prior
