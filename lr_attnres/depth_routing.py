"""The maths of depth routing: which sources a site reads, their logits, and the read itself.

Shape letters: B batch, T tokens, D hidden size, R key rank, S sources, G sites of a group, M sub-layers, H depth
heads. Heads are more rows of the same reads. With H > 1, every shape below has the axis H after T: a value is
[B, T, H, D / H], a key [B, T, H, R / H], logits are [B, T, H, S], and the queries of a site [H, R / H].

`naive_depth_read` is the whole idea. Three facts make it cheap:
1. Queries do not depend on the input. The logits of a source for all later sites are one small matrix product, made
   once, when the source is written.
2. Sites come in groups. Phase 1 mixes the sources older than the group once for all of its sites. Phase 2, at each
   site, merges that mix with the few younger sources by an online softmax.
3. The backward saves no mix. Logits, values and the hidden states, which the next norm keeps anyway, are enough.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch


def naive_depth_read(
    values: list[torch.Tensor], keys: list[torch.Tensor], query: torch.Tensor, eps: float
) -> torch.Tensor:
    """A read as the paper writes it: S values [B, T, D], S keys [B, T, R], query [R] -> hidden [B, T, D]."""
    logits = depth_rms_norm(torch.stack(keys, dim=-2), eps) @ query
    return naive_mix(values, logits)


def naive_mix(values: list[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    """S values [B, T, D], logits [B, T, S] -> hidden [B, T, D]."""
    weights = logits.softmax(dim=-1)
    return (weights.unsqueeze(-1) * torch.stack(values, dim=-2)).sum(-2).to(values[0].dtype)


def depth_block_ends(num_sublayers: int, num_blocks: int | Literal["full"] | None) -> list[int]:
    """The sub-layers after which a block is complete: `ceil(M * i / N)` for i = 1..N."""
    if not isinstance(num_blocks, int) or num_blocks >= num_sublayers:
        return list(range(1, num_sublayers + 1))
    return [-(-num_sublayers * i // num_blocks) for i in range(1, num_blocks + 1)]


@dataclass(frozen=True)
class DepthSite:
    """The static schedule of one read."""

    index: int  # the site reads after this many sub-layers have written
    num_in_block: int  # sub-layers summed in the newest block so far
    block_size: int  # sub-layers of that block when it is complete
    closes_block: bool  # that block is complete
    num_sources: int  # sources that the site reads: the embedding, completed blocks, and the newest block
    num_mixed: int  # oldest sources, read through the group's mix; 1 in the first group: the embedding itself
    opens_group: bool  # phase 1 runs at this site, for all sites of its group
    sites_in_group: int  # sites from this one, itself included, to the end of its group
    sites_in_model: int  # sites from this one, itself included, to the last

    @property
    def mixes_left(self) -> int:
        """Mixes of phase 1 that are still needed after this site."""
        return self.sites_in_group - 1 if self.num_mixed > 1 else 0

    @classmethod
    def schedule(cls, num_sublayers: int, num_blocks: int | Literal["full"] | None) -> list["DepthSite"]:
        """Sites 1..M. A new group starts at a block end as soon as the current group has at least floor(sqrt(M))
        sites: this balances the sources that are read once per group against those that are read once per site."""
        ends = depth_block_ends(num_sublayers, num_blocks)
        group_starts = [1]
        for end in ends:
            if end - group_starts[-1] >= math.isqrt(num_sublayers):
                group_starts.append(end)
        sites: list[DepthSite] = []
        num_completed, block_start = 0, 0
        for start, next_start in zip(group_starts, [*group_starts[1:], num_sublayers + 1]):
            num_mixed = 1 if start == 1 else num_completed + 2  # the embedding, and the block that ends at `start`
            for index in range(start, next_start):
                closes_block = index == ends[num_completed]
                site = cls(
                    index=index,
                    num_in_block=index - block_start,
                    block_size=ends[num_completed] - block_start,
                    closes_block=closes_block,
                    num_sources=num_completed + 2,
                    num_mixed=num_mixed,
                    opens_group=index == start > 1,
                    sites_in_group=next_start - index,
                    sites_in_model=num_sublayers + 1 - index,
                )
                sites.append(site)
                if closes_block:
                    num_completed, block_start = num_completed + 1, index
        return sites


def without_autocast(device_type: str) -> AbstractContextManager:
    """Products stay in the dtype of their factors. No autocast, no context: it would be a node in a compiled graph."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def depth_rms_norm(key: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm without weights, in float32 or better: [..., R] -> [..., R]."""
    key = key.to(torch.promote_types(key.dtype, torch.float32))
    return torch.nn.functional.rms_norm(key, key.shape[-1:], eps=eps)


def is_eager_on_cpu(tensor: torch.Tensor) -> bool:
    """Neither compiled nor traced; no DTensor, which does not mix with the constants below."""
    return type(tensor) is torch.Tensor and tensor.is_cpu and not torch.compiler.is_compiling()


@cache
def constant(value: float, dtype: torch.dtype) -> torch.Tensor:
    """A number on the CPU. As an operand it costs half as much as a Python number."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


def inference_rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`depth_rms_norm` on a CPU without gradients, as `x / hypot(|x| / sqrt(D), sqrt(eps))`.

    That of torch runs more small operators, whose overhead is most of its time in a step of generation."""
    dtype = x.dtype if x.dtype.itemsize >= 4 else torch.float32
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    norm.mul_(constant(x.shape[-1] ** -0.5, dtype)).hypot_(constant(eps**0.5, dtype))
    return x / norm


def depth_logits(key: torch.Tensor, queries: torch.Tensor, floor: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of one source for several sites: key [B, T, R], queries [sites, R] -> [B, T, sites].

    `query . rms_norm(key) = sqrt(R) query . key / sqrt(|key|**2 + R eps)`. The caller passes queries that are already
    multiplied by `sqrt(R)`, and `floor = sqrt(R eps)`. Without a floor the key is not normalised.
    """
    if key.dtype != queries.dtype:
        key = key.to(queries.dtype)
    with without_autocast(key.device.type):  # else a product in half precision
        if queries.dim() == 2:
            logits = torch.nn.functional.linear(key, queries)
        else:
            rows_of_heads = key.flatten(0, 1).transpose(0, 1)  # [H, B T, R / H]
            logits = torch.bmm(rows_of_heads, queries.permute(1, 2, 0))
            logits = without_base(logits.transpose(0, 1).unflatten(0, key.shape[:2]))
    if floor is None:
        return logits
    # Dividing the logits instead of the key needs no normalised copy of the key.
    # Not `torch.hypot`, which neither ONNX nor ExecuTorch has.
    norm = torch.linalg.vector_norm(key, dim=-1, keepdim=True)
    return logits / torch.sqrt(norm.square() + floor.square())


def depth_mix(values: Sequence[torch.Tensor], logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Phase 1: S values [B, T, D], logits [B, T, G, S] -> G mixes [B, T, D], then their log-sum-exps [B, T, G]."""
    return DepthMix.apply(logits, *values) if needs_grad(logits, *values) else mix_forward(logits, *values)


def depth_merge(
    mix: torch.Tensor, lse: torch.Tensor, younger: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
) -> torch.Tensor:
    """Phase 2: a mix [B, T, D] with its log-sum-exp [B, T, 1] and the younger sources, each a value [B, T, D] and a
    logit [B, T, 1] -> hidden [B, T, D]. The mix counts as one source whose logit is the log-sum-exp."""
    if not younger:
        return mix.contiguous().to(dtype)  # a copy: the mixes of a group share one memory, which a view would keep
    values, logits = zip(*younger)
    return depth_read([mix, *values], torch.cat([lse, *logits], dim=-1), dtype)


def depth_read(values: list[torch.Tensor], logits: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`naive_mix` without a stack of the sources: one pass over each source, forward and backward.

    The sum is accumulated in the dtype of the logits and cast once, to `dtype` (default: that of the values)."""
    read = DepthRead.apply if needs_grad(logits, *values) else read_forward
    return read(dtype or values[0].dtype, logits, *values)


def split_heads(part: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, T, size] -> [B, T, H, size / H], the same memory; unchanged for one head."""
    if heads == 1:
        return part
    return torch.ops.aten._unsafe_view(part, (*part.shape[:-1], heads, part.shape[-1] // heads))


def join_heads(part: torch.Tensor) -> torch.Tensor:
    """The inverse: [B, T, H, size / H] -> [B, T, size]; unchanged without heads."""
    return part if part.dim() == 3 else without_base(part.flatten(-2))


def needs_grad(*tensors: torch.Tensor) -> bool:
    """Inference calls the plain functions: `apply` costs more than a small read, and Dynamo rejects a Function whose
    inputs need no gradient."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def mix_forward(logits: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """logits [B, T, G, S], S values [B, T, D] -> G mixes [B, T, D], log-sum-exps [B, T, G], in the logits' dtype."""
    weights = logits.softmax(dim=-1)
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if weights.device.type == "cpu" and not is_traced:
        mix = mix_in_token_chunks(weights, values)
    else:
        mix = weights[..., 0, None] * values[0].unsqueeze(-2)
        for i in range(1, len(values)):
            # In place: a new tensor of this size for each source would cost more than the sum itself.
            mix.addcmul_(weights[..., i, None], values[i].unsqueeze(-2))
    return *(without_base(part) for part in mix.unbind(-2)), logits.logsumexp(dim=-1)


def without_base(view: torch.Tensor) -> torch.Tensor:
    """The same memory, not tracked as a view: FSDP2 warns about layers that return views."""
    return torch.ops.aten._unsafe_view(view, view.shape)


def mix_in_token_chunks(weights: torch.Tensor, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """weights [B, T, G, S], S values [B, T, D] -> mix [B, T, G, D], by products over 128 tokens at a time, whose
    sources and mixes fit into the cache of a CPU."""
    mix = weights.new_empty(*weights.shape[:-1], values[0].shape[-1])
    with without_autocast("cpu"):
        for out, factors, *sources in zip(*(part.flatten(0, 1).split(128) for part in (mix, weights, *values))):
            stack = torch.stack(sources, dim=-2).to(factors.dtype)
            torch.bmm(*(part.flatten(0, -3) for part in (factors, stack)), out=out.flatten(0, -3))
    return mix


def read_forward(dtype: torch.dtype, logits: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
    """logits [B, T, S], S values [B, T, D] -> hidden [B, T, D]."""
    weights = logits.softmax(dim=-1)
    if len(values) == 2:  # inside a block: the mix and the partial
        first, second = (value.to(weights.dtype) for value in values)
        return torch.lerp(first, second, weights[..., 1:]).to(dtype)
    hidden = weights[..., :1] * values[0]
    for i in range(1, len(values)):
        hidden.addcmul_(weights[..., i : i + 1], values[i])
    return hidden.to(dtype)


class DepthMix(torch.autograd.Function):
    """`mix_forward`: the backward makes one pass over each source and needs no mix."""

    generate_vmap_rule = True
    forward = staticmethod(mix_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, *values = ctx.saved_tensors
        grad_mix, grad_lse = torch.stack(grads[:-1], dim=-2), grads[-1]
        weights = logits.softmax(dim=-1)
        dots, grad_values = [], []
        with without_autocast(weights.device.type):
            for start in range(0, len(values), 8):  # a good size for a product, without a stack of all sources
                chunk = slice(start, start + 8)
                stack = torch.stack(values[chunk], dim=-2).to(weights.dtype)
                dots.append(grad_mix @ stack.transpose(-1, -2))
                grads_of_chunk = (weights[..., chunk].transpose(-1, -2) @ grad_mix).unbind(-2)
                grad_values += [grad.to(value.dtype) for grad, value in zip(grads_of_chunk, values[chunk])]
        all_dots = torch.cat(dots, dim=-1)
        grad_logits = weights * (all_dots - (weights * all_dots).sum(-1, keepdim=True) + grad_lse.unsqueeze(-1))
        return grad_logits, *grad_values


class DepthRead(torch.autograd.Function):
    """`read_forward`: keeps the hidden states instead of the first value, which is usually a mix."""

    generate_vmap_rule = True
    forward = staticmethod(read_forward)

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
        # Softmax is shift-invariant, so the logit gradients sum to zero: the first value need not be saved.
        grad_logits = torch.cat([-grad_logits.sum(-1, keepdim=True), grad_logits], dim=-1)
        grad_first = (weights[..., :1] * grad).to(ctx.first_dtype)
        grad_values = [(weights[..., i : i + 1] * grad).to(value.dtype) for i, value in enumerate(values, start=1)]
        return None, grad_logits, grad_first, *grad_values
