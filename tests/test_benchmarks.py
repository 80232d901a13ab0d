"""The benchmarks: the page is what the results say, a control shows the noise, and a wrong read is not timed."""

import itertools
import sys
import time
from pathlib import Path

import pytest
import torch

from lr_attnres import depth_routing


ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # last: it has a `processes` too

import harness  # noqa: E402
import tables  # noqa: E402


@pytest.mark.parametrize("make", tables.TABLES, ids=lambda make: make.__name__)
def test_the_page_is_what_the_results_say(make):
    page = (ROOT / "docs/performance.md").read_text()
    assert "\n".join(make()) in page
    if make is tables.times:
        assert "\n".join(make()) in (ROOT / "README.md").read_text()


def test_rows_are_interleaved_and_the_first_round_does_not_count():
    """With steps that say what they cost: in each round each once, in another order."""
    order = []
    costs = {"a": itertools.count(9, -1), "b": itertools.cycle([9, 5, 7]), "c": itertools.count(1)}

    def step(name):
        order.append(name)
        return next(costs[name])

    steps = {name: lambda name=name: step(name) for name in costs}
    times = harness.interleave(steps, repeats=6, time_parts=lambda step: [("x", step())])
    assert times == {"a": [("x", 3)], "b": [("x", 5)], "c": [("x", 2)]}
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == 7 and {"".join(sorted(names)) for names in rounds} == {"abc"} and len(set(rounds)) > 3


def test_each_part_of_a_step_counts_with_its_smallest_time(monkeypatch):
    clock, costs = [0.0], iter([9, 9, 2, 5, 4, 3])

    def step():
        clock[0] += next(costs)
        harness.lap()
        clock[0] += next(costs)

    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock[0])
    (parts,) = harness.interleave({"a": step}, repeats=2, time_parts=harness.cut_at_laps).values()
    assert parts == [("other", 2), ("other", 3)] and harness.total(parts) == 5
    with pytest.raises(RuntimeError, match="other operators"):
        harness.smallest(parts, parts[:1])


def test_parts_are_of_the_kind_of_the_operator_around_them():
    """A gap and the calls inside an operator: seconds of `scaled_dot_product_attention`, whatever it calls."""
    spans = [
        (1, 4, "aten::mm"),
        (2, 3, "aten::empty"),
        (5, 9, "aten::scaled_dot_product_attention"),
        (6, 8, "aten::_scaled_dot_product_flash_attention_for_cpu"),
        (6, 7, "aten::transpose"),
        (10, 11, "graph_0_cpp_fused_add_0"),
    ]
    parts = harness.cut(0, spans)
    assert [(kind, round(1e9 * seconds)) for kind, seconds in parts] == [
        ("products", 3),  # with the gap before it
        ("products", 1),
        ("attention", 3),
        ("attention", 1),
        ("attention", 1),
        ("other", 2),
    ]


@pytest.mark.parametrize("row", ["standard", "sliced N=4 r=64", "Qwen3ForCausalLM"])
def test_a_step_is_cut_where_its_operators_end(row):
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    step = harness.training_step(harness.build(row, vocab_size=32, **sizes), torch.arange(8)[None])
    (parts,) = harness.interleave({row: step}, repeats=2).values()  # the same operators twice, or it would fail
    kinds = [kind for kind, _ in parts]
    assert kinds.count("products") >= 3 * 22  # 7 linear maps in each layer and the head, and two products backward
    assert set(kinds) == {"products", "attention", "AdamW", "other"}
    start = time.perf_counter()
    parts = harness.cut_at_operators(step)
    assert 0 < harness.total(parts) <= time.perf_counter() - start and all(seconds >= 0 for _, seconds in parts)


def test_compiled_kernels_are_parts_too(monkeypatch):
    """They are compiled when the step first runs, which does not count."""
    names = []
    monkeypatch.setattr(harness, "kind", lambda name: names.append(name) or "other")
    inputs = torch.ones(8, 8, requires_grad=True)
    compiled = torch.compile(lambda x: (x.sin() @ x.cos()).exp().sum())
    harness.interleave({"x": lambda: compiled(inputs).backward()}, repeats=2)
    assert "aten::mm" in names and any("sin" in name and "cpp_fused" in name for name in names)
    assert not torch._inductor.config.cpp.enable_kernel_profile


def test_standard_is_timed_against_itself(monkeypatch):
    seconds = {"standard": [1.5, 0.5], "x": [1.5, 1.5], harness.CONTROL: [1.6, 0.5]}
    parts = {row: list(zip(("products", "other"), both)) for row, both in seconds.items()}
    monkeypatch.setattr(harness, "interleave", lambda steps, repeats, time_parts: parts)
    columns = harness.compare(lambda row, compiled: None, ["x"], {"eager": ["x"]}, repeats=1)
    assert columns["eager"] == {"standard": 1.0, harness.CONTROL: 1.05, "x": 1.5}
    assert columns["eager, products"] == {"standard": 0.75, harness.CONTROL: 0.8, "x": 0.75}
    assert columns["eager, other"] == {"standard": 0.25, harness.CONTROL: 0.25, "x": 0.75}


def test_a_wrong_read_is_not_timed(monkeypatch):
    rows = ["sliced N=4 r=64"]
    harness.check_against_naive_read(rows)
    read = depth_routing.read_sources
    wrong = staticmethod(lambda dtype, logits, *values: read(dtype, 1.01 * logits, *values))
    monkeypatch.setattr(depth_routing.DepthRead, "forward", wrong)
    with pytest.raises(AssertionError, match="sliced N=4 r=64"):
        harness.check_against_naive_read(rows)
