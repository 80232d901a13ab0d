"""What a run needs, from its config alone: parameters, operations per token, bytes of states, loss and activations.

Operations come from `lr_attnres.cost` and the shapes of the decoder. What the backward keeps is counted by running the
real model on tensors without contents (FakeTensor), in fp32 weights under bf16 autocast, with attention that keeps
what flash attention keeps. `plan_run.py` makes tables of it.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface

from lr_attnres import LRAttnResConfig, LRAttnResModel
from lr_attnres.cost import depth_cost


ROW = 2048  # tokens


def parameters(config: LRAttnResConfig) -> tuple[int, int]:
    """All of them, and those that Muon trains: the matrices inside the layers."""
    cost, embedding = depth_cost(config), config.vocab_size * config.hidden_size
    outside_layers = cost.added_parameters - cost.key_projection_macs  # the queries
    if config.residual_type == "projected":
        outside_layers += config.depth_key_rank * config.hidden_size
    total = cost.core_macs + 2 * embedding + cost.added_parameters
    return total, cost.core_macs + cost.added_parameters - outside_layers


def training_flops(config: LRAttnResConfig) -> int:
    """Per token, forward and backward: 6 per multiply-add. Attention scores count as causal over a whole row."""
    cost = depth_cost(config)
    scores = config.num_hidden_layers * config.num_attention_heads * config.head_dim * ROW
    return 6 * (cost.core_macs + cost.total_macs + config.vocab_size * config.hidden_size + scores)


def state_bytes(config: LRAttnResConfig) -> int:
    """fp32 weights and gradients; Muon keeps one fp32 number per weight, AdamW two."""
    total, muon = parameters(config)
    return 8 * total + 4 * muon + 8 * (total - muon)


def loss_bytes(config: LRAttnResConfig, tokens: int) -> int:
    """A chunk of fp32 logits and its bf16 copy, and the bf16 copy of the head; its gradient is in the states."""
    chunk = max(128, -(-tokens // 16))
    return 6 * chunk * config.vocab_size + 2 * config.vocab_size * config.hidden_size


class FlashLike(torch.autograd.Function):
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
    """What autograd keeps of the layers, weights and their bf16 copies apart."""
    AttentionInterface.register("counted", kept_as_flash)
    config._attn_implementation = "counted"
    totals = []
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        model = LRAttnResModel(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        for tokens in (64, 128):
            storages = {}
            with torch.autograd.graph.saved_tensors_hooks(lambda x, s=storages: _note(x, s), lambda x: x):
                model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
            totals.append(sum(storage.nbytes() for storage in storages.values()))
    return (totals[1] - totals[0]) / 64  # what does not grow with the tokens falls out


def _note(tensor: torch.Tensor, storages: dict) -> torch.Tensor:
    storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
    return tensor


def activation_bytes(config: LRAttnResConfig, tokens: int) -> tuple[float, float]:
    """Without and with checkpointing, which keeps the input of each layer and makes one layer's activations again."""
    kept, inputs = (tokens * kept_bytes_per_token(config, on) for on in (False, True))
    return kept, inputs + kept / config.num_hidden_layers
