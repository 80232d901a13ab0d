"""The Triton kernels against the float64 oracle, under Triton's interpreter.

Collected by `test_depth_routing_triton.py` in a process of its own: the interpreter is chosen when triton is imported.
Shape letters: B batch, T tokens, D hidden size, R key rank, S sources, G sites of a group, Y younger sources.
"""

import importlib.util
import sys
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import triton.language as tl
from common import ROUTED, random_tokens, small_config, small_model
from triton.runtime import interpreter

from lr_attnres import depth_routing_triton as kernels
from lr_attnres.analysis.roofline import LaunchCounter
from lr_attnres.depth_routing import DepthSite, depth_logits, naive_mix
from lr_attnres.depth_state import KernelBank


BATCH, EPS = 2, 2**-23
# Largest error over largest value (or 1). float32 rounds each term of a sum, at 2^-24. In half precision the hidden
# states are rounded (2^-11, bfloat16 2^-8) before the backward uses them: the gradient of a logit is the
# difference of two dot products, one of them with these, and gets up to four such units.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@pytest.fixture(autouse=True)
def interpreter_like_a_gpu(monkeypatch):
    """Casts round to nearest, as on a GPU; the interpreter cuts bfloat16 off. And it prepares `triton.language` again
    at each call of a function inside a kernel, which takes most of its time: once per launch will do."""
    launch, convert = interpreter.GridExecutor.__call__, interpreter._convert_float

    def prepared_launch(executor, *args, **kwargs):
        scope = interpreter._patch_lang(tl.sum.fn)
        try:
            return launch(executor, *args, **kwargs)
        finally:
            scope.restore()

    def rounding_convert(data, source, target, rounding):
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.tensor(data).bfloat16().view(torch.uint16).numpy()
        return convert(data, source, target, rounding)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", prepared_launch)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", lambda f, *a, **k: f.rewrite()(*a, **k))
    monkeypatch.setattr(interpreter, "_convert_float", rounding_convert)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def with_gradients(function, leaves: list[torch.Tensor], grads: list[torch.Tensor] = ()) -> list[torch.Tensor]:
    """The outputs of `function(*leaves)`, then the gradient of every leaf; those of the outputs may be given."""
    outputs = function(*leaves)
    torch.manual_seed(1)
    grads = grads or [torch.randn(output.shape).to(output.dtype) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]


def assert_matches(read, oracle, leaves: list[torch.Tensor], tolerance: float) -> list[torch.Tensor]:
    """Outputs and gradients of `read`, compared with those of `oracle` in float64."""
    actual = with_gradients(read, leaves)
    torch.manual_seed(1)
    grads = [torch.randn(output.shape).to(output.dtype).double() for output in actual[: -len(leaves)]]
    expected = with_gradients(oracle, [tensor.detach().double().requires_grad_() for tensor in leaves], grads)
    assert [tensor.dtype for tensor in actual[-len(leaves) :]] == [tensor.dtype for tensor in leaves]
    for i, (got, want) in enumerate(zip(actual, expected, strict=True)):
        error = (got.double() - want).abs().max() / want.abs().max().clamp(min=1)
        assert error <= tolerance, f"tensor {i} of {len(actual)}: {error:.2e} > {tolerance:.2e}"
    return actual


def oracle_mix(logits, *values):
    mixes = [naive_mix(values, logits[..., g, :]) for g in range(logits.shape[-2])]
    return *mixes, logits.logsumexp(-1)


def oracle_merge(mix, lse, *younger):
    values, logits = [mix, *younger[0::2]], [lse, *younger[1::2]]
    return (naive_mix(values, torch.cat(logits, dim=-1)),)


def triton_mix(logits, *values):
    return kernels.depth_mix(list(values), logits)


def triton_merge(dtype):
    return lambda mix, lse, *y: (kernels.depth_merge(mix, lse, list(zip(y[0::2], y[1::2])), dtype),)


def merge_leaves(T: int, D: int, Y: int, dtype: torch.dtype) -> list[torch.Tensor]:
    pairs = [(leaf(BATCH, T, D, dtype=dtype), leaf(BATCH, T, 1)) for _ in range(Y)]
    return [leaf(BATCH, T, D), leaf(BATCH, T, 1), *(tensor for pair in pairs for tensor in pair)]


@pytest.mark.parametrize(
    ("T", "D", "S", "G", "dtype"),
    [
        (1, 48, 1, 1, torch.float32),
        (17, 80, 2, 7, torch.float32),
        (17, 80, 2, 1, torch.bfloat16),
        (3, 1024, 9, 6, torch.bfloat16),
        (1, 1024, 5, 3, torch.float32),
        (2, 80, 16, 5, torch.float16),
        (1, 80, 25, 4, torch.bfloat16),  # one more than a launch of the backward takes
        (1, 48, 49, 7, torch.float32),
        (1, 48, 70, 2, torch.float16),  # two launches of the forward, three of the backward
        (1, 80, 2, 24, torch.float32),  # many sites: narrow chunks
        (1, 1024, 49, 2, torch.bfloat16),  # several launches and several chunks of D
    ],
)
def test_mix_equals_the_oracle(T, D, S, G, dtype):
    leaves = [leaf(BATCH, T, G, S), *(leaf(BATCH, T, D, dtype=dtype) for _ in range(S))]
    *mixes, lse = assert_matches(triton_mix, oracle_mix, leaves, TOLERANCE[dtype])[: G + 1]
    assert all(mix.dtype == lse.dtype == torch.float32 for mix in mixes)


MERGES = [
    (1, 48, 1, torch.float32),
    (17, 80, 2, torch.bfloat16),
    (3, 1024, 6, torch.bfloat16),
    (2, 1024, 1, torch.float32),
    (5, 80, 12, torch.float16),
]


@pytest.mark.parametrize(("T", "D", "Y", "dtype"), MERGES)
def test_merge_equals_the_oracle(T, D, Y, dtype):
    leaves = merge_leaves(T, D, Y, dtype)
    hidden, *_ = assert_matches(triton_merge(dtype), oracle_merge, leaves, TOLERANCE[dtype])
    assert hidden.dtype == dtype


def test_depth_heads_are_rows(T=3, H=5, D=7, S=3, G=2):
    """Values and mixes [B, T, H, D / H], values in a wider buffer, and logits with an axis H."""

    def read(mix, merge):
        def group(logits, *emitted):
            values = [part[..., : H * D].unflatten(-1, (H, D)) for part in emitted]
            *mixes, lse = mix(logits, *values[:S])
            return mixes[0], merge(mixes[1], lse[..., 1:], values[S], logits[..., 0, :1])[0], lse

        return group

    leaves = [leaf(BATCH, T, H, G, S), *(leaf(BATCH, T, H * D + 4) for _ in range(S + 1))]
    assert_matches(read(triton_mix, triton_merge(torch.float32)), read(oracle_mix, oracle_merge), leaves, 2e-6)


def test_no_younger_source_returns_the_mix():
    mix, lse = leaf(BATCH, 3, 48), leaf(BATCH, 3, 1)
    assert torch.equal(kernels.depth_merge(mix, lse, [], torch.float32), mix)
    assert torch.equal(kernels.depth_merge(mix, lse, [], torch.bfloat16), mix.bfloat16())


@pytest.mark.parametrize(("R", "D"), [(1, 80), (16, 48), (64, 80), (80, 80), (64, 1024), (1024, 1024)])
def test_values_in_a_wider_buffer_and_keys_of_any_rank(R, D, T=3, S=3, G=2):
    """A whole group from its values to its hidden states: phase 1, phase 2, and the gradients of queries and keys.

    The values are the first D columns of what a sub-layer emits, [B, T, D + R], and the keys are the others. The
    gradient through the key norm is a difference of two terms as large as |logit gradient| |query| / |key|; for R = 1
    they cancel, and what is left is their rounding error. So that this error stays small in any float32 computation,
    no key is close to zero, and the queries have norms around 1."""

    def emit():
        value, key = torch.randn(BATCH, T, D), torch.randn(BATCH, T, R)
        root_mean_square = 0.5 + torch.rand(BATCH, T, 1)
        key *= root_mean_square * R**0.5 / key.norm(dim=-1, keepdim=True)
        return torch.cat([value, key], dim=-1).requires_grad_()

    def group(mix, merge):
        def read(queries, *emitted):
            floor = queries.new_full((), (R * EPS) ** 0.5)
            logits = [depth_logits(output[..., D:], queries * R**0.5, floor) for output in emitted]
            values = [output[..., :D] for output in emitted]
            *mixes, lse = mix(torch.stack(logits[:S], dim=-1), *values[:S])
            younger = [(value, logit) for value, logit in zip(values[S:], logits[S:])]
            reads = []
            for g in range(G):
                pairs = [(value, logit[..., g : g + 1]) for value, logit in younger[: g + 1]]
                reads.append(merge(mixes[g], lse[..., g : g + 1], pairs))
            return reads

        return read

    def oracle(mix, lse, younger):
        return oracle_merge(mix, lse, *(tensor for pair in younger for tensor in pair))[0]

    def triton_read(mix, lse, younger):
        return kernels.depth_merge(mix, lse, younger, torch.float32)

    queries = (torch.randn(G, R) / R**0.5).requires_grad_()
    leaves = [queries, *(emit() for _ in range(S + G))]
    actual_read, expected_read = group(triton_mix, triton_read), group(oracle_mix, oracle)
    # The key norm and two phases, one after another: over 300 seeds the torch read is off by 2.6e-6 at most.
    assert_matches(actual_read, expected_read, leaves, 5e-6)


def test_any_layout_of_values_and_gradients(T=3, D=48, S=2, G=2):
    """Columns that are no neighbours, batches that do not follow each other, gradients expanded from one number."""
    emitted = [leaf(T, D, BATCH) for _ in range(S)]
    logits = leaf(BATCH, T, G, S)

    def loss(mix):
        def read(logits, *emitted):
            values = [emitted[0].permute(2, 0, 1), emitted[1].permute(2, 0, 1).contiguous().transpose(0, 1)]
            values[1] = values[1].contiguous().transpose(0, 1)  # [B, T, D], tokens outermost in memory
            return (sum(output.sum() for output in mix(logits, *values)),)

        return read

    assert_matches(loss(triton_mix), loss(oracle_mix), [logits, *emitted], 1e-5)  # the loss sums 600 numbers


def test_one_source_is_the_identity_with_no_logit_gradient():
    logits, value = leaf(BATCH, 3, 2, 1), leaf(BATCH, 3, 48)
    first, second, lse = kernels.depth_mix([value], logits)
    assert torch.equal(first, value) and torch.equal(second, value) and torch.equal(lse, logits[..., 0])
    (grad,) = torch.autograd.grad([first, second], logits, [torch.randn_like(value)] * 2)
    assert torch.count_nonzero(grad) == 0


def test_large_logits_do_not_overflow():
    values, logits = [leaf(BATCH, 2, 48) for _ in range(3)], leaf(BATCH, 2, 1, 3) * 1e4
    *_, lse = outputs = kernels.depth_mix(values, logits)
    expected = oracle_mix(logits.double(), *(value.double() for value in values))
    assert all(torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5) for got, want in zip(outputs, expected))
    younger = [(values[0], logits[..., 0, :1])]
    hidden = kernels.depth_merge(values[1], lse, younger, torch.float32)
    assert hidden.isfinite().all()


def oracle_steps(kind, schedule, embedding, embedding_key, outputs, queries, heads, eps):
    """Each site from its definition, in float64; sums of values are rounded as a model rounds them.
    -> hidden states [M, B, H D], weights: M of [B, H, S]."""
    batch, width, rank, dtype = len(embedding), embedding.shape[-1], queries.shape[-1], embedding.dtype

    def normalized(key):
        return key / (key.square().mean(-1, keepdim=True) + eps).sqrt()

    def by_head(row):
        return row.double().view(batch, heads, -1)

    def emitted(row, key):
        """The value, and the key by head: None where it is a slice of the value."""
        if kind == "sliced":
            return row[:, 0], None
        key = by_head(key[:, 0])
        return row[:, 0, :width], normalized(key) if kind == "projected in blocks" or heads > 1 else key

    sources, hidden, all_weights = [emitted(embedding, embedding_key)], [], []
    for site, output in zip(schedule, outputs, strict=True):
        value, key = emitted(output, output[..., -rank:])
        if site.num_in_block > 1:
            old_value, old_key = sources.pop()
            value, key = (old_value.float() + value.float()).to(dtype), key if key is None else old_key + key
        sources.append((value, key))
        keys = torch.stack([by_head(v[:, -rank:]) if k is None else k for v, k in sources], dim=-2)
        logits = (normalized(keys) * queries[site.index - 1].double().view(heads, 1, -1)).sum(-1)
        all_weights.append(logits.softmax(-1))
        values = torch.stack([by_head(v) for v, _ in sources], dim=-2)
        hidden.append((all_weights[-1].unsqueeze(-1) * values).sum(-2).flatten(1))
    return torch.stack(hidden), all_weights


def run_steps(kind, schedule, embedding, embedding_key, outputs, queries, heads, eps):
    """The same with the kernel, through `KernelBank` -> hidden states, weights, the bank."""
    has_key, attention = kind != "sliced", {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4}
    config = small_config(
        residual_type="projected" if has_key else "sliced",
        num_depth_blocks=None if kind == "projected" else 3,
        hidden_size=embedding.shape[-1],
        depth_key_rank=queries.shape[-1],
        depth_heads=heads,
        rms_norm_eps=eps,
        **attention,
    )
    bank = KernelBank(config, schedule[-1].num_sources, embedding, embedding_key if has_key else None, queries)
    reads = [bank.read(site, output, embedding.dtype, True) for site, output in zip(schedule, outputs, strict=True)]
    hidden = torch.stack([hidden[:, 0] for hidden, _ in reads])
    return (
        hidden,
        [w.view(len(embedding), heads, -1)[..., : s.num_sources] for s, (_, w) in zip(schedule, reads)],
        bank,
    )


STEPS = [  # kind, B, D, R, H, M, N, dtype; D and R over all heads
    ("sliced", 1, 80, 5, 1, 6, 4, torch.float32),
    ("sliced", 3, 24, 24, 1, 5, None, torch.float32),  # `attnres`
    ("sliced", 2, 1000, 1, 1, 4, 2, torch.bfloat16),
    ("sliced", 2, 96, 24, 3, 7, 3, torch.float16),
    ("sliced", 1, 20, 3, 1, 97, None, torch.float32),  # 98 sources
    ("sliced", 1, 2050, 2050, 1, 3, 2, torch.bfloat16),  # keys in several chunks
    ("projected", 3, 48, 7, 1, 5, None, torch.float32),
    ("projected", 2, 60, 12, 4, 4, None, torch.bfloat16),
    ("projected in blocks", 2, 80, 16, 1, 9, 3, torch.float32),
    ("projected in blocks", 1, 96, 33, 1, 6, 1, torch.float16),
    ("projected in blocks", 3, 64, 8, 2, 6, 4, torch.bfloat16),
]


@pytest.mark.parametrize("case", STEPS, ids=lambda case: f"{case[0]}-{case[1:-1]}-{case[-1]}")
def test_a_step_of_generation_equals_the_oracle(case):
    """A site is one launch; the memory is the same from the first to the last."""
    kind, B, D, R, H, M, N, dtype = case
    schedule = DepthSite.schedule(M, N)
    has_key = kind != "sliced"
    embedding = torch.randn(B, 1, D).to(dtype)
    outputs = [torch.randn(B, 1, D + R * has_key).to(dtype) for _ in range(M)]
    inputs = (schedule, embedding, torch.randn(B, 1, R).to(dtype), outputs, torch.randn(M, R) * (H / R) ** 0.5, H, EPS)
    with counted_launches() as launches:
        hidden, weights, bank = run_steps(kind, *inputs)
    assert launches == [M]
    expected_hidden, expected_weights = oracle_steps(kind, *inputs)
    # The hidden states of a half-precision step are rounded once; logits are sums of R terms, all in float32.
    bound = {torch.float32: 5e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    assert (hidden.double() - expected_hidden).abs().max() <= bound * expected_hidden.abs().max().clamp(min=1)
    for got, want in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=5e-6)
    again, *_ = run_steps(kind, *inputs)
    assert torch.equal(hidden, again)
    assert hidden.dtype == dtype and all(t.device == embedding.device for t in bank.tables)


@contextmanager
def counted_launches():
    """-> a list with the number of kernel launches."""
    launch, counts = interpreter.GridExecutor.__call__, [0]

    def counting_launch(*args, **kwargs):
        counts[0] += 1
        with torch.utils._python_dispatch._disable_current_modes():  # what the interpreter does is no operator
            return launch(*args, **kwargs)

    interpreter.GridExecutor.__call__ = counting_launch
    try:
        yield counts
    finally:
        interpreter.GridExecutor.__call__ = launch


@torch.no_grad()
def launches_of_a_step(model, token) -> int:
    """Operators that are a launch on a GPU, and kernels."""
    with LaunchCounter() as operators, counted_launches() as kernels_launched:
        model(token)
    return operators.count + kernels_launched[0]


@pytest.mark.parametrize("variant", ROUTED)
def test_a_step_launches_no_more_than_standard(variant):
    """One kernel takes the place of the residual addition. `projected` has one more launch a step: the product that
    gives the key of the embedding."""
    token, norms = random_tokens(2, 1), {"norm_weight": "weighted" in variant}
    standard, model = small_model("standard", **norms), small_model(variant)
    model.set_depth_backend("triton")
    launches_of_a_step(standard, token)  # the constants of the norms are made once per process
    more = launches_of_a_step(model, token) - launches_of_a_step(standard, token)
    assert more == ("projected" in variant)


@pytest.mark.compatibility("A step of generation as Triton kernels, under Triton's interpreter")
@pytest.mark.parametrize(
    "switches", [{}, {"depth_key_norm": False, "depth_query_norm": True, "depth_logit_scale": 0.7}]
)
@pytest.mark.parametrize("variant", ROUTED)
@torch.no_grad()
def test_a_model_generates_the_same(variant, switches):
    """Logits and depth weights of one token, against the pure-torch read in float64."""
    model, token = small_model(variant, **switches), random_tokens(3, 1)
    expected = deepcopy(model).double()(token, output_depth_weights=True)
    model.set_depth_backend("triton")
    outputs = model(token, output_depth_weights=True)
    error = (outputs.logits - expected.logits).norm() / expected.logits.norm()
    assert 0 < error < 5e-5  # as above
    for ours, theirs in zip(outputs.depth_weights, expected.depth_weights, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.compatibility("Triton reads, under Triton's interpreter")
@pytest.mark.parametrize(
    "variant", ["attnres_full", "projected_full", "projected_full_heads", "sliced_block", "sliced_block_heads"]
)
def test_a_model_reads_the_same(variant):
    """Loss and every gradient of a whole float32 model, against the pure-torch read in float64."""
    model, tokens = small_model(variant), random_tokens(BATCH, 5)

    def loss_and_gradients(model):
        loss = model(input_ids=tokens, labels=tokens).loss
        return torch.cat([grad.flatten() for grad in (loss, *torch.autograd.grad(loss, list(model.parameters())))])

    expected = loss_and_gradients(deepcopy(model).double())
    model.set_depth_backend("triton")
    error = (loss_and_gradients(model) - expected).norm() / expected.norm()
    assert 0 < error < 5e-5  # float32 through four layers of large weights; the torch read is 2e-6 to 2e-5 off


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic, D=48, S=2, G=2):
    """Under torch.compile, with no graph break, forward and backward; with dynamic shapes, once for all lengths."""

    def read(logits, *values):
        *mixes, lse = kernels.depth_mix(list(values[:S]), logits)
        younger = [(values[S], logits[..., 0, :1])]
        hidden = kernels.depth_merge(mixes[0], lse[..., :1], younger, torch.bfloat16)
        return hidden, kernels.depth_merge(mixes[1], lse[..., 1:], younger, torch.float32)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(read, backend=counter, fullgraph=True, dynamic=dynamic)
    graphs = []
    for T in (3, 5):
        leaves = [leaf(BATCH, T, G, S), *(leaf(BATCH, T, D) for _ in range(S + 1))]
        for got, want in zip(with_gradients(compiled, leaves), with_gradients(read, leaves)):
            assert torch.equal(got, want)
        graphs.append(counter.frame_count)
    assert (graphs[0] == graphs[1]) is dynamic


def test_operators_keep_their_contracts(T=2, D=48, S=3):
    """Schema, fake tensors, autograd registration and dynamic tracing, as `torch.library.opcheck` sees them."""
    values = [leaf(BATCH, T, D) for _ in range(S)]
    torch.library.opcheck(kernels.mix_op, (values, leaf(BATCH, T, 2, S)))
    torch.library.opcheck(kernels.merge_op, (values, leaf(BATCH, T, S), torch.float32))
    *mixes, lse = kernels.depth_mix([value.to("meta") for value in values], torch.empty(BATCH, T, 2, S, device="meta"))
    assert [mix.shape for mix in mixes] == [(BATCH, T, D)] * 2 and lse.shape == (BATCH, T, 2) and lse.is_meta


def test_two_copies_of_the_file_share_a_process():
    """The package and a Hub repository's remote code: both register operators, neither takes the other's."""
    spec = importlib.util.spec_from_file_location("remote_code.depth_routing_triton", kernels.__file__)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy
    spec.loader.exec_module(copy)
    logits, values = leaf(BATCH, 2, 2, 2), [leaf(BATCH, 2, 48) for _ in range(2)]
    ours = with_gradients(triton_mix, [logits, *values])
    theirs = with_gradients(lambda logits, *values: copy.depth_mix(list(values), logits), [logits, *values])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
    assert copy.mix_op is not kernels.mix_op


def test_wrong_inputs_are_errors():
    values, logits = [leaf(BATCH, 2, 48) for _ in range(2)], leaf(BATCH, 2, 1, 2)
    with pytest.raises(ValueError, match="need logits"):
        kernels.depth_mix(values, leaf(BATCH, 2, 1, 3))
    with pytest.raises(ValueError, match="one shape"):
        kernels.depth_mix([values[0], leaf(BATCH, 3, 48)], logits)
    with pytest.raises(TypeError, match="float32 logits, not torch.bfloat16"):
        kernels.depth_mix(values, logits.bfloat16())
    with pytest.raises(TypeError, match="values, not torch.float64"):
        kernels.depth_merge(values[0], logits[..., 0, :1], [(values[1].double(), logits[..., 0, 1:])], torch.float32)


def test_bytes_moved_are_close_to_the_ideal():
    """At the paper's width: a read costs its wide inputs and outputs once, plus at most 6 % for logits and dots."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    import triton_report

    ratios = {row["read"]: row["ratio"] for row in triton_report.count_reads(S=8, G=6, Y=2)}
    step = ratios.pop("step")  # each chunk of D computes the logits anew: their keys come from the cache
    assert len(ratios) == 4 and all(1 <= ratio <= 1.06 for ratio in ratios.values()), ratios
    assert 1 <= step <= 1.25
