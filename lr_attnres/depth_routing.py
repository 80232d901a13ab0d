"""Depth routing: what a sub-layer writes, and how a site reads what was written before it.

Shape letters: B batch, T tokens, D hidden size, R key rank, S sources of a site, L layers, M = 2L sub-layers.

A source is a value [B, T, D] and its logits for the sites still to come. Queries do not depend on the input, so the
logits of a source for all later sites are one small matrix product, made once, when the source is written.
"""

import torch
from transformers.utils.generic import maybe_autocast


def depth_block_ends(num_sublayers: int, num_blocks: int | None) -> list[int]:
    """The numbers of written sub-layers at which a block is complete: `ceil(M * i / N)` for i = 1..N."""
    if num_blocks is None or num_blocks >= num_sublayers:
        return list(range(1, num_sublayers + 1))
    return [-(-num_sublayers * i // num_blocks) for i in range(1, num_blocks + 1)]


def depth_rms_norm(key: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm without weights, in float32 or better: [..., R] -> [..., R]."""
    key = key.to(torch.promote_types(key.dtype, torch.float32))
    return key * torch.rsqrt(key.square().mean(-1, keepdim=True) + eps)


def depth_logits(key: torch.Tensor, queries: torch.Tensor, key_norm: bool, eps: float) -> torch.Tensor:
    """The logits of one source for a run of sites: key [B, T, R], queries [sites, R] -> [B, T, sites]."""
    key = depth_rms_norm(key, eps) if key_norm else key.to(torch.promote_types(key.dtype, torch.float32))
    # Autocast would make this product in half precision.
    with maybe_autocast(device_type=key.device.type, enabled=False):
        return key @ queries.to(key).t()


def depth_read(values: list[torch.Tensor], logits: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over S sources, per token.

    values: S tensors [B, T, D]; logits: S tensors [B, T] -> hidden [B, T, D], depth weights [B, T, S].
    The sources are never stacked; the sum is accumulated in the dtype of the logits and cast once.
    """
    weights = torch.stack(logits, dim=-1).softmax(dim=-1)
    parts = weights.unsqueeze(-2).unbind(-1)
    hidden = parts[0] * values[0]
    for part, value in zip(parts[1:], values[1:], strict=True):
        hidden = hidden + part * value
    return hidden.to(values[0].dtype), weights
