"""The engine: two phases equal the naive read, forward and every gradient, and keep what they promise to keep."""

import pytest
import torch
from common import ROUTED, VARIANTS, random_tokens, small_config, small_model

from lr_attnres import LRAttnResForCausalLM, modeling_lr_attnres
from lr_attnres.depth_routing import (
    DepthMix,
    DepthSite,
    depth_block_ends,
    depth_logits,
    depth_merge,
    depth_mix,
    depth_read,
    naive_depth_read,
    naive_mix,
)
from lr_attnres.depth_state import DepthBank, DepthState
from lr_attnres.modeling_lr_attnres import LRAttnResModel


pytestmark = pytest.mark.law


def random_sources(count: int, *shape: int, sites: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    values = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for _ in range(count)]
    logits = torch.randn(*shape[:-1], sites, count, dtype=torch.float64, requires_grad=True)
    return values, logits


@pytest.mark.parametrize("older, younger, sites", [(1, 1, 1), (2, 0, 3), (3, 1, 2), (5, 3, 4), (49, 2, 1)])
def test_two_phases_equal_the_naive_read(older, younger, sites):
    values, logits = random_sources(older + younger, 3, 17, 15, sites=sites)
    inputs = [logits, *values]
    *mixes, lse = depth_mix(values[:older], logits[..., :older])
    fused = [
        depth_merge(mix, lse[..., [i]], list(zip(values[older:], logits[..., i, older:].split(1, dim=-1))), mix.dtype)
        for i, mix in enumerate(mixes)
    ]
    naive = [naive_mix(values, logits[..., i, :]) for i in range(sites)]
    gradient = torch.randn(sites, 3, 17, 15, dtype=torch.float64)
    torch.testing.assert_close(torch.stack(fused), torch.stack(naive))
    ours = torch.autograd.grad(torch.stack(fused), inputs, gradient)
    theirs = torch.autograd.grad(torch.stack(naive), inputs, gradient)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("count", [1, 2, 3, 49])
def test_one_read_equals_the_naive_read(count):
    values, logits = random_sources(count, 3, 63, 15, sites=1)
    inputs, gradient = [logits, *values], torch.randn(3, 63, 15, dtype=torch.float64)
    fused, naive = depth_read(values, logits[..., 0, :]), naive_mix(values, logits[..., 0, :])
    torch.testing.assert_close(fused, naive)
    for a, b in zip(torch.autograd.grad(fused, inputs, gradient), torch.autograd.grad(naive, inputs, gradient)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("count, R", [(1, 1), (2, 3), (5, 7)])
def test_logits_made_in_advance_give_the_read_of_the_paper(count, R, eps=1e-3):
    values = [torch.randn(2, 7, 5, dtype=torch.float64) for _ in range(count)]
    keys = [torch.randn(2, 7, R, dtype=torch.float64) for _ in range(count)]
    query, floor = torch.randn(R, dtype=torch.float64), torch.tensor((R * eps) ** 0.5, dtype=torch.float64)
    logits = torch.cat([depth_logits(key, query[None] * R**0.5, floor) for key in keys], dim=-1)
    torch.testing.assert_close(depth_read(values, logits), naive_depth_read(values, keys, query, eps))


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_gradcheck(check):
    values, logits = random_sources(3, 2, 3, 5, sites=2)
    assert check(lambda logits, *values: depth_mix(list(values), logits), (logits, *values))
    mix, lse = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True), logits[..., 0, :1].detach()
    younger = list(logits[..., 0, :].detach().split(1, dim=-1))
    merge_inputs = (mix, lse.clone().requires_grad_(), *values, *(logit.clone().requires_grad_() for logit in younger))
    assert check(lambda m, z, *r: depth_merge(m, z, list(zip(r[:3], r[3:])), m.dtype), merge_inputs)
    assert check(lambda m, z, v, *r: depth_merge(m, z, [(v, r[-1])], m.dtype), merge_inputs)  # of a block


def test_ambient_autocast_changes_no_product():
    """Neither in the forward nor in the backward: logits, softmax and mixes stay float32."""
    values, logits = random_sources(5, 2, 130, 16, sites=3)
    logits, *values = inputs = [tensor.detach().float().requires_grad_() for tensor in (logits, *values)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            mix, *_, lse = depth_mix(values, logits)
            hidden = depth_merge(mix, lse[..., :1], [(values[0], logits[..., 0, :1])], torch.float32)
            results.append([hidden, *torch.autograd.grad(hidden.square().sum(), inputs)])
    for plain, cast in zip(*results):
        # Sums of five terms in another order; a bfloat16 product would be off by 1e-3.
        torch.testing.assert_close(cast, plain, rtol=1e-5, atol=1e-5)


def test_one_source_is_the_identity_with_exactly_zero_query_gradient():
    values, _ = random_sources(1, 2, 3, 8, sites=1)
    query = torch.randn(4, dtype=torch.float64, requires_grad=True)
    mix, _ = depth_mix(values, (values[0][..., -4:] @ query)[..., None, None])
    assert torch.equal(mix, values[0])
    mix.square().sum().backward()
    assert torch.equal(query.grad, torch.zeros(4, dtype=torch.float64))


def test_half_values_are_mixed_in_float32_and_rounded_once():
    values = [torch.randn(3, 17, 15).bfloat16() for _ in range(40)]
    logits = torch.randn(3, 17, 1, 40)
    mix, lse = depth_mix(values[:30], logits[..., :30])
    younger = list(zip(values[30:], logits[..., 0, 30:].split(1, dim=-1)))
    hidden = depth_merge(mix, lse, younger, torch.bfloat16)
    assert mix.dtype == lse.dtype == torch.float32 and hidden.dtype == torch.bfloat16
    exact = naive_mix([value.double() for value in values], logits[..., 0, :].double())
    # One rounding to 8 bits; rounded at every step, the sums would be off by several.
    torch.testing.assert_close(hidden.double(), exact, rtol=1.001 * 2**-8, atol=1e-6)


def test_a_zero_key_has_zero_logits_and_finite_gradients():
    key, queries = torch.zeros(2, 3, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    logits = depth_logits(key, queries, torch.tensor(1e-3))
    assert not logits.any()
    logits.sum().backward()
    assert key.grad.isfinite().all() and key.grad.any() and not queries.grad.any()


def test_function_transforms():
    values, logits = random_sources(3, 4, 3, 5, sites=2)

    def total(logits, *values):
        *mixes, lse = depth_mix(list(values), logits)
        return depth_merge(mixes[0], lse[..., :1], [(values[0], logits[..., 0, :1])], torch.float64).square().sum()

    inputs = (logits, *values)
    whole = torch.func.grad(total, argnums=(0, 1, 2, 3))(*inputs)
    per_sample = torch.func.vmap(torch.func.grad(total, argnums=(0, 1, 2, 3)))(*inputs)
    for a, b, c in zip(whole, per_sample, torch.autograd.grad(total(*inputs), inputs)):
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(b, c)


@pytest.mark.parametrize("num_sublayers", [2, 8, 10, 48])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 7, 8, 16, 64, None])
def test_schedule(num_sublayers, num_blocks):
    sites, ends = DepthSite.schedule(num_sublayers, num_blocks), depth_block_ends(num_sublayers, num_blocks)
    assert [site.index for site in sites] == list(range(1, num_sublayers + 1))
    assert [site.index for site in sites if site.closes_block] == ends
    for before, site in zip(sites, sites[1:]):
        assert site.num_sources == before.num_sources + before.closes_block
        assert site.num_in_block == (1 if before.closes_block else before.num_in_block + 1)
        if site.opens_group:
            # Phase 1 sees every completed source, the one just written included, so there is nothing to merge here.
            assert before.sites_in_group == 1 and site.closes_block and site.num_mixed == site.num_sources
        else:
            assert (site.num_mixed, site.sites_in_group) == (before.num_mixed, before.sites_in_group - 1)
    assert sites[0].num_sources == 2 and sites[-1].sites_in_group == 1
    assert [site.sites_in_model for site in sites] == list(range(num_sublayers, 0, -1))


def source_reads(num_sublayers: int, num_blocks: int | None) -> int:
    """Reads of a value: by phase 1 once per group, by phase 2 once per site and younger source."""
    reads = 0
    for site in DepthSite.schedule(num_sublayers, num_blocks):
        if site.opens_group:
            reads += site.num_mixed
        reads += site.num_sources - site.num_mixed + (site.num_mixed == 1)
    return reads


def test_grouping_cuts_source_reads():
    """The naive schedule reads 1,224 (full) and 264 (8 blocks) values at the paper's depth."""
    assert source_reads(48, None) < 1224 * 0.3
    assert source_reads(48, 8) < 264 * 0.4


def test_torch_reads_unless_the_kernels_are_asked_for(monkeypatch):
    """Also where there is a GPU: the kernels have not run on one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = small_model()
    monkeypatch.setattr(LRAttnResModel, "device", torch.device("cuda"))
    assert model.depth_backend == "torch"


def test_backend_is_visible_and_a_wrong_request_is_an_error(monkeypatch):
    model = small_model()
    assert model.depth_backend == model.model.depth_backend == "torch"
    assert small_model("standard").depth_backend is None
    with pytest.raises(ValueError, match="`residual_type` is 'standard'"):
        small_model("standard").set_depth_backend("torch")
    with pytest.raises(ValueError, match="'cuda' does not exist.*'torch', 'triton'"):
        model.set_depth_backend("cuda")
    with monkeypatch.context() as patch, pytest.raises(ImportError, match="`pip install triton`, or choose 'torch'"):
        patch.setattr(modeling_lr_attnres, "triton", None)
        model.set_depth_backend("triton")
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU, and torch sees none: choose 'torch'"):
        model.set_depth_backend("triton")
    assert model.depth_backend == "torch"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model.set_depth_backend("triton")
    assert model.depth_backend == "triton"
    with pytest.raises(ValueError, match="on the CPU"):
        model(random_tokens(1, 5))
    with torch.no_grad(), pytest.raises(ValueError, match="on the CPU"):
        model(random_tokens(1, 1))  # nor does a step of generation read from its bank instead
    model.set_depth_backend("torch")
    assert model.depth_backend == "torch" and model(random_tokens(1, 1)).logits.isfinite().all()


@pytest.mark.parametrize("variant", ROUTED)
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_a_flat_depth_state_gives_the_same_state_back(variant, num_layers):
    """A layer may complete two sources, or none, and open a group at either of its sites. It returns neither a tensor
    that it was given nor a view: FSDP2 warns of both."""
    model = small_model(variant, num_hidden_layers=num_layers).model
    sites, given, after = DepthSite.schedule(2 * num_layers, model.config.num_depth_blocks), [], []

    def before_layer(layer, inputs, options):
        given.append(inputs[1:])
        state = DepthState.unflatten(inputs[1:], options["depth_counts"])
        tensors, counts = state.flatten()
        assert all(a is b for a, b in zip(tensors, inputs[1:], strict=True)) and counts == options["depth_counts"]
        index = len(given) * 2 - 2  # sub-layers that have written
        assert len(state.values) == len(state.logits) == 1 + sum(site.closes_block for site in sites[:index])
        assert bool(state.partial) == (index > 0 and not sites[index - 1].closes_block)
        assert len(state.mixes) == (sites[index - 1].mixes_left if index else 0)

    def after_layer(layer, inputs, options, outputs):
        hidden_states, counts, *written = outputs
        assert not {id(tensor) for tensor in (hidden_states, *written)} & {id(tensor) for tensor in inputs}
        assert all(tensor._base is None for tensor in (hidden_states, *written))
        state = DepthState.unflatten(inputs[1:], options["depth_counts"])
        after.append(state.with_written(written, counts, layer.mlp_read.site).flatten()[0])

    for layer in model.layers:
        layer.register_forward_pre_hook(before_layer, with_kwargs=True)
        layer.register_forward_hook(after_layer, with_kwargs=True)
    model(random_tokens(2, 7))
    assert len(after) == num_layers
    for left, next_given in zip(after, given[1:]):  # what the next layer gets
        assert all(a is b for a, b in zip(left, next_given, strict=True))


SWITCHES = {"switches": {"depth_key_norm": False, "depth_query_norm": True, "depth_logit_scale": 0.7}, "defaults": {}}
SWITCHES["heads"] = {"depth_heads": 8}


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 5), (2, 3)], ids=str)
@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("variant", ROUTED)
@torch.no_grad()
def test_few_tokens_read_from_the_bank(variant, switches, shape, monkeypatch):
    model, tokens = small_model(variant, **SWITCHES[switches]).double(), random_tokens(*shape)
    banked = model(tokens, output_depth_weights=True)
    monkeypatch.setattr(LRAttnResModel, "reads_from_bank", lambda self, embeddings: False)
    expected = model(tokens, output_depth_weights=True)
    torch.testing.assert_close(banked.logits, expected.logits)
    for ours, theirs in zip(banked.depth_weights, expected.depth_weights, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.compatibility("bfloat16, float16: a step of generation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_bank_in_half_precision(variant, dtype):
    """Keys that are normalised before they are summed are float32, but what a site reads has the model's dtype."""
    model, token = LRAttnResForCausalLM(small_config(variant)), random_tokens(3, 1)
    if variant != "standard":
        model.model.depth_queries.weight.normal_(std=0.3)
    expected = model(token).logits
    logits = model.to(dtype)(token).logits
    assert logits.dtype == dtype
    error = (logits.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 18 * (2**-9 if dtype == torch.bfloat16 else 2**-12)  # see test_half_precision_is_finite_and_close


@torch.no_grad()
def test_when_the_bank_is_used():
    model = small_model()
    token = torch.zeros(2, 1, 32)
    assert isinstance(model.model.start_depth_state(token), DepthBank)
    assert all(model.model.reads_from_bank(torch.zeros(shape)) for shape in [(1, 64, 32), (64, 1, 32), (2, 32, 32)])
    assert not any(model.model.reads_from_bank(torch.zeros(shape)) for shape in [(1, 65, 32), (2, 33, 32)])
    with torch.enable_grad():
        assert not model.model.reads_from_bank(token)
    with torch.autocast("cpu", torch.bfloat16):
        assert not model.model.reads_from_bank(token)
    torch.func.vmap(lambda row: model.model(inputs_embeds=row, use_cache=False).last_hidden_state)(token[:, None])
    assert not small_model(depth_block_exponent=0.5).model.reads_from_bank(token)
    assert not small_model(depth_count_prior=1.0).model.reads_from_bank(token)


@torch.no_grad()
def test_a_bank_moves_as_a_whole():
    """To another device in the middle of a block, as accelerate's hooks do where layers are spread over devices."""
    emitted, queries, floor = torch.randn(4, 2, 1, 6), torch.randn(3, 4), torch.tensor(1e-3)
    config = small_config(hidden_size=6, num_attention_heads=1, num_key_value_heads=1, depth_key_rank=4)
    bank = DepthBank(config, 3, emitted[0], None, queries, floor)
    assert bank.to("cpu") is bank.to(torch.device("cpu"), non_blocking=True) is bank
    for output, site in zip(emitted[1:], DepthSite.schedule(3, 2)):
        moved = bank.to("meta")
        expected, _ = bank.read(site, output, output.dtype)
        hidden, _ = moved.read(site, output.to("meta"), output.dtype)
        assert hidden.is_meta and hidden.shape == expected.shape


# What is saved for backward


def saved_storages(model: torch.nn.Module, input_ids: torch.Tensor) -> dict[int, int]:
    """Bytes of every storage that autograd keeps, parameters apart."""
    saved, parameters = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids, labels=input_ids, use_cache=False).loss
    assert loss.requires_grad  # the graph, and so every saved tensor, is alive until here
    return saved


# No number of values [128, 240] is as large as an activation of the feed-forward or as the logits.
MEMORY_SIZES = {
    "hidden_size": 240,
    "intermediate_size": 700,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "depth_key_rank": 16,
    "vocab_size": 2000,
}
MEMORY_TOKENS = 128


def check_saved(variant: str) -> None:
    """Autograd keeps about as much as in `standard`, and no stack of sources."""
    fields = VARIANTS[variant] | MEMORY_SIZES | ({"num_depth_blocks": 8} if "block" in variant else {})
    input_ids = random_tokens(1, MEMORY_TOKENS)
    norms = {name: value for name, value in fields.items() if "norm" in name or "eps" in name}
    standard = sum(saved_storages(small_model("standard", **MEMORY_SIZES, **norms), input_ids).values())
    saved = saved_storages(small_model(variant, **fields), input_ids)
    # One value per sub-layer, 2 of about 21 per layer, and [sites] logits per source: those weigh more here than at
    # the paper's width, four times this one.
    assert sum(saved.values()) / standard < (1.12 if "sliced_block" in variant else 1.15)
    one_value = MEMORY_TOKENS * (240 + 16) * 4
    larger = {MEMORY_TOKENS * size * 4 for size in (700, 2000)}  # the feed-forward's activations, the logits
    assert all(size <= one_value or size in larger for size in saved.values())


@pytest.mark.parametrize("variant", ROUTED)
def test_saved_for_backward(variant):
    check_saved(variant)


def test_a_saved_stack_is_noticed(monkeypatch):
    def save_a_stack(ctx, inputs, output):
        logits, *values = inputs
        ctx.save_for_backward(logits, torch.stack(values))

    monkeypatch.setattr(DepthMix, "setup_context", staticmethod(save_a_stack))
    with pytest.raises(AssertionError):
        check_saved("sliced_full")


def test_projected_keys_are_all_that_projected_adds():
    """Full: one key for each source. Blocks: each key as it was emitted, copied and summed, and the norms of keys."""
    input_ids, one_key = random_tokens(1, MEMORY_TOKENS), MEMORY_TOKENS * 16 * 4
    for blocks, most in ((None, 17 * one_key), (8, 3 * 17 * one_key)):
        sliced, projected = (
            saved_storages(small_model(f"{kind}_full", **MEMORY_SIZES, num_depth_blocks=blocks), input_ids).values()
            for kind in ("sliced", "projected")
        )
        assert 0 < sum(projected) - sum(sliced) <= most
