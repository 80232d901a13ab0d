"""The laws of the model, for every variant, with all parameters (queries too) away from their initial values."""

from collections import Counter

import pytest
import torch
from common import ROUTED, ROUTED_TYPES, SIZES, VARIANTS, perturb, random_tokens, small_config, small_model
from oracle import oracle_forward
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from lr_attnres import (
    LRAttnResConfig,
    LRAttnResForCausalLM,
    LRAttnResForQuestionAnswering,
    LRAttnResForSequenceClassification,
    LRAttnResForTokenClassification,
    LRAttnResModel,
)
from lr_attnres.depth_routing import depth_block_ends


pytestmark = pytest.mark.law
# Two float32 evaluations in a different order. With weights this large one rounding (6e-8) of every weight moves the
# logits, which are of size 1, by up to 4e-5; a leak or a wrong source moves them by 0.1 and more.
FLOAT32 = {"atol": 1e-4, "rtol": 1e-4}


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
HEADS = [
    {"residual_type": kind, "num_depth_blocks": blocks, "depth_heads": 3, "depth_key_rank": 21, **switch}
    for kind, blocks, switch in [
        ("attnres", None, {"depth_key_rank": 63}),
        ("attnres", 3, {"depth_key_rank": 63, "depth_key_norm": False}),
        ("projected", None, {}),
        ("projected", None, {"depth_key_norm": False}),
        ("projected", 3, {"depth_key_rank": 3}),
        ("projected", 4, {"depth_query_norm": True, "depth_block_exponent": 0.5, "depth_count_prior": 1.0}),
        ("sliced", None, {}),
        ("sliced", 3, {"depth_block_exponent": 0.5, "depth_key_norm": False}),
        ("sliced", 7, {"depth_query_norm": True, "depth_logit_scale": 0.3}),
        ("sliced", 3, {"depth_heads": 9, "depth_key_rank": 45}),
        ("sliced", 4, {"depth_heads": 63, "depth_key_rank": 63}),
    ]
]
ORACLE_CASES = [{"residual_type": "standard"}, {"residual_type": "standard", "norm_weight": True, "qk_norm": False}]
ORACLE_CASES += [
    {"residual_type": kind, "num_depth_blocks": blocks} for kind in ROUTED_TYPES for blocks in BLOCK_COUNTS
]
ORACLE_CASES += [
    {"residual_type": kind, "num_depth_blocks": 3, **switch}
    for kind in ROUTED_TYPES
    if kind != "attnres"  # has no rank of its own
    for switch in SWITCHES
]
# Odd numbers of rows, tokens, heads, and coordinates of a head's value and key.
ORACLE_CASES += [
    pytest.param(
        {"hidden_size": 63, "head_dim": 16, **fields},
        marks=pytest.mark.compatibility("Depth heads: forward and every gradient", parameter="fields"),
    )
    for fields in HEADS
]


@pytest.mark.compatibility("Forward and every gradient against a float64 oracle", parameter="fields")
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

    close = {"rtol": 1e-8, "atol": 1e-9}  # float64 on both sides, gradients of size 0.001 to 1
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


# Parameter counts and structure


def count_at_paper_size(**fields) -> int:
    with torch.device("meta"):
        return LRAttnResForCausalLM(LRAttnResConfig(**fields)).num_parameters()


def test_parameter_counts_at_the_paper_size():
    baseline = 513_648_640
    assert count_at_paper_size(residual_type="standard") == baseline
    assert count_at_paper_size(residual_type="attnres") == 513_697_792
    assert count_at_paper_size(residual_type="projected", depth_key_rank=32) == 516_632_064 == baseline + 2_983_424
    assert count_at_paper_size(residual_type="sliced", depth_key_rank=32) == baseline + 1_536
    assert count_at_paper_size() == baseline + 48 * 64


@pytest.mark.parametrize("blocks, reads", [(None, 1224), (4, 168), (8, 264), (16, 456)])
def test_source_reads_at_the_paper_depth(blocks, reads):
    ends = depth_block_ends(48, blocks)
    assert sum(1 + sum(end <= site for end in ends) + (site not in ends) for site in range(1, 49)) == reads


def test_block_ends():
    assert depth_block_ends(8, 3) == [3, 6, 8]
    assert depth_block_ends(10, 4) == [3, 5, 8, 10]
    assert depth_block_ends(6, 1) == [6]
    assert depth_block_ends(6, 6) == depth_block_ends(6, None) == depth_block_ends(6, 99) == [1, 2, 3, 4, 5, 6]


def test_projected_emits_value_and_key_with_one_gemm():
    model = small_model("projected_block")
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    layer = model.model.layers[0]
    assert layer.self_attn.o_proj.out_features == layer.mlp.down_proj.out_features == 32 + 8
    assert [name for name in names if "depth" in name] == ["model.depth_embedding_key"]


def test_sliced_adds_only_queries():
    sliced, standard = small_model("sliced_full").state_dict(), small_model("standard").state_dict()
    assert set(sliced) - set(standard) == {"model.depth_queries.weight"}
    assert all(sliced[name].shape == standard[name].shape for name in standard)


# Laws of routing


@pytest.mark.parametrize("variant", ROUTED)
def test_zero_queries_are_the_ordinary_transformer(variant):
    model = small_model(variant)
    config = model.config
    standard = small_model("standard", norm_weight=config.norm_weight, rms_norm_eps=config.rms_norm_eps)
    with torch.no_grad():
        model.model.depth_queries.weight.zero_()
    # `projected` has the rows of the keys below those of the value.
    shared = {name: model.state_dict()[name][: tensor.shape[0]] for name, tensor in standard.state_dict().items()}
    standard.load_state_dict(shared)
    input_ids = random_tokens(2, 11)
    # A read is followed by RMSNorm, which drops the factor 1 / sources up to eps.
    torch.testing.assert_close(model(input_ids).logits, standard(input_ids).logits, **FLOAT32)


@pytest.mark.parametrize("variant", ROUTED)
def test_zero_queries_read_the_mean_of_the_sources(variant):
    model = LRAttnResForCausalLM(small_config(variant)).eval()  # fresh from initialisation
    assert not model.model.depth_queries.weight.any()
    for weights in model(random_tokens(2, 5), output_depth_weights=True).depth_weights:
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / weights.shape[-1]))


@pytest.mark.parametrize("variant", ROUTED)
def test_site_0_is_the_identity(variant):
    model = small_model(variant)
    seen = {}
    model.model.layers[0].input_layernorm.register_forward_pre_hook(lambda _, args: seen.update(hidden=args[0]))
    input_ids = random_tokens(2, 5)
    model(input_ids)
    assert torch.equal(seen["hidden"], model.model.embed_tokens(input_ids))


@pytest.mark.parametrize("kind", ROUTED_TYPES)
@pytest.mark.parametrize("blocks", [8, 9, 64])
def test_as_many_blocks_as_sublayers_are_the_full_set(kind, blocks):
    full = small_model("standard", residual_type=kind, num_depth_blocks=None)
    block = small_model("standard", residual_type=kind, num_depth_blocks=blocks)
    block.load_state_dict(full.state_dict())
    input_ids = random_tokens(2, 11)
    assert torch.equal(full(input_ids).logits, block(input_ids).logits)


@pytest.mark.parametrize("blocks", [None, 3])
def test_sliced_keys_of_full_rank_are_attnres(blocks):
    attnres = small_model("standard", residual_type="attnres", num_depth_blocks=blocks)
    sliced = small_model("standard", residual_type="sliced", num_depth_blocks=blocks, depth_key_rank=32)
    sliced.load_state_dict(attnres.state_dict())
    input_ids = random_tokens(2, 11)
    assert torch.equal(attnres(input_ids).logits, sliced(input_ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("kind, blocks", [("attnres", None), ("attnres", 3), ("projected", None), ("projected", 3)])
def test_depth_heads_permuted_with_their_slices_permute_nothing_else(kind, blocks):
    """A head is its slice of values, keys and queries. (Of `sliced` keys only those of full rank move with values.)"""
    heads = {"residual_type": kind, "num_depth_blocks": blocks, "depth_heads": 4}
    model, permuted = (small_model("standard", **heads) for _ in range(2))
    input_ids, order, rank = random_tokens(2, 11), torch.tensor([2, 0, 3, 1]), model.config.depth_key_rank
    values, keys = (torch.arange(size).view(4, -1)[order].flatten() for size in (32, rank))
    both = torch.cat([values, 32 + keys])
    state = model.state_dict()
    for name, tensor in state.items():
        if "depth_queries" in name:
            state[name] = tensor[:, keys]
        elif "depth_embedding_key" in name:
            state[name] = tensor[keys][:, values]
        elif "o_proj" in name or "down_proj" in name:
            state[name] = tensor[both if kind == "projected" else values]
        else:  # reads hidden states: embedding, head, the other projections
            state[name] = tensor[:, values]
    permuted.load_state_dict(state)
    weights, weights_permuted = (m(input_ids, output_depth_weights=True).depth_weights for m in (model, permuted))
    for ours, theirs in zip(weights, weights_permuted):
        torch.testing.assert_close(theirs, ours[:, :, order], **FLOAT32)
        assert (ours[:, :, 1:] - ours[:, :, :1]).abs().max() > 0.01  # heads differ
    torch.testing.assert_close(permuted(input_ids).logits, model(input_ids).logits, **FLOAT32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient_at_initialisation(variant):
    model = LRAttnResForCausalLM(small_config(variant))
    for name, gradient in loss_gradients(model, random_tokens(2, 11)).items():
        # With uniform routing a key has no influence before its query moves.
        is_key_row = "depth_embedding_key" in name
        assert is_key_row or gradient.abs().sum() > 0, name
    if variant != "standard":
        assert (model.model.depth_queries.weight.grad.abs().sum(-1) > 0).all()


# Outputs


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_have_fixed_arity_and_do_not_change_the_logits(variant):
    model = small_model(variant)
    model.set_attn_implementation("eager")
    input_ids = random_tokens(2, 7)
    outputs = model(input_ids, output_hidden_states=True, output_attentions=True, output_depth_weights=True)
    assert torch.equal(outputs.logits, model(input_ids).logits)
    assert [tuple(h.shape) for h in outputs.hidden_states] == [(2, 7, 32)] * 5
    assert [tuple(a.shape) for a in outputs.attentions] == [(2, 4, 7, 7)] * 4
    assert torch.equal(outputs.hidden_states[0], model.model.embed_tokens(input_ids))
    assert model(input_ids).depth_weights is None
    model.config.output_depth_weights = True
    assert len(model(input_ids).depth_weights) == len(outputs.depth_weights)
    if variant == "standard":
        assert outputs.depth_weights == ()
        return
    ends = depth_block_ends(8, VARIANTS[variant]["num_depth_blocks"])
    sources = [1 + sum(end <= site for end in ends) + (site not in ends) for site in range(1, 9)]
    assert [w.shape[-1] for w in outputs.depth_weights] == sources
    for weights in outputs.depth_weights:
        heads = VARIANTS[variant].get("depth_heads", 1)
        torch.testing.assert_close(weights.sum(-1), torch.ones((2, 7) if heads == 1 else (2, 7, heads)))


class OperatorCounter(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **kwargs or {})


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_depth_weights_cost_nothing_when_off(variant):
    """Not asked for, they run no operator, before or after a forward that was; asked for, a softmax per site."""
    model, input_ids = small_model(variant), random_tokens(2, 40)  # fewer tokens are read from a bank
    model(input_ids)  # the constants of the norms are made once per process
    runs = []
    for asked in (False, True, False):
        with OperatorCounter() as counter:
            model(input_ids, output_depth_weights=asked)
        runs.append(counter.counts)
    assert runs[0] == runs[2]
    added = runs[1] - runs[0]
    num_sites = 0 if variant == "standard" else 8
    assert added["aten._softmax.default"] == num_sites and not runs[0] - runs[1]
    assert not any("mm" in name for name in added)


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
@pytest.mark.parametrize("variant", ROUTED)
def test_depth_weights_while_training(variant, checkpointing):
    """The same weights, once per site, and the same gradients as a step that does not ask for them."""
    model, input_ids = small_model(variant).train(), random_tokens(2, 11)
    expected_weights = model(input_ids, output_depth_weights=True).depth_weights
    expected = loss_gradients(model, input_ids)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    model.zero_grad()
    outputs = model(input_ids, labels=input_ids, use_cache=False, output_depth_weights=True)
    outputs.loss.backward()
    assert len(outputs.depth_weights) == len(expected_weights) == 8
    for ours, theirs in zip(outputs.depth_weights, expected_weights):
        torch.testing.assert_close(ours, theirs, **FLOAT32)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], **FLOAT32, msg=lambda m, n=name: f"{n}: {m}")


def test_logits_to_keep():
    model, input_ids = small_model(), random_tokens(2, 9)
    logits = model(input_ids).logits
    torch.testing.assert_close(model(input_ids, logits_to_keep=2).logits, logits[:, -2:], **FLOAT32)
    kept, of_each_row, mask = torch.tensor([0, 4]), torch.tensor([[0, 4, 5], [8, 1, 1]]), input_ids % 2 == 0
    torch.testing.assert_close(model(input_ids, logits_to_keep=kept).logits, logits[:, kept], **FLOAT32)
    expected = torch.stack([logits[0, [0, 4, 5]], logits[1, [8, 1, 1]]])
    torch.testing.assert_close(model(input_ids, logits_to_keep=of_each_row).logits, expected, **FLOAT32)
    torch.testing.assert_close(model(input_ids, logits_to_keep=mask).logits, logits[mask], **FLOAT32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_inputs_embeds(variant):
    model, input_ids = small_model(variant), random_tokens(2, 9)
    embeds = model.get_input_embeddings()(input_ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(input_ids).logits)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model(input_ids, inputs_embeds=embeds)


@torch.no_grad()
def test_heads():
    """Each puts the hidden states of the bare model through its own weights."""
    input_ids, labels = random_tokens(2, 9), torch.tensor([0, 2])
    input_ids[0, 6:] = SIZES["pad_token_id"]  # so that the last token of the first row is its sixth
    cross_entropy = torch.nn.functional.cross_entropy

    def states_of(model: torch.nn.Module) -> torch.Tensor:
        bare = LRAttnResModel(model.config).eval()
        bare.load_state_dict(model.model.state_dict())
        return bare(input_ids).last_hidden_state

    model = small_model(model_class=LRAttnResForSequenceClassification, num_labels=3)
    outputs, last = model(input_ids, labels=labels), states_of(model)[torch.arange(2), [5, 8]]
    torch.testing.assert_close(outputs.logits, last @ model.score.weight.T)
    torch.testing.assert_close(outputs.loss, cross_entropy(outputs.logits, labels))

    model = small_model(model_class=LRAttnResForTokenClassification, num_labels=3)
    outputs = model(input_ids, labels=input_ids % 3)
    torch.testing.assert_close(outputs.logits, states_of(model) @ model.score.weight.T + model.score.bias)
    torch.testing.assert_close(outputs.loss, cross_entropy(outputs.logits.flatten(0, 1), (input_ids % 3).flatten()))
    assert model.dropout.p == 0.1  # as Transformers' own heads take it
    for rate, expected in {None: 0.1, 0.0: 0.0, 0.5: 0.5}.items():
        config = small_config(classifier_dropout=rate)
        assert LRAttnResForTokenClassification(config).dropout.p == expected

    model, starts, ends = small_model(model_class=LRAttnResForQuestionAnswering), torch.tensor([1, 2]), labels + 3
    outputs = model(input_ids, start_positions=starts, end_positions=ends)
    expected = states_of(model) @ model.qa_outputs.weight.T + model.qa_outputs.bias
    torch.testing.assert_close(torch.stack([outputs.start_logits, outputs.end_logits], dim=-1), expected)
    loss = (cross_entropy(outputs.start_logits, starts) + cross_entropy(outputs.end_logits, ends)) / 2
    torch.testing.assert_close(outputs.loss, loss)


# Masks and documents


@pytest.mark.compatibility("`eager`, `sdpa`, `flex_attention`: padding")
@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_left_and_right_padding_change_nothing(variant, implementation):
    model, input_ids = small_model(variant), random_tokens(1, 6)
    expected = model(input_ids).logits
    model.set_attn_implementation(implementation)
    pad, mask = torch.zeros(1, 3, dtype=torch.long), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    left = model(torch.cat([pad, input_ids], 1), attention_mask=mask, position_ids=positions).logits[:, 3:]
    right = model(torch.cat([input_ids, pad], 1), attention_mask=mask.flip(1)).logits[:, :6]
    torch.testing.assert_close(left, expected, **FLOAT32)
    torch.testing.assert_close(right, expected, **FLOAT32)


@pytest.mark.compatibility("`eager`, `sdpa`, `flex_attention`: packed documents")
@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_do_not_leak(variant, implementation):
    model, first, second = small_model(variant), random_tokens(1, 5), random_tokens(1, 7)
    expected = torch.cat([model(first).logits, model(second).logits], dim=1)
    model.set_attn_implementation(implementation)
    packed = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    for cache in ({"use_cache": False}, {"use_cache": True}, {"past_key_values": DynamicCache()}):
        torch.testing.assert_close(model(packed, position_ids=positions, **cache).logits, expected, **FLOAT32)


# Training


@pytest.mark.compatibility("Gradient checkpointing, reentrant and not")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_checkpointing_changes_nothing(variant, reentrant):
    model, input_ids = small_model(variant).train(), random_tokens(2, 11)
    expected = loss_gradients(model, input_ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(input_ids, labels=input_ids, use_cache=False, output_depth_weights=True)  # a captured forward works too
    for name, gradient in loss_gradients(model, input_ids, use_cache=False).items():
        torch.testing.assert_close(gradient, expected[name], **FLOAT32, msg=lambda m, n=name: f"{n}: {m}")


def test_num_items_in_batch_sets_the_mean():
    model, input_ids = small_model(), random_tokens(2, 11)
    loss = model(input_ids, labels=input_ids).loss
    doubled = model(input_ids, labels=input_ids, num_items_in_batch=40).loss
    torch.testing.assert_close(doubled * 2, loss)


@pytest.mark.compatibility("Tied and resized embeddings")
@pytest.mark.parametrize("variant", VARIANTS)
def test_tied_and_resized_embeddings(variant):
    model = small_model(variant, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    input_ids = random_tokens(1, 5)
    before = model(input_ids).logits
    model.resize_token_embeddings(70)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == 70
    torch.testing.assert_close(model(input_ids).logits[..., :61], before, **FLOAT32)


# Precision


@pytest.mark.compatibility("bfloat16, float16: forward")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision_is_finite_and_close(variant, dtype):
    model, input_ids = LRAttnResForCausalLM(small_config(variant)), random_tokens(2, 11)
    if variant != "standard":
        model.model.depth_queries.weight.data.normal_(std=0.3)
    expected = model(input_ids).logits
    logits = model.to(dtype)(input_ids).logits
    assert logits.dtype == dtype and logits.isfinite().all()
    # Some 40 roundings deep, a random walk of 6 roundings; the softmax of a read can triple it.
    rounding = 2**-9 if dtype == torch.bfloat16 else 2**-12
    error = (logits.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 18 * rounding


@pytest.mark.compatibility("bfloat16 autocast")
@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_is_close_and_trains(variant):
    model, input_ids = LRAttnResForCausalLM(small_config(variant)), random_tokens(2, 11)
    expected = model(input_ids, labels=input_ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(input_ids, labels=input_ids)
    assert outputs.logits.dtype == torch.bfloat16
    torch.testing.assert_close(outputs.loss, expected, atol=0, rtol=2**-8)
    outputs.loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("variant", ROUTED)
def test_depth_logits_and_weights_are_float32_in_a_half_model_and_under_autocast(variant):
    model, input_ids = small_model(variant), random_tokens(2, 11)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(w.dtype == torch.float32 for w in model(input_ids, output_depth_weights=True).depth_weights)
    model.to(torch.bfloat16)
    assert all(w.dtype == torch.float32 for w in model(input_ids, output_depth_weights=True).depth_weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_stay_float32(dtype, tmp_path):
    """Rounded, they would turn far positions too far, and differently before and after saving."""
    model, input_ids = small_model(max_position_embeddings=2048), random_tokens(1, 2000)
    frequencies = model.model.rotary_emb.inv_freq
    model.to(dtype).save_pretrained(tmp_path)
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    loaded = LRAttnResForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert torch.equal(model(input_ids).logits, loaded(input_ids).logits)


def test_a_config_that_asks_for_tuples():
    model, input_ids = small_model(return_dict=False), random_tokens(2, 5)
    loss, logits = model(input_ids, labels=input_ids)[:2]
    assert loss.ndim == 0 and torch.equal(logits, model(input_ids, return_dict=True).logits)


def test_autocast_sums_blocks_in_what_was_emitted_and_reads_float32():
    model, states = small_model("sliced_block"), []
    model.model.layers[-1].register_forward_pre_hook(lambda _, inputs: states.append(inputs[1:]))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(random_tokens(2, 11), output_hidden_states=True)
    assert {hidden.dtype for hidden in outputs.hidden_states[:-1]} == {torch.float32}
    wide = [part for part in states[0] if part.ndim == 3 and part.shape[-1] == model.config.hidden_size]
    assert [part.dtype for part in wide][:2] == [torch.float32, torch.bfloat16]  # the embedding, a block


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_a_half_model_round_once(dtype):
    norm, hidden = small_model().to(dtype).model.norm, (100 * torch.randn(5, 32)).to(dtype)
    exact = torch.nn.functional.rms_norm(hidden.double(), (32,), eps=norm.eps)
    # Half a unit in the last place; squares of float16 would overflow.
    torch.testing.assert_close(norm(hidden).double(), exact, rtol=1.001 * torch.finfo(dtype).eps / 2, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("has_weight", [False, True])
def test_norms_of_inference_are_those_of_training(dtype, has_weight):
    """In inference with few tokens on a CPU other operators compute them: the same numbers but for rounding, the same
    layout. Elsewhere the numbers are the same to the last bit."""
    norm = small_model(norm_weight=has_weight, rms_norm_eps=1e-3).to(dtype).model.norm
    assert type(norm).__name__.endswith("RMSNorm") and (norm.weight is not None) == has_weight  # vLLM goes by the name
    hidden = torch.randn(3, 7, 32).mul(torch.tensor([1e-3, 1.0, 100.0])[:, None, None]).to(dtype)
    many = hidden.repeat(1, 4, 1)  # 84 tokens
    with torch.no_grad():
        assert torch.equal(norm(many), torch.nn.RMSNorm.forward(norm, many))
    steps = (
        hidden,
        hidden[:1],
        hidden[:, None],
        hidden.transpose(0, 1)[:, None],
        hidden[:, :1],
        hidden[:0, :1],
        torch.zeros(3, 1, 32).to(dtype),
    )
    for states in steps:
        expected = norm(states).detach()
        with torch.no_grad():
            got = norm(states)
            with OperatorCounter() as counter:
                norm(states)
        assert "aten.hypot_.default" in counter.counts and got.dtype == dtype and got.shape == states.shape
        precision = torch.finfo(dtype).eps
        torch.testing.assert_close(got, expected, rtol=4 * precision if dtype.itemsize > 2 else precision, atol=0)


@pytest.mark.compatibility("Queries in float32, saved and loaded again")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ROUTED)
def test_queries_stay_float32(variant, dtype, tmp_path):
    model = small_model(variant)
    queries = model.model.depth_queries.weight.detach().clone()
    model.save_pretrained(tmp_path / "float32")
    loaded = LRAttnResForCausalLM.from_pretrained(tmp_path / "float32", dtype=dtype)
    loaded.save_pretrained(tmp_path / "half")
    again = LRAttnResForCausalLM.from_pretrained(tmp_path / "half")
    for half in (loaded, again, model.to(dtype), LRAttnResForCausalLM(small_config(variant)).to(dtype)):
        assert half.model.depth_queries.weight.dtype == torch.float32
        assert half.model.embed_tokens.weight.dtype == dtype == half.dtype
    for kept in (loaded, again, model):
        assert torch.equal(kept.model.depth_queries.weight, queries)
    assert model.double().model.depth_queries.weight.dtype == torch.float64
