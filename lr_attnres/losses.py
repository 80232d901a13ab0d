"""Cross-entropy with z-loss straight from the hidden states: the logits of the whole batch never exist.

Shape letters: T tokens of the batch, C tokens of a chunk, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


IGNORE_INDEX = -100


def use_chunked_loss(model: nn.Module, z_loss: float = 0.0, chunk_size: int | None = None) -> None:
    """Make `model(..., labels=...)` compute its loss in chunks of tokens; `logits` of the output is then None.

    `model` is an `LRAttnResForCausalLM`, bare or wrapped (PEFT, DDP, FSDP2, `torch.compile`). `z_loss` is the weight
    of the mean squared log-sum-exp. `chunk_size` is in tokens; by default a sixteenth of the batch, at least 128.
    Without labels the model returns logits as before.
    """
    if not 0 <= z_loss < float("inf"):
        raise ValueError(f"`z_loss` is {z_loss}; it must be finite and not negative.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"`chunk_size` is {chunk_size}; it must be at least 1, or None.")
    language_model = find_language_model(model)
    _check_head(language_model.lm_head)
    language_model.chunked_loss = ChunkedLoss(z_loss, chunk_size)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout, and the plain cross-entropy in chunks, without z-loss; afterwards the model is as it was."""
    language_model, was_training = find_language_model(model), model.training
    before = language_model.chunked_loss
    use_chunked_loss(model)
    model.eval()
    try:
        yield
    finally:
        language_model.chunked_loss = before
        model.train(was_training)


def num_targets(labels: torch.Tensor) -> torch.Tensor:
    """Tokens that the loss counts: the model predicts each label from the tokens before it, so never the first."""
    return (labels[..., 1:] != IGNORE_INDEX).sum()


def find_language_model(model: nn.Module) -> Any:
    """The `LRAttnResForCausalLM` in its wrappers: the class of this package, or that of a folder's own code."""
    # `vars`, because wrappers pretend to have the attributes of what they wrap
    language_models = [module for module in model.modules() if "chunked_loss" in vars(module)]
    if not language_models:
        raise ValueError(f"{type(model).__name__} has no chunked loss; it needs an LRAttnResForCausalLM.")
    return language_models[0]


@dataclass(frozen=True)
class ChunkedLoss:
    """What `LRAttnResForCausalLM.forward` calls in place of the head and the loss function."""

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

        def loss(hidden: torch.Tensor) -> torch.Tensor:
            return chunked_cross_entropy(
                hidden, head.weight, shift_labels, self.z_loss, self.chunk_size, num_items_in_batch, ignore_index
            )

        if not isinstance(head, FSDPModule):
            if isinstance(head.weight, DTensor):
                raise ValueError("The chunked loss does not work with tensor parallelism, which splits `lm_head`.")
            return loss(hidden_states)
        # The head belongs to an FSDP group of its own: calling the module is what gathers and frees its weight.
        head.forward = loss  # type: ignore[method-assign, assignment]
        try:
            return head(hidden_states)
        finally:
            del head.forward


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

    hidden [..., D], weight [V, D], targets [...] (already shifted). With `num_items_in_batch` the sum is divided by
    that instead. Softmax and sums are float32; the products are in the autocast dtype, else in that of `hidden`.
    """
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).to(hidden.device)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    size = chunk_size or max(128, -(-len(hidden) // 16))
    # Gradients are made in the forward, from the logits that are there: the backward needs no second product.
    wanted = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    total = _ChunkedSum.apply(hidden, weight, targets, z_loss, size, ignore_index, dtype, wanted)
    items = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (items.to(total.device) if torch.is_tensor(items) else items)


class _ChunkedSum(torch.autograd.Function):
    """Sum over the targets of cross-entropy and z-loss."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        z_loss: float,
        size: int,
        ignore_index: int,
        dtype: torch.dtype,
        wanted: tuple[bool, bool],
    ) -> torch.Tensor:
        ctx.settings = (z_loss, size, ignore_index, dtype, *wanted)
        total, *gradients = _sum_over_chunks(hidden, weight, targets, *ctx.settings)
        if torch.compiler.is_compiling():  # a compiler keeps tensors that it is told of, and uses their memory again
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
            # The buffers are given away, scaled in place: a second backward over the same graph makes new ones.
            buffers = ctx.__dict__.pop("gradients", None)
            if buffers is None:
                _, *buffers = _sum_over_chunks(hidden, weight, targets, *ctx.settings)
            scaled = [None if buffer is None else buffer.mul_(grad) for buffer in buffers]
        like = [None if buffer is None else buffer.to(x.dtype) for buffer, x in zip(scaled, (hidden, weight))]
        return *like, None, None, None, None, None, None


def _sum_over_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    z_loss: float,
    size: int,
    ignore_index: int,
    dtype: torch.dtype,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """-> the sum, its gradient for the hidden states [T, D] and for the weight [V, D] in float32, each if wanted."""
    precise = torch.promote_types(dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        compute_weight = weight.to(dtype)
        total = torch.zeros((), dtype=precise, device=hidden.device)
        hidden_gradient = torch.zeros_like(hidden, dtype=precise) if hidden_grad else None
        weight_gradient = torch.zeros_like(weight, dtype=precise) if weight_grad else None
        for start in range(0, len(hidden), size):
            here = slice(start, start + size)
            total += _one_chunk(
                hidden[here].to(dtype),
                compute_weight,
                targets[here],
                z_loss,
                ignore_index,
                None if hidden_gradient is None else hidden_gradient[here],
                weight_gradient,
            )
    return total, hidden_gradient, weight_gradient


def _one_chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    z_loss: float,
    ignore_index: int,
    hidden_gradient: torch.Tensor | None,
    weight_gradient: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the sum of a chunk; writes its hidden gradient [C, D] and adds to the weight gradient [V, D]."""
    logits = _product(hidden, weight.t())  # [C, V], the only tensor of this size: it becomes its own gradient
    counted = targets != ignore_index
    index = torch.where(counted, targets, 0)[:, None]
    target_logits = logits.gather(1, index)
    largest = logits.amax(dim=1, keepdim=True)
    exponentials = logits.sub_(largest).exp_()
    sums = exponentials.sum(dim=1, keepdim=True)
    lse = largest + sums.log()
    total = torch.where(counted[:, None], lse - target_logits + z_loss * lse.square(), 0).sum()
    if hidden_gradient is None and weight_gradient is None:
        return total

    # d/dlogits of lse - target + z lse^2 is softmax * (1 + 2 z lse) - onehot
    counted = counted[:, None].to(logits.dtype)
    gradient = exponentials.mul_(counted * (1 + 2 * z_loss * lse) / sums)
    gradient.scatter_(1, index, gradient.gather(1, index) - counted)
    if weight_gradient is not None:
        _add_product(weight_gradient, gradient.t(), hidden)
    if hidden_gradient is not None:
        hidden_gradient.copy_(gradient.to(weight.dtype) @ weight)
    return total


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right in float32 at least; GPUs give it from half-precision factors without rounding it first."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).to(torch.promote_types(left.dtype, torch.float32))


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, where `total` and `left` are float32 and `right` may be half precision."""
    if right.is_cuda and right.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, left.to(right.dtype), right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left, right.to(left.dtype))


def _check_head(head: nn.Module) -> None:
    if type(head).forward is not nn.Linear.forward or head.bias is not None:
        raise ValueError(
            f"The chunked loss multiplies with the weight of `lm_head` itself, but `lm_head` is a "
            f"{type(head).__name__}: leave it out of the adapter or quantization, or do not use the chunked loss."
        )
    if head.weight.shape != (head.out_features, head.in_features):
        raise ValueError(
            "The chunked loss needs the whole `lm_head`, which ZeRO stage 3 splits: use stage 2, or FSDP."
        )
