"""The chunked loss equals the plain one, in value and gradients, for any wrapper of the model."""

import copy

import pytest
import torch
from common import ONE_OF_EACH, VARIANTS, random_tokens, small_model
from compatibility import RESIDUAL_TYPES
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs

from lr_attnres.training.losses import chunked_cross_entropy, use_chunked_loss


def plain(hidden, weight, targets, z_loss=0.0, num_items=None):
    logits = (hidden @ weight.t()).reshape(-1, len(weight))
    logits, targets = logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.reshape(-1)
    counted = targets != -100
    lse = logits.logsumexp(-1)
    total = nn.functional.cross_entropy(logits, targets, reduction="sum") + z_loss * lse[counted].square().sum()
    return total / (counted.sum() if num_items is None else num_items)


def inputs(dtype=torch.float64, tokens=(3, 7), vocabulary=19, hidden=5):
    targets = torch.randint(0, vocabulary, tokens)
    targets[0, ::3] = -100
    weight = torch.randn(vocabulary, hidden, dtype=dtype, requires_grad=True)
    return torch.randn(*tokens, hidden, dtype=dtype, requires_grad=True), weight, targets


def gradients(loss, *parameters):
    return torch.autograd.grad(loss, parameters)


@pytest.mark.parametrize("chunk_size", [1, 4, 21, 1000, None])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("num_items", [None, 40, torch.tensor(40)], ids=["mean", "int", "tensor"])
def test_equals_plain_cross_entropy(chunk_size, z_loss, num_items):
    hidden, weight, targets = inputs()
    ours = chunked_cross_entropy(hidden, weight, targets, z_loss, chunk_size, num_items)
    expected = plain(hidden, weight, targets, z_loss, num_items)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
    for one, other in zip(gradients(ours, hidden, weight), gradients(expected, hidden, weight)):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_gradcheck():
    hidden, weight, targets = inputs()
    assert torch.autograd.gradcheck(lambda h, w: chunked_cross_entropy(h, w, targets, 0.1, 4), (hidden, weight))


def test_a_second_backward_over_the_same_graph():
    hidden, weight, targets = inputs()
    loss = chunked_cross_entropy(hidden, weight, targets, 0.1, 4)
    (3 * loss).backward(retain_graph=True)
    first = weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, first * 4 / 3)


def test_nothing_counted_is_nan_as_in_transformers():
    hidden, weight, targets = inputs()
    assert chunked_cross_entropy(hidden, weight, torch.full_like(targets, -100)).isnan()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient(frozen):
    hidden, weight, targets = inputs()
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    chunked_cross_entropy(hidden, weight, targets, 0.1, 4).backward()
    assert (hidden.grad is None) == (frozen == "hidden") and (weight.grad is None) == (frozen == "weight")


def test_bfloat16_accumulates_in_float32():
    """300 chunks of one token each: sums kept in bfloat16 would be off by far more than one rounding."""
    hidden, weight, targets = inputs(torch.bfloat16, tokens=(1, 300))
    ours = chunked_cross_entropy(hidden, weight, targets, 0.1, 1)
    assert ours.dtype == torch.float32
    expected = plain(hidden.double(), weight.double(), targets, 0.1)
    torch.testing.assert_close(ours.double(), expected, rtol=5e-3, atol=0)  # logits are bfloat16 on CPU
    ours, expected = gradients(ours, weight)[0], gradients(expected, weight)[0]
    assert ours.dtype == torch.bfloat16
    assert (ours - expected).float().norm() < 5e-3 * expected.float().norm()


def test_autocast_keeps_the_gradient_of_float32_weights():
    hidden, weight, targets = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = chunked_cross_entropy(hidden, weight, targets, 0.1, 4)
    expected = plain(hidden.bfloat16(), weight.bfloat16(), targets, 0.1)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)
    gradient = gradients(ours, weight)[0]
    assert gradient.dtype == torch.float32
    assert not torch.equal(gradient, gradient.bfloat16().float())  # never rounded to bfloat16
    assert (gradient - gradients(expected, weight)[0]).norm() < 1e-2 * gradient.norm()


CLOSE = {"atol": 1e-5, "rtol": 1e-4}  # float32 sums in another order


def compare(model, changed=None, **inputs):
    """Loss and every gradient of a model with its plain loss, and of a copy with the chunked one."""
    chunked = copy.deepcopy(model) if changed is None else changed
    use_chunked_loss(chunked, chunk_size=4)
    expected, ours = model(**inputs), chunked(**inputs)
    assert ours.logits is None and expected.logits is not None
    torch.testing.assert_close(ours.loss, expected.loss)
    expected.loss.backward()
    ours.loss.backward()
    grads = {name.replace("_orig_mod.", ""): parameter.grad for name, parameter in chunked.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.compatibility("Chunked loss")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_model(variant, tied, checkpointing):
    model = small_model(variant, tie_word_embeddings=tied).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    input_ids = random_tokens(2, 9)
    labels = input_ids.clone()
    labels[0, 3:5] = -100
    compare(model, input_ids=input_ids, labels=labels, num_items_in_batch=torch.tensor(21))


def test_without_labels_the_model_is_as_before():
    model, input_ids = small_model(), random_tokens(2, 9)
    before = model(input_ids).logits
    use_chunked_loss(model)
    torch.testing.assert_close(model(input_ids).logits, before, rtol=0, atol=0)
    assert model.generate(input_ids, max_new_tokens=2).shape[1] >= 10


def test_compiled():
    model, input_ids = small_model("standard", num_hidden_layers=1), random_tokens(2, 9)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    compare(model, compiled, input_ids=input_ids, labels=input_ids, use_cache=False)


def test_compiled_makes_the_logits_once():
    """Of each chunk: the logits, and the gradients of the hidden states and of the weight."""
    graphs = AotEagerAndRecordGraphs()
    hidden, weight, targets = inputs(torch.float32, tokens=(1, 8))
    torch.compile(chunked_cross_entropy, backend=graphs, fullgraph=True)(hidden, weight, targets, 0.1, 4).backward()
    nodes = [node for graph in (*graphs.fw_graphs, *graphs.bw_graphs) for node in graph.graph.nodes]
    products = [node for node in nodes if node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)]
    assert len(products) == 2 * 3
    torch.testing.assert_close(weight.grad, gradients(plain(hidden, weight, targets, 0.1), weight)[0], **CLOSE)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_compiled_with_frozen_inputs(frozen):
    """As beside an adapter, where the head is not trained."""
    hidden, weight, targets = inputs(torch.float32)
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    trained = weight if frozen == "hidden" else hidden
    compiled = torch.compile(chunked_cross_entropy, backend="aot_eager", fullgraph=True)
    ours = gradients(compiled(hidden, weight, targets, 0.1, 4), trained)[0]
    torch.testing.assert_close(ours, gradients(plain(hidden, weight, targets, 0.1), trained)[0], **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden, weight, targets, 0.1, 4), plain(hidden, weight, targets, 0.1))


def test_lora_beside_the_head():
    torch.manual_seed(0)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    model, input_ids = get_peft_model(small_model(), lora), random_tokens(2, 9)
    compare(model, input_ids=input_ids, labels=input_ids)


@pytest.mark.compatibility("PEFT: LoRA on the head with the chunked loss", refused=RESIDUAL_TYPES)
@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_lora_on_the_head_is_refused(variant):
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"])
    model = get_peft_model(small_model(variant), lora)
    with pytest.raises(ValueError, match="`lm_head` is a Linear.*leave it out of the adapter"):
        use_chunked_loss(model)
    base = small_model(variant)
    use_chunked_loss(base)
    model, input_ids = get_peft_model(base, lora), random_tokens(2, 9)
    with pytest.raises(ValueError, match="leave it out of the adapter"):
        model(input_ids=input_ids, labels=input_ids)


def test_a_partitioned_head_is_refused():
    model = small_model()
    model.lm_head.weight.data = torch.empty(0)  # what ZeRO stage 3 leaves of it
    with pytest.raises(ValueError, match="ZeRO stage 3"):
        use_chunked_loss(model)


@pytest.mark.parametrize("options", [{"z_loss": -1.0}, {"z_loss": float("nan")}, {"chunk_size": 0}], ids=str)
def test_bad_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        use_chunked_loss(small_model(), **options)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="LRAttnResForCausalLM"):
        use_chunked_loss(nn.Linear(2, 2))
