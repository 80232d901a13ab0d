"""Depth routing on a GPU: the two phases of `depth_routing`, forward and backward, as Triton kernels; and a whole site
of a step of generation as one kernel, `step_kernel`.

Shape letters: B batch, T tokens, D hidden size, R key rank, H depth heads, S sources, G sites of a group, M
sub-layers. The logits of the two phases are inputs, so the key rank does not matter there.

Sources are never stacked: a kernel takes a tuple of pointers and row strides, one per source, and is compiled for
their number. Softmax weights are never stored: `exp(logit - log-sum-exp)` is rebuilt where it is needed, from tensors
that exist anyway. The number of tokens only sets how many programs are launched and is not part of what is compiled.
Every sum has a fixed order (no atomics), so gradients are the same, bit by bit, from run to run.

Phase 1 cuts D into chunks of one warp each: a sum inside a warp needs no shared memory. The dot products of its
backward leave one partial sum per chunk, which a second kernel adds. Phase 2 keeps a whole row in registers, because
its backward needs dot products over the row.
"""

from __future__ import annotations  # the hints of the kernels name `tl`, which is missing without triton

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch


try:
    import triton
    import triton.language as tl
    from triton import jit

    INTERPRETED = triton.knobs.runtime.interpret
except ImportError:
    triton, INTERPRETED = None, False

    def jit(function=None, **_):
        return function or jit


# Sources per launch. Every further launch of the forward reads and rewrites the mixes (8 G D bytes per token), so all
# 49 sources of the paper go into one. Compile time of the backward grows with the square of its sources (about 8
# seconds for 24), so it takes fewer and reads the gradients of the mixes again (4 G D bytes per launch).
MAX_SOURCES_FORWARD = 64
MAX_SOURCES_BACKWARD = 24
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
def weighted_sums_kernel(
    sums,
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
    """The forward of both phases. One token, one chunk of D, sources FIRST.. of `num_sources`: each row is read once
    for all G sites. `lses` is None in phase 2, which needs no log-sum-exp of its own."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < D
    G: tl.constexpr = len(sums)
    total, lse = (), ()
    for g in tl.static_range(G):
        site = token * G + g
        site_lse = log_sum_exp(logits + site * num_sources, num_sources, BLOCK_S)
        if lses is not None:
            tl.store(lses + site, site_lse, mask=tl.program_id(1) == 0)
        lse += (site_lse,)
        if FIRST == 0:
            total += (tl.zeros([BLOCK_D], tl.float32),)
        else:
            total += (load_row(sums[g], token, D, columns, inside),)
    for i in tl.static_range(len(values)):
        value = load_row(values[i], token, strides[i], columns, inside)
        new_total = ()
        for g in tl.static_range(G):
            logit = tl.load(logits + (token * G + g) * num_sources + FIRST + i)
            new_total += (total[g] + tl.exp(logit - lse[g]) * value,)
        total = new_total
    for g in tl.static_range(G):
        tl.store(sums[g] + token * D + columns, total[g], mask=inside)


@jit(do_not_specialize=["num_sources", "first"])
def mix_backward_kernel(
    grad_values, dots, grads, grad_strides, values, strides, logits, lses, num_sources, first, D, BLOCK_D: tl.constexpr
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
def merge_backward_kernel(
    grad_values,
    grad_logits,
    grad_hidden,
    grad_hidden_stride,
    hidden,
    younger,
    strides,
    logits,
    D,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token, with the gradient g of the hidden states h. A younger source of weight w: dv = w g and
    dl = w (g.v - g.h). The mix: dp = w g and dz = -(sum of dl)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    row = load_row(hidden, token, D, columns, inside)
    grad = load_row(grad_hidden, token, grad_hidden_stride, columns, inside)
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


@jit
def inverse_rms(row, R, eps, NORMALIZE: tl.constexpr, BLOCK_R: tl.constexpr):
    """1 / rms of a row of R numbers; 1 if it is not to be normalised."""
    result = tl.full([], 1.0, tl.float32)
    if NORMALIZE:
        square = tl.full([], 0.0, tl.float32)
        for start in range(0, R, BLOCK_R):
            columns = start + tl.arange(0, BLOCK_R)
            part = tl.load(row + columns, mask=columns < R, other=0.0).to(tl.float32)
            square += tl.sum(part * part, axis=0)
        result = tl.rsqrt(square / R + eps)
    return result


@jit
def step_weights(
    keys, slots, old, new, has_old, writes_key, first, output, query, source, newest, R, eps, scale,
    NORMALIZE: tl.constexpr, HAS_OWN_KEYS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The depth weights of a site. Rows of keys are `slots` of complete blocks, the open block `old` and `new`, the
    embedding's `first`, and `output`. NORMALIZE: emitted keys one by one, keys of sources, the query."""
    is_block = (source > 0) & (source < newest)
    first_scale = inverse_rms(first, R, eps, NORMALIZE[0], BLOCK_R)
    output_scale = inverse_rms(output, R, eps, NORMALIZE[0], BLOCK_R)
    logits, squares = tl.zeros(source.shape, tl.float32), tl.zeros(source.shape, tl.float32)
    for start in range(0, R, BLOCK_R):
        columns = start + tl.arange(0, BLOCK_R)
        inside = columns < R
        key = tl.load(keys + slots[:, None] + columns, mask=is_block[:, None] & inside, other=0.0).to(tl.float32)
        first_key = tl.load(first + columns, mask=inside, other=0.0).to(tl.float32) * first_scale
        old_key = tl.load(keys + old + columns, mask=inside & has_old, other=0.0).to(tl.float32)
        new_key = old_key + tl.load(output + columns, mask=inside, other=0.0).to(tl.float32) * output_scale
        new_key = new_key.to(keys.dtype.element_ty)
        if HAS_OWN_KEYS:
            tl.store(keys + new + columns, new_key, mask=inside & writes_key)
        key += tl.where(source == 0, 1.0, 0.0)[:, None] * first_key
        key += tl.where(source == newest, 1.0, 0.0)[:, None] * new_key.to(tl.float32)
        logits += tl.sum(key * tl.load(query + columns, mask=inside, other=0.0), axis=1)
        squares += tl.sum(key * key, axis=1)
    if NORMALIZE[1]:
        logits *= tl.rsqrt(squares / R + eps)
    logits *= scale * inverse_rms(query, R, eps, NORMALIZE[2], BLOCK_R)
    logits = tl.where(source <= newest, logits, float("-inf"))
    weights = tl.exp(logits - tl.max(logits, axis=0))
    return weights / tl.sum(weights, axis=0)


@jit(do_not_specialize=["site", "num_blocks", "old_slot", "new_slot", "batch"])
def step_kernel(
    tables, output, output_key, strides, site, num_blocks, old_slot, new_slot, batch, sizes, eps, scale,
    NORMALIZE: tl.constexpr, HAS_OWN_KEYS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One site of a step of generation: one head of one token, one chunk of D. See `step_site`.

    Sources: 0 is the embedding, 1..num_blocks are complete blocks in slots 0..num_blocks - 1, the last is the open
    block, `old_slot` (none if negative) plus the output. Its sum goes to `new_slot`, another one: all programs of a
    row read the old key, so none may overwrite it.
    """
    hidden, weights, values, keys, embedding, embedding_key, queries = tables
    embedding_stride, embedding_key_stride, output_stride, output_key_stride = strides
    S, H, D, R = sizes
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, head, site_row = row // H, row % H, site * batch * H + row
    source, newest, has_old = tl.arange(0, BLOCK_S), num_blocks + 1, old_slot >= 0
    slot_size = tl.cast(batch * H, tl.int64) * D
    # A sliced key is the end of the whole row, over all heads: columns H (D - R).. of H D.
    key_slot_size = tl.cast(batch * H, tl.int64) * (R if HAS_OWN_KEYS else D)
    key_row = row * R if HAS_OWN_KEYS else token * H * D + H * (D - R) + head * R

    # The values first: their loads are under way while the weights are computed.
    columns = chunk * BLOCK_D + tl.arange(0, BLOCK_D)
    inside, is_block = columns < D, (source > 0) & (source <= num_blocks)
    values += row * D + columns
    blocks = tl.load(values + (source - 1)[:, None] * slot_size, mask=is_block[:, None] & inside, other=0.0)
    first = tl.load(embedding + token * embedding_stride + head * D + columns, mask=inside, other=0.0)
    old = tl.load(values + old_slot * slot_size, mask=inside & has_old, other=0.0).to(tl.float32)
    total = old + tl.load(output + token * output_stride + head * D + columns, mask=inside, other=0.0).to(tl.float32)
    total = total.to(blocks.dtype)
    tl.store(values + new_slot * slot_size, total, mask=inside)

    first_key = embedding_key + token * embedding_key_stride + head * R
    new_key = output_key + token * output_key_stride + head * R
    query = queries + (site * H + head) * R
    weight = step_weights(
        keys + key_row, (source - 1) * key_slot_size, old_slot * key_slot_size, new_slot * key_slot_size, has_old,
        chunk == 0, first_key, new_key, query, source, newest, R, eps, scale, NORMALIZE, HAS_OWN_KEYS, BLOCK_R,
    )  # fmt: skip
    tl.store(weights + site_row * S + source, weight, mask=(source < S) & (chunk == 0))
    mix = tl.sum(weight[:, None] * blocks.to(tl.float32), axis=0)
    mix += tl.sum(tl.where(source == 0, weight, 0.0), axis=0) * first.to(tl.float32)
    mix += tl.sum(tl.where(source == newest, weight, 0.0), axis=0) * total.to(tl.float32)
    tl.store(hidden + site_row * D + columns, mix, mask=inside)


def step_blocks(hidden_size: int, rank: int, num_sources: int) -> dict[str, int]:
    """A program holds one chunk of all sources, and one chunk of all keys: about 16 numbers of each per thread."""
    block_s = triton.next_power_of_2(num_sources)
    block_d = min(triton.next_power_of_2(hidden_size), max(8192 // block_s, 16))
    block_r = min(triton.next_power_of_2(rank), max(4096 // block_s, 16))
    num_warps = max(block_s * block_d // 512, 1)
    return {"BLOCK_S": block_s, "BLOCK_D": block_d, "BLOCK_R": block_r, "num_warps": min(num_warps, 16)}


def depth_mix(values: Sequence[torch.Tensor], logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Phase 1: S values [B, T, D], logits [B, T, G, S] -> G mixes [B, T, D], then their log-sum-exps [B, T, G]."""
    check_inputs(values, logits, (logits.shape[-2], len(values)))
    return tuple(mix_op(list(values), logits))


def depth_merge(
    mix: torch.Tensor, lse: torch.Tensor, younger: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
) -> torch.Tensor:
    """Phase 2: a mix [B, T, D] with its log-sum-exp [B, T, 1] and the younger sources, each a value [B, T, D] and a
    logit [B, T, 1] -> hidden [B, T, D]."""
    if not younger:
        return mix.to(dtype)
    values = [mix, *(value for value, _ in younger)]
    # A copy: the columns of each site have another stride and alignment, and Triton would compile for each of them.
    logits = torch.cat([lse, *(logit for _, logit in younger)], dim=-1)
    check_inputs(values, logits, (len(values),))
    return merge_op(values, logits, dtype)


def check_inputs(values: Sequence[torch.Tensor], logits: torch.Tensor, logits_shape: tuple[int, ...]) -> None:
    """Raise for inputs with which a kernel would crash or compute wrong numbers. Logits are [B, T, *logits_shape]."""
    check_values(values)
    shape = values[0].shape
    for value in values:
        if value.shape != shape:
            raise ValueError(f"The values of a depth read have one shape, not {shape} and {value.shape}.")
    if logits.dtype != torch.float32:
        raise TypeError(f"The Triton depth read takes float32 logits, not {logits.dtype}.")
    if logits.shape != (*shape[:-1], *logits_shape):
        raise ValueError(f"Values {shape} need logits {(*shape[:-1], *logits_shape)}, not {tuple(logits.shape)}.")


def check_values(values: Sequence[torch.Tensor]) -> None:
    if triton is None:
        raise ImportError("The Triton depth read needs triton: install it, or read with `depth_routing`.")
    if values[0].device.type == "cpu" and not INTERPRETED:
        raise ValueError("The Triton depth read got tensors on the CPU: move them to a GPU, or use `depth_routing`.")
    for value in values:
        if value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"The Triton depth read takes float32, float16 and bfloat16 values, not {value.dtype}.")


def row_arguments(tensors: Iterable[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Tensors [..., D] -> their rows [tokens, D], contiguous along D, and the row strides, as a kernel takes them. The
    rows are views unless the layout forbids it."""
    matrices = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    rows = tuple(matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in matrices)
    return rows, tuple(row.stride(0) for row in rows)


def mix_block(hidden_size: int, num_sites: int) -> int:
    """Columns of D per program of one warp: a thread holds at most 64 float32 numbers of the G rows."""
    largest = min(512, max(32, 2048 // num_sites))
    return min(triton.next_power_of_2(hidden_size), 1 << (largest.bit_length() - 1))


def merge_launch_options(num_sources: int, hidden_size: int) -> dict[str, int]:
    """A whole row per program; 8 columns per thread, one 16-byte load of bfloat16, up to 16 warps."""
    block = triton.next_power_of_2(hidden_size)
    blocks = {"BLOCK_S": triton.next_power_of_2(num_sources), "BLOCK_D": block}
    return {**blocks, "num_warps": min(max(block // 256, 1), 16)}


def new_mixes(values: list[torch.Tensor], logits: torch.Tensor) -> list[torch.Tensor]:
    mixes = [logits.new_empty(values[0].shape) for _ in range(logits.shape[-2])]
    return [*mixes, logits.new_empty(logits.shape[:-1])]


def new_gradients(values: list[torch.Tensor], logits: torch.Tensor) -> list[torch.Tensor]:
    # Not empty_like, which copies the layout of its argument: kernels write contiguous rows.
    return [tensor.new_empty(tensor.shape) for tensor in (*values, logits)]


@torch.library.custom_op(f"{NAMESPACE}::mix", mutates_args=())
def mix_op(values: list[torch.Tensor], logits: torch.Tensor) -> list[torch.Tensor]:
    *mixes, lse = outputs = new_mixes(values, logits)
    logits = logits.contiguous()
    rows, strides = row_arguments(values)
    num_tokens, hidden_size = rows[0].shape
    block = mix_block(hidden_size, len(mixes))
    grid = num_tokens, triton.cdiv(hidden_size, block)
    options = {"BLOCK_S": triton.next_power_of_2(len(values)), "BLOCK_D": block, "num_warps": 1}
    with torch.cuda.device_of(logits):
        for first in range(0, len(values), MAX_SOURCES_FORWARD):
            launched = slice(first, first + MAX_SOURCES_FORWARD)
            sources = rows[launched], strides[launched]
            weighted_sums_kernel[grid](
                tuple(mixes), lse, *sources, logits, len(values), hidden_size, FIRST=first, **options
            )
    return outputs


mix_op.register_fake(new_mixes)


@torch.library.custom_op(f"{NAMESPACE}::mix_backward", mutates_args=())
def mix_backward_op(
    grads: list[torch.Tensor],
    grad_lse: torch.Tensor,
    values: list[torch.Tensor],
    logits: torch.Tensor,
    lse: torch.Tensor,
) -> list[torch.Tensor]:
    """-> the gradients of the values, then that of the logits."""
    *grad_values, grad_logits = outputs = new_gradients(values, logits)
    logits, num_sources = logits.contiguous(), len(values)
    rows, strides = row_arguments(values)
    grad_rows, grad_strides = row_arguments(grads)
    num_tokens, hidden_size = rows[0].shape
    block = mix_block(hidden_size, len(grads))
    chunks = triton.cdiv(hidden_size, block)
    dots = logits.new_empty(num_tokens, chunks, len(grads), num_sources)
    with torch.cuda.device_of(logits):
        for first in range(0, num_sources, MAX_SOURCES_BACKWARD):
            launched = slice(first, first + MAX_SOURCES_BACKWARD)
            mix_backward_kernel[num_tokens, chunks](
                tuple(grad_values[launched]),
                dots,
                grad_rows,
                grad_strides,
                rows[launched],
                strides[launched],
                logits,
                lse,
                num_sources,
                first,
                hidden_size,
                BLOCK_D=block,
                num_warps=1,
            )
        options = {"BLOCK_S": triton.next_power_of_2(num_sources), "num_warps": 1}
        mix_backward_logits_kernel[num_tokens, len(grads)](
            grad_logits, dots, logits, lse, grad_lse.contiguous(), num_sources, chunks, **options
        )
    return outputs


mix_backward_op.register_fake(lambda grads, grad_lse, values, logits, lse: new_gradients(values, logits))


def save_for_mix_backward(ctx: Any, inputs: tuple, output: list[torch.Tensor]) -> None:
    values, logits = inputs
    ctx.save_for_backward(logits, output[-1], *values)


def mix_backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    logits, lse, *values = ctx.saved_tensors
    *grads, grad_lse = grads
    *grad_values, grad_logits = mix_backward_op(grads, grad_lse, values, logits, lse)
    return grad_values, grad_logits


mix_op.register_autograd(mix_backward, setup_context=save_for_mix_backward)


def new_hidden(values: list[torch.Tensor], logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values[0].new_empty(values[0].shape, dtype=dtype)


@torch.library.custom_op(f"{NAMESPACE}::merge", mutates_args=())
def merge_op(values: list[torch.Tensor], logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    hidden = new_hidden(values, logits, dtype)
    rows, strides = row_arguments(values)
    num_tokens, hidden_size = rows[0].shape
    options = merge_launch_options(len(values), hidden_size)
    with torch.cuda.device_of(hidden):
        weighted_sums_kernel[num_tokens, 1](
            (hidden,), None, rows, strides, logits.contiguous(), len(values), hidden_size, FIRST=0, **options
        )
    return hidden


merge_op.register_fake(new_hidden)


@torch.library.custom_op(f"{NAMESPACE}::merge_backward", mutates_args=())
def merge_backward_op(
    grad: torch.Tensor, hidden: torch.Tensor, younger: list[torch.Tensor], logits: torch.Tensor, mix_dtype: torch.dtype
) -> list[torch.Tensor]:
    """-> the gradients of the mix and of the younger values, then that of the logits."""
    *grad_values, grad_logits = outputs = new_merge_gradients(grad, hidden, younger, logits, mix_dtype)
    (grad_rows,), (grad_stride,) = row_arguments([grad])
    num_tokens, hidden_size = grad_rows.shape
    with torch.cuda.device_of(hidden):
        merge_backward_kernel[(num_tokens,)](
            tuple(grad_values),
            grad_logits,
            grad_rows,
            grad_stride,
            hidden,
            *row_arguments(younger),
            logits.contiguous(),
            hidden_size,
            **merge_launch_options(len(grad_values), hidden_size),
        )
    return outputs


@merge_backward_op.register_fake
def new_merge_gradients(
    grad: torch.Tensor, hidden: torch.Tensor, younger: list[torch.Tensor], logits: torch.Tensor, mix_dtype: torch.dtype
) -> list[torch.Tensor]:
    return [hidden.new_empty(hidden.shape, dtype=mix_dtype), *new_gradients(younger, logits)]


def save_for_merge_backward(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    """Keeps the hidden states instead of the mix: the next norm keeps them anyway."""
    values, logits, _ = inputs
    ctx.mix_dtype = values[0].dtype
    ctx.save_for_backward(output, logits, *values[1:])


def merge_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    hidden, logits, *younger = ctx.saved_tensors
    *grad_values, grad_logits = merge_backward_op(grad, hidden, younger, logits, ctx.mix_dtype)
    return grad_values, grad_logits, None


merge_op.register_autograd(merge_backward, setup_context=save_for_merge_backward)


class StepTables(NamedTuple):
    """The memory of one step of generation; see `step_kernel`."""

    hidden: torch.Tensor  # [M, B, 1, H D], what the sites read
    weights: torch.Tensor  # [M, B, H, S] depth weights
    values: torch.Tensor  # [S, B, H D], one slot per block and one more
    keys: torch.Tensor  # [S, B, H R] in float32, or `values`, whose last columns are the keys
    embedding: torch.Tensor  # [B, 1, H D]
    embedding_key: torch.Tensor  # [B, 1, H R]
    queries: torch.Tensor  # [M, H R], in float32, as they were learned


class StepOptions(NamedTuple):
    """What the config says about logits."""

    eps: float
    scale: float
    normalize_emitted: bool  # keys one by one, before they are summed
    normalize_keys: bool
    normalize_query: bool


def with_unit_stride(row: torch.Tensor) -> torch.Tensor:
    return row if row.stride(-1) == 1 else row.contiguous()


def new_step_tables(
    embedding: tuple[torch.Tensor, ...], queries: torch.Tensor, num_sources: int, heads: int
) -> StepTables:
    """embedding: a value [B, 1, H D], whose last coordinates are its key, or a value and a key [B, 1, H R]."""
    value, *key = map(with_unit_stride, embedding)
    (num_sites, rank), (batch, _, hidden_size) = queries.shape, value.shape
    values = value.new_empty(num_sources, batch, hidden_size)
    return StepTables(
        hidden=value.new_empty(num_sites, batch, 1, hidden_size),
        weights=queries.new_empty(num_sites, batch, heads, num_sources),
        values=values,
        keys=queries.new_empty(num_sources, batch, rank) if key else values,
        embedding=value,
        embedding_key=key[0] if key else value[..., -rank:],
        queries=queries.contiguous(),
    )


def step_site(
    tables: StepTables,
    emitted: tuple[torch.Tensor, ...],
    site: int,
    num_blocks: int,
    slots: tuple[int, int],
    options: StepOptions,
) -> None:
    """Add what a sub-layer emitted to its block, and read: one launch, which allocates nothing.

    emitted: as the embedding of `new_step_tables`; `site` counts from 0; `num_blocks` are complete; slots: of the open
    block's sum so far (negative: none), and for the new sum."""
    _, batch, heads, num_sources = tables.weights.shape
    hidden_size, rank = tables.values.shape[-1] // heads, tables.queries.shape[-1] // heads
    value, *own_key = map(with_unit_stride, emitted)
    key = own_key[0] if own_key else value[..., -rank * heads :]
    blocks = step_blocks(hidden_size, rank, num_sources)
    with torch.cuda.device_of(value):
        step_kernel[batch * heads, triton.cdiv(hidden_size, blocks["BLOCK_D"])](
            *(tuple(tables), value, key),
            tuple(part.stride(0) for part in (tables.embedding, tables.embedding_key, value, key)),
            *(site, num_blocks, *slots, batch, (num_sources, heads, hidden_size, rank), options.eps, options.scale),
            NORMALIZE=(options.normalize_emitted, options.normalize_keys, options.normalize_query),
            HAS_OWN_KEYS=tables.keys is not tables.values,
            **blocks,
        )
