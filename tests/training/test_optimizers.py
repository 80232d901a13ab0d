"""MuonAdamW equals Muon and AdamW step by step, and is one ordinary optimizer for schedulers and checkpoints."""

import copy
import io

import pytest
import torch
from common import VARIANTS, random_tokens, small_model
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

from lr_attnres.training.optimizers import MatrixMuon, MuonAdamW, muon_adamw, muon_adamw_factory, split_parameters


def backward(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    tokens = random_tokens(2, 9)
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()


def train(model, optimizer, steps: range, scheduler=None) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_equal(model, other) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(parameter, expected), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_is_in_exactly_one_group(variant):
    model = small_model(variant, tie_word_embeddings=variant == "sliced_full")
    names = split_parameters(model)
    optimizer = muon_adamw(model)
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    assert [group["name"] for group in optimizer.param_groups] == [group for group in names if names[group]]
    assert len(names["muon"]) == 7 * model.config.num_hidden_layers
    assert all(name.startswith("model.layers.") and "norm" not in name for name in names["muon"])
    assert names["queries"] == ([] if variant == "standard" else ["model.depth_queries.weight"])
    assert ("model.depth_embedding_key.weight" in names["adamw"]) == variant.startswith("projected")
    for group in optimizer.param_groups:
        assert (group["lr"], group["weight_decay"]) == ((1e-3, 0.1) if group["name"] == "muon" else (3e-4, 0.0))


def test_equals_two_optimizers():
    model = small_model("projected_block")
    other = copy.deepcopy(model)
    optimizer = muon_adamw(model, lr_muon=0.02, lr_adamw=0.01, lr_queries=0.1, momentum=0.9, weight_decay=0.2)
    names, parameters = split_parameters(other), dict(other.named_parameters())
    groups = {name: [parameters[parameter] for parameter in names[name]] for name in names}
    references = [
        MatrixMuon(groups["muon"], lr=0.02, momentum=0.9, weight_decay=0.2),
        AdamW(groups["adamw"], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0),
        AdamW(groups["queries"], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        backward(other, step)
        for reference in references:
            reference.step()
    assert_equal(model, other)


def test_state_survives_exactly():
    """Two steps, saved and loaded into a fresh pair, two more: the same as four, with a schedule on top."""

    def schedule(optimizer):
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))

    model = small_model()
    optimizer = muon_adamw(model, lr_queries=0.1)
    scheduler = schedule(optimizer)
    train(model, optimizer, range(2), scheduler)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    train(model, optimizer, range(2, 4), scheduler)

    file.seek(0)
    states = torch.load(file, weights_only=True)
    other = small_model()
    resumed = muon_adamw(other)
    resumed_schedule = schedule(resumed)
    for part, state in zip((other, resumed, resumed_schedule), states):
        part.load_state_dict(state)
    train(other, resumed, range(2, 4), resumed_schedule)
    assert [group["lr"] for group in resumed.param_groups] == pytest.approx([1e-3 / 5, 3e-4 / 5, 0.1 / 5])
    assert_equal(model, other)


def test_copies_are_independent():
    model = small_model()
    optimizer = muon_adamw(model)
    train(model, optimizer, range(1))
    other, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(1, 3))
    train(other, copied, range(1, 3))
    assert_equal(model, other)


def test_muon_on_a_cpu_is_exact():
    """One step from zero momentum moves along U p(S) V^T, p the quintic applied five times; bfloat16 is near it."""
    gradient = torch.randn(6, 10, dtype=torch.float64)
    moved = {}
    for optimizer_class, dtype in ((MatrixMuon, torch.float64), (MatrixMuon, torch.float32), (Muon, torch.float32)):
        weight = torch.nn.Parameter(torch.zeros(6, 10, dtype=dtype))
        weight.grad = gradient.to(dtype)
        optimizer_class([weight], lr=1.0, weight_decay=0.0).step()
        moved[optimizer_class, dtype] = -weight.detach().double()
    left, singular, right = torch.linalg.svd(gradient, full_matrices=False)
    singular = singular / singular.norm()
    for _ in range(5):
        singular = 3.4445 * singular - 4.7750 * singular**3 + 2.0315 * singular**5
    expected = left @ singular.diag() @ right
    torch.testing.assert_close(moved[MatrixMuon, torch.float64], expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(moved[MatrixMuon, torch.float32], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(moved[Muon, torch.float32], expected, atol=0.1, rtol=0)  # 8 bits, 15 products


def test_frozen_parameters_are_left_out_and_a_group_can_be_added():
    model = small_model()
    model.model.layers[0].requires_grad_(False)
    optimizer = muon_adamw_factory()(model, lr_muon=0.5)
    assert len(optimizer.param_groups[0]["params"]) == 7 * (model.config.num_hidden_layers - 1)
    weight = model.model.layers[0].mlp.up_proj.weight.requires_grad_()
    optimizer.add_param_group({"params": [weight], "algorithm": "muon", "lr": 0.25})
    before = weight.detach().clone()
    train(model, optimizer, range(1))
    assert not torch.equal(weight, before) and optimizer.param_groups[-1]["momentum"] == 0.95


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="Embedding has no trainable 2-D weight inside `layers` for Muon"):
        muon_adamw(torch.nn.Embedding(3, 4))
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="`algorithm` of a group is 'sgd'"):
        MuonAdamW([{"params": [weight], "algorithm": "sgd"}])
    with pytest.raises(ValueError, match="more than one parameter group"):
        MuonAdamW([{"params": [weight], "algorithm": name} for name in ("muon", "adamw")])
    with pytest.raises(ValueError, match="only supports 2D"):
        MuonAdamW([{"params": [torch.nn.Parameter(torch.zeros(3))], "algorithm": "muon"}])
    model = small_model()
    state = muon_adamw(model).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        muon_adamw(small_model("standard")).load_state_dict(state)
