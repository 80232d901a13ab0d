"""Depth routing on a GPU: the two phases of `depth_routing`, forward and backward, as Triton kernels.

Shape letters: B batch, T tokens, D hidden size, S sources, G sites of a group. The key rank R never gets here: logits
come in ready-made.

Sources are never stacked: a kernel takes a tuple of pointers and row strides, one per source, and is compiled for
their number. Softmax weights are never stored: `exp(logit - log-sum-exp)` is rebuilt where it is needed, from tensors
that exist anyway. The number of tokens only sets how many programs are launched and is not part of what is compiled.
Every sum has a fixed order (no atomics), so gradients are the same, bit by bit, from run to run.

Phase 1 cuts D into chunks of one warp each. Nothing is shared between chunks but the dot products of the backward,
which leave one partial sum per chunk, and inside a warp a sum needs no shared memory. Phase 2 keeps a whole row in
registers, because the RMSNorm that follows the read needs its mean square.
"""

from __future__ import annotations  # the kernels are defined, though not compiled, where triton is missing

import re
from collections.abc import Iterable
from typing import Any

import torch


try:
    import triton
    import triton.language as tl
    from triton import jit

    INTERPRETED = triton.knobs.runtime.interpret
except ImportError:
    triton = None

    def jit(function=None, **_):
        return function or jit


# Sources per launch. A further launch of the forward reads and rewrites the mixes (8 G D bytes per token): all of the
# paper's 49 sources fit in one. A further launch of the backward reads the mixes' gradients again (4 G D bytes); its
# unrolled code takes a compile time that grows with the square of the sources: about 8 seconds for 24 of them.
MAX_SOURCES_FORWARD = 64
MAX_SOURCES_BACKWARD = 24
# The gradient of the norm's weight is summed per program, then over the programs: enough of them to fill a GPU.
MAX_WEIGHT_GRADIENTS = 1024
# The code of a Hub repository and the package may live in one process: each module has its own operators.
NAMESPACE = re.sub(r"\W", "_", __name__)


@jit
def load_row(pointer, row, stride, columns, inside):
    return tl.load(pointer + row * stride + columns, mask=inside, other=0.0).to(tl.float32)


@jit
def log_sum_exp(logits, num_sources, BLOCK_S: tl.constexpr):
    sources = tl.arange(0, BLOCK_S)
    logit = tl.load(logits + sources, mask=sources < num_sources, other=float("-inf"))
    top = tl.max(logit, axis=0)
    return top + tl.log(tl.sum(tl.exp(logit - top), axis=0))


@jit
def mix_forward_kernel(
    mixes,
    lses,
    values,
    strides,
    logits,
    num_sources,
    D,
    FIRST: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token, one chunk of D, sources FIRST.. of `num_sources`: each row is read once for all G sites."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < D
    G: tl.constexpr = len(mixes)
    mix, lse = (), ()
    for g in tl.static_range(G):
        site = token * G + g
        site_lse = log_sum_exp(logits + site * num_sources, num_sources, BLOCK_S)
        tl.store(lses + site, site_lse, mask=tl.program_id(1) == 0)
        lse += (site_lse,)
        if FIRST == 0:
            mix += (tl.zeros([BLOCK_D], tl.float32),)
        else:
            mix += (load_row(mixes[g], token, D, columns, inside),)
    for i in tl.static_range(len(values)):
        value = load_row(values[i], token, strides[i], columns, inside)
        new_mix = ()
        for g in tl.static_range(G):
            logit = tl.load(logits + (token * G + g) * num_sources + FIRST + i)
            new_mix += (mix[g] + tl.exp(logit - lse[g]) * value,)
        mix = new_mix
    for g in tl.static_range(G):
        tl.store(mixes[g] + token * D + columns, mix[g], mask=inside)


@jit(do_not_specialize=["num_sources", "first"])
def mix_backward_kernel(
    grad_values,
    dots,
    grads,
    grad_strides,
    values,
    strides,
    logits,
    lses,
    num_sources,
    first,
    D,
    BLOCK_D: tl.constexpr,
):
    """One token, one chunk of D: the gradients of the G mixes stay in registers while each source passes once.

    `dots` [tokens, chunks, G, S] receives this chunk's share of (gradient of mix g) . (value i).
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < D
    G: tl.constexpr = len(grads)
    dots += (token * tl.num_programs(1) + tl.program_id(1)) * G * num_sources + first
    logits += token * G * num_sources + first
    grad, lse = (), ()
    for g in tl.static_range(G):
        grad += (load_row(grads[g], token, grad_strides[g], columns, inside),)
        lse += (tl.load(lses + token * G + g),)
    for i in tl.static_range(len(values)):
        value = load_row(values[i], token, strides[i], columns, inside)
        grad_value = tl.zeros([BLOCK_D], tl.float32)
        for g in tl.static_range(G):
            tl.store(dots + g * num_sources + i, tl.sum(grad[g] * value, axis=0))
            grad_value += tl.exp(tl.load(logits + g * num_sources + i) - lse[g]) * grad[g]
        tl.store(grad_values[i] + token * D + columns, grad_value, mask=inside)


@jit
def mix_backward_logits_kernel(grad_logits, dots, logits, lses, grad_lses, num_sources, chunks, BLOCK_S: tl.constexpr):
    """One token, one site: dl_i = w_i (g.v_i - sum_j w_j g.v_j + dz)."""
    site = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    sources = tl.arange(0, BLOCK_S)
    inside = sources < num_sources
    dot = tl.zeros([BLOCK_S], tl.float32)
    for chunk in range(chunks):
        row = (tl.program_id(0).to(tl.int64) * chunks + chunk) * tl.num_programs(1) + tl.program_id(1)
        dot += tl.load(dots + row * num_sources + sources, mask=inside, other=0.0)
    logit = tl.load(logits + site * num_sources + sources, mask=inside, other=float("-inf"))
    weight = tl.exp(logit - tl.load(lses + site))
    grad = weight * (dot - tl.sum(weight * dot, axis=0) + tl.load(grad_lses + site))
    tl.store(grad_logits + site * num_sources + sources, grad, mask=inside)


@jit
def merge_forward_kernel(
    hidden, normed, values, strides, logits, norm_weight, eps, D, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One token: the softmax over the mix (first) and the younger sources; `normed` may be None."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    logits += token * len(values)
    lse = log_sum_exp(logits, len(values), BLOCK_S)
    row = tl.zeros([BLOCK_D], tl.float32)
    for i in tl.static_range(len(values)):
        row += tl.exp(tl.load(logits + i) - lse) * load_row(values[i], token, strides[i], columns, inside)
    rounded = row.to(hidden.dtype.element_ty)
    tl.store(hidden + token * D + columns, rounded, mask=inside)
    if normed is not None:
        row = rounded.to(tl.float32)  # the norm sees what the next module would see
        row *= tl.rsqrt(tl.sum(row * row, axis=0) / D + eps)
        if norm_weight is not None:
            row *= tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + token * D + columns, row, mask=inside)


@jit(do_not_specialize=["num_tokens"])
def merge_backward_kernel(
    grad_values,
    grad_logits,
    grad_norm_weights,
    grad_hidden,
    grad_hidden_stride,
    grad_normed,
    grad_normed_stride,
    hidden,
    younger,
    strides,
    logits,
    norm_weight,
    eps,
    num_tokens,
    D,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Every so many tokens: the gradient g of the hidden states, through the norm and directly, then for a younger
    source of weight w: dv = w g, dl = w (g.v - g.h); for the mix: dp = w g, dz = -(sum of dl)."""
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    grad_weight = tl.zeros([BLOCK_D], tl.float32)
    if norm_weight is not None:
        norm = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    # Addresses hoisted out of this loop would take more registers than there are.
    for token in tl.range(tl.program_id(0).to(tl.int64), num_tokens, tl.num_programs(0), disable_licm=True):
        row = load_row(hidden, token, D, columns, inside)
        grad = tl.zeros([BLOCK_D], tl.float32)
        if grad_hidden is not None:
            grad += load_row(grad_hidden, token, grad_hidden_stride, columns, inside)
        if grad_normed is not None:
            outer = load_row(grad_normed, token, grad_normed_stride, columns, inside)
            scale = tl.rsqrt(tl.sum(row * row, axis=0) / D + eps)
            if norm_weight is not None:
                grad_weight += outer * row * scale
                outer *= norm
            grad += scale * (outer - row * (scale * scale * tl.sum(outer * row, axis=0) / D))

        first = token * len(grad_values)
        lse = log_sum_exp(logits + first, len(grad_values), BLOCK_S)
        grad_dot_hidden = tl.sum(grad * row, axis=0)
        grad_lse = tl.full([], 0.0, tl.float32)
        for i in tl.static_range(1, len(grad_values)):
            weight = tl.exp(tl.load(logits + first + i) - lse)
            value = load_row(younger[i - 1], token, strides[i - 1], columns, inside)
            grad_logit = weight * (tl.sum(grad * value, axis=0) - grad_dot_hidden)
            tl.store(grad_logits + first + i, grad_logit)
            tl.store(grad_values[i] + token * D + columns, weight * grad, mask=inside)
            grad_lse -= grad_logit
        tl.store(grad_logits + first, grad_lse)
        weight = tl.exp(tl.load(logits + first) - lse)
        tl.store(grad_values[0] + token * D + columns, weight * grad, mask=inside)
    if norm_weight is not None:
        tl.store(grad_norm_weights + tl.program_id(0).to(tl.int64) * D + columns, grad_weight, mask=inside)


def depth_mix(values: list[torch.Tensor], logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Phase 1: S values [B, T, D], logits [B, T, G, S] -> G mixes [B, T, D], then their log-sum-exps [B, T, G]."""
    check_inputs(values, logits, (logits.shape[-2], len(values)))
    return tuple(mix_op(values, logits))


def depth_merge(
    mix: torch.Tensor, lse: torch.Tensor, younger: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
) -> torch.Tensor:
    """Phase 2: a mix [B, T, D] with its log-sum-exp [B, T, 1] and the younger sources, each a value [B, T, D] and a
    logit [B, T, 1] -> hidden [B, T, D]."""
    if not younger:
        return mix.to(dtype)
    values, logits = side_by_side(mix, lse, younger)
    return merge_op(values, logits, dtype)


def depth_merge_norm(
    mix: torch.Tensor,
    lse: torch.Tensor,
    younger: list[tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Phase 2 and the RMSNorm that follows it, its weight [D] or None -> hidden [B, T, D], normed [B, T, D]."""
    values, logits = side_by_side(mix, lse, younger)
    return merge_norm_op(values, logits, dtype, norm_weight, eps)


def side_by_side(
    mix: torch.Tensor, lse: torch.Tensor, younger: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """-> values, the mix first, and their logits [B, T, 1 + Y]: copied, for the columns of a site differ in stride and
    alignment from site to site, and Triton would compile for each."""
    values = [mix, *(value for value, _ in younger)]
    logits = torch.cat([lse, *(logit for _, logit in younger)], dim=-1)
    check_inputs(values, logits, (len(values),))
    return values, logits


def check_inputs(values: list[torch.Tensor], logits: torch.Tensor, logits_shape: tuple[int, ...]) -> None:
    """What a kernel would answer with a crash, or with wrong numbers. `logits_shape` is what follows [B, T]."""
    if triton is None:
        raise ImportError("The Triton depth read needs triton: install it, or read with `depth_routing`.")
    if values[0].device.type == "cpu" and not INTERPRETED:
        raise ValueError("The Triton depth read got tensors on the CPU: move them to a GPU, or use `depth_routing`.")
    shape = values[0].shape
    for value in values:
        if value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"The Triton depth read takes float32, float16 and bfloat16 values, not {value.dtype}.")
        if value.shape != shape:
            raise ValueError(f"The values of a depth read have one shape, not {shape} and {value.shape}.")
    if logits.dtype != torch.float32:
        raise TypeError(f"The Triton depth read takes float32 logits, not {logits.dtype}.")
    if logits.shape != (*shape[:-1], *logits_shape):
        raise ValueError(f"Values {shape} need logits {(*shape[:-1], *logits_shape)}, not {tuple(logits.shape)}.")


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., D] -> [tokens, D], the D neighbours in memory: a view of all but exotic layouts."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def row_arguments(tensors: Iterable[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """What a kernel takes for a run of tensors: pointers and row strides."""
    pointers = tuple(rows(tensor) for tensor in tensors)
    return pointers, tuple(pointer.stride(0) for pointer in pointers)


def mix_block(hidden_size: int, num_sites: int) -> int:
    """Columns of D per program, which is one warp: as many as leave a thread at most 64 float32 numbers of G rows."""
    largest = min(512, max(32, 2048 // num_sites))
    return min(triton.next_power_of_2(hidden_size), 1 << (largest.bit_length() - 1))


def merge_launch_options(num_sources: int, hidden_size: int) -> dict[str, int]:
    """A whole row per program, 8 columns per thread (one 16-byte load of bfloat16) as long as warps last."""
    block = triton.next_power_of_2(hidden_size)
    blocks = {"BLOCK_S": triton.next_power_of_2(num_sources), "BLOCK_D": block}
    return {**blocks, "num_warps": min(max(block // 256, 1), 16)}


def empty(shape: torch.Size | tuple[int, ...], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def new_mixes(values: list[torch.Tensor], logits: torch.Tensor) -> list[torch.Tensor]:
    mixes = [empty(values[0].shape, logits, logits.dtype) for _ in range(logits.shape[-2])]
    return [*mixes, empty(logits.shape[:-1], logits, logits.dtype)]


@torch.library.custom_op(f"{NAMESPACE}::mix", mutates_args=(), schema="(Tensor[] values, Tensor logits) -> Tensor[]")
def mix_op(values: list[torch.Tensor], logits: torch.Tensor) -> list[torch.Tensor]:
    outputs = new_mixes(values, logits)
    logits = logits.contiguous()
    pointers, strides = row_arguments(values)
    num_tokens, hidden_size = pointers[0].shape
    block = mix_block(hidden_size, len(outputs) - 1)
    with torch.cuda.device_of(logits):
        for first in range(0, len(values), MAX_SOURCES_FORWARD):
            launched = slice(first, first + MAX_SOURCES_FORWARD)
            mix_forward_kernel[num_tokens, triton.cdiv(hidden_size, block)](
                tuple(outputs[:-1]),
                outputs[-1],
                pointers[launched],
                strides[launched],
                logits,
                len(values),
                hidden_size,
                FIRST=first,
                BLOCK_S=triton.next_power_of_2(len(values)),
                BLOCK_D=block,
                num_warps=1,
            )
    return outputs


@mix_op.register_fake
def fake_mix(values: list[torch.Tensor], logits: torch.Tensor) -> list[torch.Tensor]:
    return new_mixes(values, logits)


@torch.library.custom_op(
    f"{NAMESPACE}::mix_backward",
    mutates_args=(),
    schema="(Tensor[] grads, Tensor grad_lse, Tensor[] values, Tensor logits, Tensor lse) -> Tensor[]",
)
def mix_backward_op(
    grads: list[torch.Tensor],
    grad_lse: torch.Tensor,
    values: list[torch.Tensor],
    logits: torch.Tensor,
    lse: torch.Tensor,
) -> list[torch.Tensor]:
    """-> the gradients of the values, then that of the logits."""
    grad_values = [empty(value.shape, value, value.dtype) for value in values]
    logits, num_sources = logits.contiguous(), len(values)
    grad_logits = torch.empty_like(logits)
    pointers, strides = row_arguments(values)
    grad_pointers, grad_strides = row_arguments(grads)
    num_tokens, hidden_size = pointers[0].shape
    block = mix_block(hidden_size, len(grads))
    chunks = triton.cdiv(hidden_size, block)
    dots = empty((num_tokens, chunks, len(grads), num_sources), logits, torch.float32)
    with torch.cuda.device_of(logits):
        for first in range(0, num_sources, MAX_SOURCES_BACKWARD):
            launched = slice(first, first + MAX_SOURCES_BACKWARD)
            mix_backward_kernel[num_tokens, chunks](
                tuple(grad_values[launched]),
                dots,
                grad_pointers,
                grad_strides,
                pointers[launched],
                strides[launched],
                logits,
                lse,
                num_sources,
                first,
                hidden_size,
                BLOCK_D=block,
                num_warps=1,
            )
        mix_backward_logits_kernel[num_tokens, len(grads)](
            grad_logits,
            dots,
            logits,
            lse,
            grad_lse.contiguous(),
            num_sources,
            chunks,
            BLOCK_S=triton.next_power_of_2(num_sources),
            num_warps=1,
        )
    return [*grad_values, grad_logits]


@mix_backward_op.register_fake
def fake_mix_backward(
    grads: list[torch.Tensor],
    grad_lse: torch.Tensor,
    values: list[torch.Tensor],
    logits: torch.Tensor,
    lse: torch.Tensor,
) -> list[torch.Tensor]:
    grad_values = [empty(value.shape, value, value.dtype) for value in values]
    return [*grad_values, empty(logits.shape, logits, logits.dtype)]


def save_for_mix_backward(ctx: Any, inputs: tuple, output: list[torch.Tensor]) -> None:
    values, logits = inputs
    ctx.save_for_backward(logits, output[-1], *values)


def mix_backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    logits, lse, *values = ctx.saved_tensors
    *grads, grad_lse = grads
    *grad_values, grad_logits = mix_backward_op(grads, grad_lse, values, logits, lse)
    return grad_values, grad_logits


mix_op.register_autograd(mix_backward, setup_context=save_for_mix_backward)


def launch_merge(
    values: list[torch.Tensor],
    logits: torch.Tensor,
    hidden: torch.Tensor,
    normed: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> None:
    pointers, strides = row_arguments(values)
    num_tokens, hidden_size = pointers[0].shape
    with torch.cuda.device_of(hidden):
        merge_forward_kernel[(num_tokens,)](
            hidden,
            normed,
            pointers,
            strides,
            logits.contiguous(),
            norm_weight,
            eps,
            hidden_size,
            **merge_launch_options(len(values), hidden_size),
        )


@torch.library.custom_op(
    f"{NAMESPACE}::merge",
    mutates_args=(),
    schema="(Tensor[] values, Tensor logits, ScalarType dtype) -> Tensor",
)
def merge_op(values: list[torch.Tensor], logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    hidden = empty(values[0].shape, values[0], dtype)
    launch_merge(values, logits, hidden, None, None, 0.0)
    return hidden


@merge_op.register_fake
def fake_merge(values: list[torch.Tensor], logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return empty(values[0].shape, values[0], dtype)


@torch.library.custom_op(
    f"{NAMESPACE}::merge_norm",
    mutates_args=(),
    schema="(Tensor[] values, Tensor logits, ScalarType dtype, Tensor? norm_weight, float eps) -> (Tensor, Tensor)",
)
def merge_norm_op(
    values: list[torch.Tensor],
    logits: torch.Tensor,
    dtype: torch.dtype,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, normed = (empty(values[0].shape, values[0], dtype) for _ in range(2))
    launch_merge(values, logits, hidden, normed, norm_weight, eps)
    return hidden, normed


@merge_norm_op.register_fake
def fake_merge_norm(
    values: list[torch.Tensor],
    logits: torch.Tensor,
    dtype: torch.dtype,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    return tuple(empty(values[0].shape, values[0], dtype) for _ in range(2))


@torch.library.custom_op(
    f"{NAMESPACE}::merge_backward",
    mutates_args=(),
    schema="(Tensor? grad_hidden, Tensor? grad_normed, Tensor hidden, Tensor[] younger, Tensor logits, "
    "ScalarType mix_dtype, Tensor? norm_weight, float eps) -> Tensor[]",
)
def merge_backward_op(
    grad_hidden: torch.Tensor | None,
    grad_normed: torch.Tensor | None,
    hidden: torch.Tensor,
    younger: list[torch.Tensor],
    logits: torch.Tensor,
    mix_dtype: torch.dtype,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> list[torch.Tensor]:
    """-> the gradients of the mix and the younger values, of the logits, of the norm's weight if any."""
    outputs = new_merge_gradients(hidden, younger, logits, mix_dtype)
    pointers, strides = row_arguments(younger)
    grad_hidden, grad_normed = (None if grad is None else rows(grad) for grad in (grad_hidden, grad_normed))
    num_tokens, hidden_size = rows(hidden).shape
    num_programs, grad_norm_weights = num_tokens, None
    if norm_weight is not None:
        num_programs = min(num_tokens, MAX_WEIGHT_GRADIENTS)
        grad_norm_weights = empty((num_programs, hidden_size), hidden, torch.float32)
    with torch.cuda.device_of(hidden):
        merge_backward_kernel[(num_programs,)](
            tuple(outputs[:-1]),
            outputs[-1],
            grad_norm_weights,
            grad_hidden,
            hidden_size if grad_hidden is None else grad_hidden.stride(0),
            grad_normed,
            hidden_size if grad_normed is None else grad_normed.stride(0),
            hidden,
            pointers,
            strides,
            logits.contiguous(),
            norm_weight,
            eps,
            num_tokens,
            hidden_size,
            **merge_launch_options(len(younger) + 1, hidden_size),
        )
    if norm_weight is None or grad_norm_weights is None:
        return outputs
    return [*outputs, grad_norm_weights.sum(0).to(norm_weight.dtype)]


def new_merge_gradients(
    hidden: torch.Tensor, younger: list[torch.Tensor], logits: torch.Tensor, mix_dtype: torch.dtype
) -> list[torch.Tensor]:
    values = [empty(hidden.shape, hidden, dtype) for dtype in (mix_dtype, *(value.dtype for value in younger))]
    return [*values, empty(logits.shape, logits, logits.dtype)]


@merge_backward_op.register_fake
def fake_merge_backward(
    grad_hidden: torch.Tensor | None,
    grad_normed: torch.Tensor | None,
    hidden: torch.Tensor,
    younger: list[torch.Tensor],
    logits: torch.Tensor,
    mix_dtype: torch.dtype,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> list[torch.Tensor]:
    outputs = new_merge_gradients(hidden, younger, logits, mix_dtype)
    return outputs if norm_weight is None else [*outputs, empty(norm_weight.shape, hidden, norm_weight.dtype)]


def save_for_merge_backward(ctx: Any, inputs: tuple, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
    """Keeps the hidden states in place of the mix: the next module keeps them anyway."""
    values, logits, _, norm_weight, ctx.eps = inputs if len(inputs) == 5 else (*inputs, None, 0.0)
    hidden = output[0] if isinstance(output, tuple) else output
    ctx.mix_dtype = values[0].dtype
    ctx.set_materialize_grads(False)  # often only the normed states are used: no zeros to read
    ctx.save_for_backward(norm_weight, hidden, logits, *values[1:])


def merge_backward(ctx: Any, grad_hidden: torch.Tensor | None) -> tuple:
    return merge_norm_backward(ctx, grad_hidden, None)[:3]


def merge_norm_backward(ctx: Any, grad_hidden: torch.Tensor | None, grad_normed: torch.Tensor | None) -> tuple:
    norm_weight, hidden, logits, *younger = ctx.saved_tensors
    grads = merge_backward_op(grad_hidden, grad_normed, hidden, younger, logits, ctx.mix_dtype, norm_weight, ctx.eps)
    grad_values, grads = grads[: len(younger) + 1], grads[len(younger) + 1 :]
    return grad_values, grads[0], None, None if norm_weight is None else grads[1], None


merge_op.register_autograd(merge_backward, setup_context=save_for_merge_backward)
merge_norm_op.register_autograd(merge_norm_backward, setup_context=save_for_merge_backward)
