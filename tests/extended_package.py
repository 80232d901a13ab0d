"""The laws for the worked examples of docs/extending.md, in a package that has one of them.

Collected by `test_extending.py` in a process of its own, which imports a changed copy of the package.
"""

import os

import oracle
import pytest
import torch
from common import perturb, random_tokens, small_config
from test_generation import GREEDY
from test_modeling_lr_attnres import DoubleRotaryEmbedding, next_token_loss

import lr_attnres
from lr_attnres import LRAttnResForCausalLM
from lr_attnres.analysis.cost import depth_cost
from lr_attnres.analysis.routing import analyze_model
from lr_attnres.depth_routing import depth_block_ends
from lr_attnres.depth_state import DepthBank
from lr_attnres.folders.clean_process import load_in_clean_process, probe_logits


def extended_model(residual_type: str, num_depth_blocks: int | None, **switches) -> LRAttnResForCausalLM:
    depth = {"residual_type": residual_type, "num_depth_blocks": num_depth_blocks, "depth_key_rank": 7, **switches}
    return perturb(LRAttnResForCausalLM(small_config("standard", **depth))).eval()


def strided_key(group, value, keys, config):
    stride = config.hidden_size // config.depth_key_rank
    return torch.stack([value[..., i * stride] for i in range(config.depth_key_rank)], dim=-1)


def growing_blocks(written, num_sublayers, num_blocks):
    """Eight sub-layers in three blocks, of 1, 3 and 4."""
    assert (num_sublayers, num_blocks) == (8, 3)
    blocks = [[1], [2, 3, 4], [5, 6, 7, 8]]
    return [[i for i in block if i <= written] for block in blocks if block[0] <= written]


STRIDED = [("strided", 3), ("strided", None)]
GROWING = [("sliced", 3), ("projected", 3), ("attnres", 3)]


def name_of(case: tuple[str, int | None]) -> str:
    return "-".join(map(str, case))


@pytest.fixture(params=STRIDED + GROWING, ids=name_of)
def case(request, monkeypatch) -> tuple[str, int | None]:
    """A variant, and the oracle with the rule that the example changes."""
    assert lr_attnres.__file__.startswith(os.getcwd()), "not the changed copy"
    if request.param in STRIDED:
        monkeypatch.setattr(oracle, "key_of", strided_key)
    else:
        monkeypatch.setattr(oracle, "block_of_sublayers", growing_blocks)
    return request.param


@pytest.mark.parametrize("exponent", [0.0, 0.5])
def test_forward_and_every_gradient_agree_with_the_oracle(case, exponent):
    model, input_ids = extended_model(*case, depth_block_exponent=exponent).double(), random_tokens(2, 11)
    model.model.rotary_emb = DoubleRotaryEmbedding(model.config)
    logits = model(input_ids).logits
    next_token_loss(logits, input_ids).backward()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected, _ = oracle.oracle_forward(model.config, parameters, input_ids)
    next_token_loss(expected, input_ids).backward()

    close = {"rtol": 1e-8, "atol": 1e-9}  # float64 on both sides
    torch.testing.assert_close(logits, expected, **close)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, parameters[name].grad, **close, msg=lambda m, n=name: f"{n}: {m}")
    assert (model.model.depth_queries.weight.grad.abs().sum(-1) > 0).all()


@torch.no_grad()
def test_cached_generation_equals_uncached(case):
    model, tokens = extended_model(*case).double(), random_tokens(2, 5)
    assert isinstance(model.model.start_depth_state(torch.zeros(2, 1, 32).double()), DepthBank)
    generated = model.generate(tokens, **GREEDY)
    for _ in range(GREEDY["max_new_tokens"]):
        with torch.enable_grad():  # so few tokens without gradients would be read from a bank as well
            logits = model(tokens).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, tokens)


@torch.no_grad()
@pytest.mark.parametrize("case", [STRIDED[0], GROWING[0]], ids=name_of, indirect=True)
def test_a_saved_folder_loads_where_the_package_is_absent(case, tmp_path):
    model = extended_model(*case)
    model.save_pretrained(tmp_path)
    loaded = LRAttnResForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.residual_type == case[0]
    found, expected = load_in_clean_process(tmp_path), probe_logits(model)
    assert not found["missing_weights"] and not found["unexpected_weights"]
    assert torch.equal(probe_logits(loaded), expected)
    torch.testing.assert_close(found["output"], expected)  # another process may split the work over threads


def test_costs_and_diagnostics_know_it(case):
    model, tokens = extended_model(*case), random_tokens(2, 9)
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(9).expand(2, -1)}
    analysis = analyze_model(model, [batch])
    sources = [len(site[~site.isnan()]) for site in analysis.tensors["depth_weights"]]
    cost = depth_cost(model.config)
    assert sum(sources) == cost.source_reads and max(sources) == cost.retained_sources
    assert cost.kernel_macs == sum(sources) * (32 + model.config.depth_key_rank)
    assert cost.added_parameters == model.num_parameters() - extended_model("standard", None).num_parameters()
    assert analysis.block_ends == depth_block_ends(8, case[1])
