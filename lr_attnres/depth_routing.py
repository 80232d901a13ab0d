"""Depth routing: what a sub-layer writes, and how a site reads what was written before it.

Shape letters: B batch, T tokens, D hidden size, R key rank, S sources, G sites of a group, M sub-layers.

Three facts make a read cheap. Queries do not depend on the input, so the logits of a source for all later sites are
one small matrix product, made once, when the source is written. Sites come in groups: the sources that are older than
the group are mixed once for all of its sites (phase 1), and a site only merges the few younger ones (phase 2). And the
backward rebuilds what it needs from logits and from the hidden states that the next norm keeps anyway.
"""

import math
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.generic import maybe_autocast


def depth_block_ends(num_sublayers: int, num_blocks: int | None) -> list[int]:
    """The numbers of written sub-layers at which a block is complete: `ceil(M * i / N)` for i = 1..N."""
    if num_blocks is None or num_blocks >= num_sublayers:
        return list(range(1, num_sublayers + 1))
    return [-(-num_sublayers * i // num_blocks) for i in range(1, num_blocks + 1)]


@dataclass(frozen=True)
class DepthSite:
    """What is known of a site before any input is."""

    index: int  # site `index` reads after this many sub-layers have written
    count: int  # sub-layers in the block that the last of them was written to, itself included
    closes_block: bool  # that block is complete now
    num_completed: int  # completed sources before it, the embedding included
    opens_group: bool  # phase 1 happens here, for this site and the rest of its group
    num_older: int  # sources that phase 1 mixed; 1: the embedding alone, which needs no mixing
    group_size: int  # sites left in the group, this one included

    @classmethod
    def schedule(cls, num_sublayers: int, num_blocks: int | None) -> list["DepthSite"]:
        """Sites 1..M. A group opens at the first block end that leaves the group before it at least sqrt(M) sites,
        which balances the older sources, read once per group, against the younger ones, read once per site."""
        ends = depth_block_ends(num_sublayers, num_blocks)
        opens = [1]
        for end in ends:
            if end - opens[-1] >= math.isqrt(num_sublayers):
                opens.append(end)
        sites = []
        for index in range(1, num_sublayers + 1):
            opened = max(start for start in opens if start <= index)
            num_older = 1 if opened == 1 else 1 + sum(end <= opened for end in ends)
            sites.append(
                cls(
                    index=index,
                    count=index - max((end for end in ends if end < index), default=0),
                    closes_block=index in ends,
                    num_completed=1 + sum(end < index for end in ends),
                    opens_group=opened == index and num_older > 1,
                    num_older=num_older,
                    group_size=min((start for start in opens if start > index), default=num_sublayers + 1) - index,
                )
            )
        return sites


def depth_rms_norm(key: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm without weights, in float32 or better: [..., R] -> [..., R]."""
    key = key.to(torch.promote_types(key.dtype, torch.float32))
    return torch.nn.functional.rms_norm(key, key.shape[-1:], eps=eps)


def depth_logits(key: torch.Tensor, queries: torch.Tensor, floor: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of one source for a run of sites: key [B, T, R], queries [sites, R] -> [B, T, sites].

    With a floor the key is divided by its norm, `hypot(|key|, floor)`. That is the RMSNorm of the paper for queries
    that were multiplied by `sqrt(R)` and a floor of `sqrt(R * eps)`: two operations fewer for each source.
    """
    if key.dtype != queries.dtype:
        key = key.to(queries.dtype)
    # Autocast would make this product in half precision.
    with maybe_autocast(device_type=key.device.type, enabled=False):
        logits = torch.nn.functional.linear(key, queries)
    # The norm is a factor per token: applied to the logits, it needs no normalised copy of the key.
    return (
        logits if floor is None else logits / torch.hypot(torch.linalg.vector_norm(key, dim=-1, keepdim=True), floor)
    )


def naive_depth_read(values: list[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    """The read as the paper writes it, left to autograd: S values [B, T, D], logits [B, T, S] -> hidden [B, T, D]."""
    weights = logits.softmax(dim=-1)
    return (weights.unsqueeze(-1) * torch.stack(values, dim=-2)).sum(-2).to(values[0].dtype)


def depth_read(values: list[torch.Tensor], logits: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What `naive_depth_read` gives, without a stack of the sources: one pass over each, forward and backward,
    accumulated in the dtype of the logits and cast once, to `dtype` (default: that of the values)."""
    read = DepthRead.apply if needs_grad(logits, *values) else read_sources
    return read(dtype or values[0].dtype, logits, *values)


def depth_mix(values: list[torch.Tensor], logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Phase 1: S values [B, T, D], logits [B, T, G, S] -> G mixes [B, T, D], then their log-sum-exps [B, T, G]."""
    mix, lse = DepthMix.apply(logits, *values) if needs_grad(logits, *values) else mix_sources(logits, *values)
    return *mix.unbind(-2), lse


def depth_merge(
    mix: torch.Tensor, lse: torch.Tensor, younger: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
) -> torch.Tensor:
    """Phase 2: a mix [B, T, D] with its log-sum-exp [B, T, 1] and Y younger sources, each a value [B, T, D] and a
    logit [B, T, 1] -> hidden [B, T, D]. It is a read in which the mix stands for all its sources."""
    if not younger:
        return mix.contiguous().to(dtype)  # not a view, which would keep the mixes of the whole group alive
    if len(younger) == 1:  # the partial of a block
        ((value, logit),) = younger
        merge = DepthMerge.apply if needs_grad(mix, lse, value, logit) else merge_sources
        return merge(dtype, logit - lse, mix, value)
    values = [value for value, _ in younger]
    logits = torch.cat([lse, *(logit for _, logit in younger)], dim=-1)
    return depth_read([mix, *values], logits, dtype)


def needs_grad(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def mix_sources(logits: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [B, T, G, S], S values [B, T, D] -> mix [B, T, G, D], log-sum-exp [B, T, G], in the logits' dtype."""
    weights = logits.softmax(dim=-1)
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if weights.device.type == "cpu" and not is_traced:
        return mix_tokens(weights, values), logits.logsumexp(dim=-1)
    mix = weights[..., 0, None] * values[0].unsqueeze(-2)
    for i in range(1, len(values)):
        # In place: a new tensor of this size for each source would cost more than the sum itself.
        mix.addcmul_(weights[..., i, None], values[i].unsqueeze(-2))
    return mix, logits.logsumexp(dim=-1)


def mix_tokens(weights: torch.Tensor, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """weights [B, T, G, S], S values [B, T, D] -> mix [B, T, G, D], by matrix products for as many tokens at a time as
    the cache of a CPU holds with all their sources and mixes."""
    mix = weights.new_empty(*weights.shape[:-1], values[0].shape[-1])
    with maybe_autocast(device_type="cpu", enabled=False):
        for out, factors, *sources in zip(*(part.flatten(0, 1).split(128) for part in (mix, weights, *values))):
            torch.bmm(factors, torch.stack(sources, dim=1).to(factors.dtype), out=out)
    return mix


def merge_sources(dtype: torch.dtype, logit: torch.Tensor, mix: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """logit [B, T, 1] of the value above that of the mix, mix and value [B, T, D] -> hidden [B, T, D]."""
    weight = logit.sigmoid()
    return torch.lerp(mix.to(weight.dtype), value.to(weight.dtype), weight).to(dtype)


def read_sources(dtype: torch.dtype, logits: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
    """logits [B, T, S], S values [B, T, D] -> hidden [B, T, D]."""
    weights = logits.softmax(dim=-1)
    hidden = weights[..., :1] * values[0]
    for i in range(1, len(values)):
        hidden.addcmul_(weights[..., i : i + 1], values[i])
    return hidden.to(dtype)


class DepthMix(torch.autograd.Function):
    """`mix_sources` with one pass over each source in the backward, and no mix kept for it."""

    generate_vmap_rule = True
    forward = staticmethod(mix_sources)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_mix: torch.Tensor, grad_lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, *values = ctx.saved_tensors
        weights = logits.softmax(dim=-1)
        some_dots, grad_values = [], []
        with maybe_autocast(device_type=weights.device.type, enabled=False):
            for start in range(0, len(values), 8):  # enough for an efficient product, and never all sources
                some = slice(start, start + 8)
                stack = torch.stack(values[some], dim=-2).to(weights.dtype)
                some_dots.append(grad_mix @ stack.transpose(-1, -2))
                grads = (weights[..., some].transpose(-1, -2) @ grad_mix).unbind(-2)
                grad_values += [grad.to(value.dtype) for grad, value in zip(grads, values[some])]
        dots = torch.cat(some_dots, dim=-1)
        grad_logits = weights * (dots - (weights * dots).sum(-1, keepdim=True) + grad_lse.unsqueeze(-1))
        return grad_logits, *grad_values


class DepthMerge(torch.autograd.Function):
    """`merge_sources`, which keeps the hidden states in place of the mix: the next norm keeps them anyway."""

    generate_vmap_rule = True
    forward = staticmethod(merge_sources)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        _, logit, mix, value = inputs
        ctx.mix_dtype = mix.dtype
        ctx.save_for_backward(logit, output, value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logit, hidden, value = ctx.saved_tensors
        weight = logit.sigmoid()
        grad = grad.to(weight.dtype)
        difference = value.to(weight.dtype) - hidden
        grad_logit = weight * (difference * grad).sum(-1, keepdim=True)
        grad_value = weight * grad
        return None, grad_logit, (grad - grad_value).to(ctx.mix_dtype), grad_value.to(value.dtype)


class DepthRead(torch.autograd.Function):
    """`read_sources`, which keeps the hidden states in place of the first value: the next norm keeps them anyway, and
    nobody then keeps a mix."""

    generate_vmap_rule = True
    forward = staticmethod(read_sources)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        _, logits, first, *values = inputs
        ctx.first_dtype = first.dtype
        ctx.save_for_backward(logits, output, *values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, hidden, *values = ctx.saved_tensors
        weights = logits.softmax(dim=-1)
        grad = grad.to(weights.dtype)
        dots = torch.stack([(grad * value).sum(-1) for value in values], dim=-1) if values else logits[..., :0]
        grad_logits = weights[..., 1:] * (dots - (grad * hidden).sum(-1, keepdim=True))
        # Logits may move together without effect: the first one's gradient is what the others leave.
        grad_logits = torch.cat([-grad_logits.sum(-1, keepdim=True), grad_logits], dim=-1)
        grad_first = (weights[..., :1] * grad).to(ctx.first_dtype)
        grad_values = [(weights[..., i : i + 1] * grad).to(value.dtype) for i, value in enumerate(values, start=1)]
        return None, grad_logits, grad_first, *grad_values


class DepthBank:
    """The sources of one new token, where a step of generation reads them. No gradients.

    Such a step is bound by the number of operations, not by their size. So nothing is grouped, and views are made in
    advance: a site adds to the row of its block, makes the logits of that row for all sites, and takes one softmax and
    one product over all rows. Rows that are still to be written have the logit -inf. A row holds what a sub-layer
    emits (value [D], in `projected` also its key [R]) and then the floor of the key norm: the norm of a key together
    with that neighbour is the `hypot` of `depth_logits`.
    """

    def __init__(
        self,
        emitted: list[torch.Tensor],
        hidden_size: int,
        num_sources: int,
        queries: torch.Tensor,
        floor: torch.Tensor | None = None,
    ):
        """emitted: of the embedding, [B, 1, D] and, in `projected`, [B, 1, R]; queries [M, R], floor: see there."""
        self.hidden_size, self.queries, self.has_floor = hidden_size, queries, floor is not None
        batch, width = len(emitted[0]), sum(part.shape[-1] for part in emitted)
        neighbour = queries.new_zeros(()) if floor is None else floor
        self.bank = neighbour.expand(batch, num_sources, width + 1).clone()  # finite: unwritten rows count 0 times
        self.logits = queries.new_full((len(queries), batch, 1, num_sources), -math.inf)
        self.make_views()
        self.write(0, emitted, is_first=True)

    def make_views(self) -> None:
        self.values = self.bank[..., : self.hidden_size]
        columns = self.bank.transpose(0, 2)[-1 - self.queries.shape[1] :]  # [R + 1, rows, B]
        rows = self.bank[..., :-1].split(1, dim=1)
        keys = columns[:-1].unbind(1), columns.unbind(1)  # without the floor, with it
        self.rows = [*zip(rows, *keys, self.logits[:, :, 0].unbind(-1))]
        self.norm_dim = None if len(self.bank) == 1 else 0  # over all is faster than over one dimension
        self.site_logits = self.logits.unbind(0)

    def to(self, device: torch.device | str | int, **_: Any) -> "DepthBank":
        """Itself if it is there already. Accelerate's hooks ask for it between layers on different devices."""
        bank = self.bank.to(device)
        if bank is self.bank:
            return self
        moved = copy(self)
        moved.bank, moved.queries, moved.logits = bank, self.queries.to(device), self.logits.to(device)
        moved.make_views()
        return moved

    def read(
        self, site: DepthSite, emitted: list[torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What sub-layer `site` emitted, [B, 1, D] and maybe [B, 1, R] -> hidden [B, 1, D], weights [B, 1, rows]."""
        self.write(site.num_completed, emitted, site.count == 1)
        weights = self.site_logits[site.index - 1].softmax(dim=-1)
        hidden = torch.bmm(weights, self.values)
        return hidden if hidden.dtype == dtype else hidden.to(dtype), weights

    def write(self, row: int, emitted: list[torch.Tensor], is_first: bool) -> None:
        """Put it into a row, or add it to what is there, and make the row's logits for all sites: those that have read
        already do not look again."""
        content, key, key_and_floor, logits = self.rows[row]
        output = emitted[0] if len(emitted) == 1 else torch.cat(emitted, dim=-1)
        if is_first:
            content.copy_(output)
        else:
            content.add_(output)
        if self.has_floor:
            torch.div(self.queries.mm(key), torch.linalg.vector_norm(key_and_floor, dim=self.norm_dim), out=logits)
        else:
            torch.mm(self.queries, key, out=logits)
