"""`torch.compile` and `torch.export`: the same results, and no more graphs than said."""

import copy

import pytest
import torch
from common import ROUTED_TYPES, VARIANTS, random_tokens, small_model
from test_modeling_lr_attnres import FLOAT32, gradients, loss_gradients
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AttentionInterface


@pytest.fixture
def fresh_compiler():
    """The limit of recompilations counts per process, not per model."""
    torch.compiler.reset()


@pytest.mark.compatibility("`torch.compile`, whole model, training")
@pytest.mark.parametrize(
    "variant, backend",
    [
        ("standard", "aot_eager"),
        ("attnres_block", "aot_eager"),
        ("projected_full", "aot_eager"),
        ("sliced_block", "aot_eager"),
        ("sliced_block_heads", "aot_eager"),
        ("sliced_block", "inductor"),  # what training compiles with: a minute each
    ],
)
def test_compiles_without_graph_breaks(variant, backend, fresh_compiler):
    model, input_ids = small_model(variant, num_hidden_layers=2), random_tokens(2, 11)
    expected, weights = model(input_ids).logits, model(input_ids, output_depth_weights=True).depth_weights
    gradient = loss_gradients(model, input_ids)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(input_ids).logits, expected, **FLOAT32)
    for ours, theirs in zip(compiled(input_ids, output_depth_weights=True).depth_weights, weights):
        torch.testing.assert_close(ours, theirs, **FLOAT32)
    model.zero_grad()
    compiled(input_ids, labels=input_ids).loss.backward()
    for name, ours in gradients(model).items():
        torch.testing.assert_close(ours, gradient[name], **FLOAT32)


@pytest.mark.parametrize("variant", ["standard", "projected_full", "sliced_block"])
def test_one_graph_serves_all_layers_and_lengths(variant, fresh_compiler):
    """The second length is compiled once more, for any length."""
    model, counter = small_model(variant), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (9, 11, 13, 24):
        input_ids = random_tokens(2, length)
        compiled(input_ids, labels=input_ids, use_cache=False).loss.backward()
    assert counter.frame_count == 2


@pytest.mark.compatibility("`torch.compile`, whole model, inference")
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_for_inference_without_graph_breaks(variant, fresh_compiler):
    model, input_ids = small_model(variant), random_tokens(2, 11)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected = model(input_ids).logits
        torch.testing.assert_close(compiled(input_ids).logits, expected, **FLOAT32)
    model.requires_grad_(False)
    torch.testing.assert_close(compiled(input_ids).logits, expected, **FLOAT32)


@pytest.mark.compatibility("`torch.compile`, layer by layer: `model.compile_layers()`")
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_graphs_serve_any_depth(variant, fresh_compiler):
    """One for attention and one for the feed-forward modules, and once more for any length of text."""
    for num_layers in (2, 5):
        model, counter = small_model(variant, num_hidden_layers=num_layers), CompileCounterWithBackend("eager")
        expected = copy.deepcopy(model)
        model.compile_layers(fullgraph=True, backend=counter)
        for length in (9, 11):
            input_ids = random_tokens(2, length)
            losses = [each(input_ids, labels=input_ids, use_cache=False).loss for each in (model, expected)]
            torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
        assert counter.frame_count == 4
        for parameter, same in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, same.grad, **FLOAT32)
        assert model.state_dict().keys() == expected.state_dict().keys()
        torch.compiler.reset()


@pytest.mark.compatibility("`torch.compile` of each whole layer", refused=ROUTED_TYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_compiled_one_by_one(variant, fresh_compiler):
    """One graph serves every layer of `standard`. Routed layers have a graph each, until the compiler gives up."""
    model, input_ids = small_model(variant, num_hidden_layers=3), random_tokens(2, 40)  # too many for a bank
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        if variant == "standard":
            model(input_ids, use_cache=False)
        else:
            with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
                model(input_ids, use_cache=False)


def engine_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """Like vLLM's: Transformers makes no mask for an attention that it does not know."""
    assert attention_mask is None
    causal = {"is_causal": True, "enable_gqa": True}
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling, **causal).transpose(
        1, 2
    ), None


@torch.no_grad()
@pytest.mark.parametrize("variant", ["standard", "sliced_block", "sliced_block_heads"])
def test_compiles_for_an_unbacked_number_of_tokens(variant, monkeypatch):
    """vLLM can trace with unbacked sizes: code that compares such a size with 1, to choose a path, does not trace."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "engine", engine_attention)
    # torch's own RMSNorm does not trace over the heads of an unbacked number of tokens; vLLM replaces it
    model, tokens = small_model(variant, qk_norm=False).model, random_tokens(1, 11)
    expected = model(tokens, use_cache=False).last_hidden_state
    model.set_attn_implementation("engine")
    torch._dynamo.decorators.mark_unbacked(tokens, 1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens, use_cache=False).last_hidden_state, expected, **FLOAT32)


@pytest.mark.compatibility("`torch.export`, any number of rows and tokens")
@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_exports(variant):
    """For any number of rows and tokens."""
    model, other = small_model(variant, num_hidden_layers=2), random_tokens(3, 6)
    shapes = {"input_ids": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}, "use_cache": None}
    inputs = {"input_ids": random_tokens(2, 11), "use_cache": False}
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)
    exported = program.module()(input_ids=other, use_cache=False)
    torch.testing.assert_close(exported.logits, model(other).logits, **FLOAT32)
