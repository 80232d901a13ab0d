"""Cross-entropy with z-loss, computed from the hidden states in chunks: the logits of the whole batch never exist.

Shape letters: T tokens of the batch, C tokens of a chunk, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from ..errors import LRAttnResError


IGNORE_INDEX = -100


def use_chunked_loss(model: nn.Module, z_loss: float = 0.0, chunk_size: int | None = None) -> None:
    """Make `model(..., labels=...)` compute its loss in chunks of tokens; `logits` of the output is then None.

    `model` is an `LRAttnResForCausalLM`, bare or wrapped (PEFT, DDP, FSDP2, `torch.compile`). `z_loss` is the weight
    of the mean squared log-sum-exp. `chunk_size` is in tokens; by default a sixteenth of the batch, at least 128.
    Without labels the model returns logits as before.
    """
    if not 0 <= z_loss < float("inf"):
        raise LRAttnResError(f"`z_loss` is {z_loss}; it must be finite and not negative.")
    if chunk_size is not None and chunk_size < 1:
        raise LRAttnResError(f"`chunk_size` is {chunk_size}; it must be at least 1, or None.")
    language_model = find_language_model(model)
    _check_head(language_model.lm_head)
    language_model.chunked_loss = ChunkedLoss(z_loss, chunk_size)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Turn off dropout and z-loss for the duration of the context; the chunked loss, if any, stays chunked."""
    language_model, was_training = _find_language_model(model), model.training
    if language_model is not None:
        previous_loss = language_model.chunked_loss
        use_chunked_loss(model)
    model.eval()
    try:
        yield
    finally:
        if language_model is not None:
            language_model.chunked_loss = previous_loss
        model.train(was_training)


def num_targets(labels: torch.Tensor) -> torch.Tensor:
    """The number of labels in the loss: the first token of a row has no context and is never predicted."""
    return (labels[..., 1:] != IGNORE_INDEX).sum()


def find_language_model(model: nn.Module) -> Any:
    """The `LRAttnResForCausalLM` inside wrappers; its class may come from the code in a model folder."""
    language_model = _find_language_model(model)
    if language_model is None:
        raise LRAttnResError(f"{type(model).__name__} has no chunked loss; it needs an LRAttnResForCausalLM.")
    return language_model


def _find_language_model(model: nn.Module) -> Any:
    # `vars`, because wrappers forward `getattr` to the module they wrap.
    return next((module for module in model.modules() if "chunked_loss" in vars(module)), None)


@dataclass(frozen=True)
class ChunkedLoss:
    """`LRAttnResForCausalLM.forward` calls this instead of the head and the loss function."""

    z_loss: float = 0.0
    chunk_size: int | None = None

    def __call__(
        self,
        head: nn.Linear,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The loss of Transformers' `ForCausalLMLoss`, plus z-loss, for hidden states [B, T, D]."""
        _check_head(head)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]

        def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return chunked_cross_entropy(
                hidden, weight, shift_labels, self.z_loss, self.chunk_size, num_items_in_batch, ignore_index
            )

        if isinstance(head, FSDPModule):
            # FSDP gathers the weight for a registered method of the head, and frees it afterwards.
            sharded: Any = head
            if not hasattr(sharded, "apply_with_weight"):
                sharded.apply_with_weight = lambda hidden, function: function(hidden, head.weight)
                register_fsdp_forward_method(sharded, "apply_with_weight")
            return sharded.apply_with_weight(hidden_states, loss)
        if isinstance(head.weight, DTensor):
            raise LRAttnResError("The chunked loss does not work with tensor parallelism, which splits `lm_head`.")
        return loss(hidden_states, head.weight)


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> torch.Tensor:
    """Cross-entropy of `hidden @ weight.T` plus `z_loss * lse^2`, averaged over the targets that are not ignored.

    hidden [..., D], weight [V, D], targets [...] (already shifted). `num_items_in_batch` replaces the number of
    targets as the divisor. Softmax and sums are float32; matrix products use the autocast dtype, else the dtype of
    `hidden`.
    """
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).to(hidden.device)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    size = chunk_size or max(128, -(-len(hidden) // 16))
    # The forward also computes the gradients, while a chunk's logits exist: the backward need not recompute them.
    wanted = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    total = _ChunkedSum.apply(hidden, weight, targets, z_loss, size, ignore_index, dtype, wanted)
    items = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (items.to(total.device) if torch.is_tensor(items) else items)


class _ChunkedSum(torch.autograd.Function):
    """Sum over the targets of cross-entropy and z-loss; the arguments are those of `_sum_over_chunks`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *settings: Any
    ) -> torch.Tensor:
        ctx.settings = settings
        total, *gradients = _sum_over_chunks(hidden, weight, targets, *settings)
        if torch.compiler.is_compiling():  # saved tensors are visible to the compiler, attributes of ctx are not
            ctx.save_for_backward(hidden, weight, targets, *gradients)
        else:
            ctx.save_for_backward(hidden, weight, targets)
            ctx.gradients = gradients
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, *gradients = ctx.saved_tensors
        if gradients:
            scaled = [None if buffer is None else buffer * grad for buffer in gradients]
        else:
            # Scale the buffers in place to save memory. A second backward over the same graph computes them again.
            buffers = ctx.__dict__.pop("gradients", None)
            if buffers is None:
                _, *buffers = _sum_over_chunks(hidden, weight, targets, *ctx.settings)
            scaled = [None if buffer is None else buffer.mul_(grad) for buffer in buffers]
        like = [None if buffer is None else buffer.to(x.dtype) for buffer, x in zip(scaled, (hidden, weight))]
        return *like, None, *[None for _ in ctx.settings]


def _sum_over_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    z_loss: float,
    size: int,
    ignore_index: int,
    dtype: torch.dtype,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """-> the sum, and its float32 gradients for the hidden states [T, D] and the weight [V, D], None if not wanted."""
    precise = torch.promote_types(dtype, torch.float32)
    total = torch.zeros((), dtype=precise, device=hidden.device)
    hidden_gradient = torch.zeros_like(hidden, dtype=precise) if wanted[0] else None
    weight_gradient = torch.zeros_like(weight, dtype=precise) if wanted[1] else None
    with torch.autocast(hidden.device.type, enabled=False):
        weight = weight.to(dtype)
        for start in range(0, len(hidden), size):
            chunk = slice(start, start + size)
            chunk_hidden, counted = hidden[chunk].to(dtype), (targets[chunk] != ignore_index)[:, None]
            index = torch.where(counted, targets[chunk, None], 0)
            logits = _product(chunk_hidden, weight.t())  # [C, V], the only one: its gradient overwrites it
            target_logits = logits.gather(1, index)
            largest = logits.amax(dim=1, keepdim=True)
            exponentials = logits.sub_(largest).exp_()
            sums = exponentials.sum(dim=1, keepdim=True)
            lse = largest + sums.log()
            total += torch.where(counted, lse - target_logits + z_loss * lse.square(), 0).sum()
            if any(wanted):
                # d/dlogits of lse - target + z lse^2 is softmax * (1 + 2 z lse) - onehot
                counted = counted.to(precise)
                gradient = exponentials.mul_(counted * (1 + 2 * z_loss * lse) / sums)
                gradient.scatter_(1, index, gradient.gather(1, index) - counted)
                if weight_gradient is not None:
                    _add_product(weight_gradient, gradient.t(), chunk_hidden)
                if hidden_gradient is not None:
                    hidden_gradient[chunk] = gradient.to(dtype) @ weight
                del gradient
            del logits, exponentials  # before the next chunk's logits exist
    return total, hidden_gradient, weight_gradient


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right in at least float32. GPUs can return the unrounded float32 product of half-precision factors."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).to(torch.promote_types(left.dtype, torch.float32))


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right; `total` and `left` are float32, `right` may be half precision."""
    if right.is_cuda and right.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, left.to(right.dtype), right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left, right.to(left.dtype))


def _check_head(head: nn.Module) -> None:
    if type(head).forward is not nn.Linear.forward or head.bias is not None:
        raise LRAttnResError(
            f"The chunked loss needs a plain `lm_head`, but `lm_head` is a {type(head).__name__}: leave it out of the "
            "adapter or quantization, or do not use the chunked loss."
        )
    if head.weight.shape != (head.out_features, head.in_features):
        raise LRAttnResError(
            "The chunked loss needs a whole `lm_head`, which ZeRO stage 3 splits: use stage 2 or FSDP."
        )
