"""The needs of a training run, computed from the config: parameters, FLOPs, bytes of states, loss and activations.

FLOPs come from `depth_cost` and the shapes of the decoder. Activations are counted by running the real model on
tensors without data (FakeTensor), with fp32 weights under bf16 autocast, and with an attention that saves the same
tensors for the backward as flash attention. `plan_run.py` prints the tables.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface

from lr_attnres import LRAttnResConfig, LRAttnResModel, depth_cost


ROW = 2048  # tokens


def parameters(config: LRAttnResConfig) -> tuple[int, int]:
    """The number of all parameters, and of those that Muon trains: the matrices inside the layers."""
    cost, embedding = depth_cost(config), config.vocab_size * config.hidden_size
    outside_layers = cost.added_parameters - cost.key_projection_macs  # the queries
    if config.residual_type == "projected":
        outside_layers += config.depth_key_rank * config.hidden_size
    total = cost.core_macs + 2 * embedding + cost.added_parameters
    return total, cost.core_macs + cost.added_parameters - outside_layers


def training_flops(config: LRAttnResConfig) -> int:
    """Per token, forward and backward: 6 per multiply-add. Attention scores are causal over a whole row."""
    cost = depth_cost(config)
    scores = config.num_hidden_layers * config.num_attention_heads * config.head_dim * ROW
    return 6 * (cost.core_macs + cost.total_macs + config.vocab_size * config.hidden_size + scores)


def state_bytes(config: LRAttnResConfig) -> int:
    """fp32 weights and gradients, and the optimizer states: one fp32 number per weight for Muon, two for AdamW."""
    total, muon = parameters(config)
    return 8 * total + 4 * muon + 8 * (total - muon)


def loss_bytes(config: LRAttnResConfig, tokens: int) -> int:
    """A chunk of fp32 logits with its bf16 copy, and the bf16 copy of the head. `state_bytes` has its gradient."""
    chunk = max(128, -(-tokens // 16))
    return 6 * chunk * config.vocab_size + 2 * config.vocab_size * config.hidden_size


class FlashLike(torch.autograd.Function):
    """Saves the same tensors for the backward as flash attention."""

    @staticmethod
    def forward(ctx, query, key, value):
        output, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("this attention only counts memory")


def kept_as_flash(module, query, key, value, attention_mask, **kwargs):
    return FlashLike.apply(query, key, value).transpose(1, 2).contiguous(), None


def kept_bytes_per_token(config: LRAttnResConfig, checkpointing: bool = False) -> float:
    """Bytes that autograd saves in the layers, without weights and their bf16 copies."""
    AttentionInterface.register("counted", kept_as_flash)
    config._attn_implementation = "counted"
    totals = []
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        model = LRAttnResModel(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        for tokens in (64, 128):
            storages = {}
            with torch.autograd.graph.saved_tensors_hooks(lambda x, s=storages: _record(x, s), lambda x: x):
                model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
            totals.append(sum(storage.nbytes() for storage in storages.values()))
    return (totals[1] - totals[0]) / 64  # the difference drops everything that does not grow with the tokens


def _record(tensor: torch.Tensor, storages: dict) -> torch.Tensor:
    storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
    return tensor


def activation_bytes(config: LRAttnResConfig, tokens: int) -> tuple[float, float]:
    """Without and with gradient checkpointing, which saves layer inputs and recomputes one layer at a time."""
    kept, inputs = (tokens * kept_bytes_per_token(config, on) for on in (False, True))
    return kept, inputs + kept / config.num_hidden_layers
