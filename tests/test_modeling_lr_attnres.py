"""The laws of the model, for every variant, with all parameters (queries too) away from their initial values."""

import pytest
import torch
from common import ROUTED, SIZES, VARIANTS, perturb, random_tokens, small_config, small_model
from oracle import oracle_forward
from transformers import DynamicCache

from lr_attnres import (
    LRAttnResConfig,
    LRAttnResForCausalLM,
    LRAttnResForQuestionAnswering,
    LRAttnResForSequenceClassification,
    LRAttnResForTokenClassification,
    LRAttnResModel,
)
from lr_attnres.depth_routing import depth_block_ends, depth_read


# Two float32 evaluations of the same small model in a different order: about 100 roundings of 6e-8, logits up to 10.
FLOAT32 = {"atol": 2e-5, "rtol": 1e-5}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def loss_gradients(model: torch.nn.Module, input_ids: torch.Tensor, **kwargs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids, labels=input_ids, **kwargs).loss.backward()
    return gradients(model)


# The oracle


ODD_SIZES = {"hidden_size": 48, "num_hidden_layers": 5, "intermediate_size": 56, "depth_key_rank": 7}
BLOCK_COUNTS = [1, 2, 3, 4, 7, 10, 64, None]
SWITCHES = [
    {"depth_key_norm": False},
    {"depth_query_norm": True},
    {"depth_logit_scale": 0.3},
    {"depth_block_exponent": 0.5},
    {"depth_block_exponent": 1.0, "depth_count_prior": 1.0},
    {"depth_block_exponent": 0.5, "depth_key_norm": False},
    {"depth_key_rank": 1},
    {"depth_key_rank": 48},
    {"norm_weight": True, "rms_norm_eps": 1e-5},
    {"qk_norm": False},
]
ORACLE_CASES = [{"residual_type": "standard"}, {"residual_type": "standard", "norm_weight": True, "qk_norm": False}]
ORACLE_CASES += [
    {"residual_type": kind, "num_depth_blocks": blocks}
    for kind in ("attnres", "projected", "sliced")
    for blocks in BLOCK_COUNTS
]
ORACLE_CASES += [
    {"residual_type": kind, "num_depth_blocks": 3, **switch} for kind in ("projected", "sliced") for switch in SWITCHES
]


@pytest.mark.parametrize("fields", ORACLE_CASES, ids=str)
def test_forward_and_every_gradient_agree_with_the_oracle(fields):
    config = LRAttnResConfig(**(SIZES | ODD_SIZES | fields))
    model = perturb(LRAttnResForCausalLM(config)).double()
    model.model.rotary_emb = DoubleRotaryEmbedding(config)
    input_ids = random_tokens(3, 17)
    outputs = model(input_ids, output_depth_weights=True)
    next_token_loss(outputs.logits, input_ids).backward()

    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits, depth_weights = oracle_forward(config, parameters, input_ids)
    next_token_loss(logits, input_ids).backward()

    close = {"rtol": 1e-9, "atol": 1e-11}  # float64 on both sides
    torch.testing.assert_close(outputs.logits, logits, **close)
    assert len(outputs.depth_weights) == len(depth_weights)
    for ours, theirs in zip(outputs.depth_weights, depth_weights):
        torch.testing.assert_close(ours, theirs, **close)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, parameters[name].grad, **close, msg=lambda m, n=name: f"{n}: {m}")


def next_token_loss(logits, input_ids):
    """Transformers' own loss casts to float32."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


class DoubleRotaryEmbedding(torch.nn.Module):
    """Transformers computes the rotation in float32, whatever the model's dtype; the oracle does not."""

    def __init__(self, config):
        super().__init__()
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        self.frequencies = config.rope_parameters["rope_theta"] ** -exponents

    def forward(self, x, position_ids):
        angles = (position_ids[..., None] * self.frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()
