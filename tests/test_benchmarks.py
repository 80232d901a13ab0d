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
    """A cut that asks the steps what they cost; each round begins with another step."""
    order = []
    costs = {"a": itertools.count(3, -1), "b": itertools.cycle([9, 5, 7])}

    def cut(step):
        return [("lap", step())]

    def step(name):
        order.append(name)
        return next(costs[name])

    times = harness.interleave({name: lambda name=name: step(name) for name in costs}, repeats=2, cut=cut)
    assert times == {"a": [("lap", 1)], "b": [("lap", 5)]} and "".join(order) == "ababba"


def test_each_part_of_a_step_counts_with_its_smallest_time(monkeypatch):
    clock, costs = [0.0], iter([9, 9, 2, 5, 4, 3])

    def step():
        clock[0] += next(costs)
        harness.lap()
        clock[0] += next(costs)

    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock[0])
    (parts,) = harness.interleave({"a": step}, repeats=2, cut=harness.cut_at_laps).values()
    assert parts == [("lap", 2), ("lap", 3)] and harness.total(parts) == 5


@pytest.mark.parametrize("row", ["standard", "sliced N=4 r=64", "Qwen3ForCausalLM"])
def test_a_step_is_cut_where_its_operators_end(row):
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    step = harness.training_step(harness.build(row, vocab_size=32, **sizes), torch.arange(8)[None])
    (parts,) = harness.interleave({row: step}, repeats=2).values()  # the same operators twice, or it would fail
    names = [name for name, _ in parts]
    products = names.count("aten::mm")
    assert products >= 3 * 22  # 7 linear maps in each layer and the head, forward and two products backward
    assert products < 3 * 22 + 30  # and those of the logits
    assert {harness.kind(name) for name in names} == {"products", "attention", "AdamW", "other"}
    start = time.perf_counter()
    parts = harness.cut_at_operators(step)
    assert 0 < harness.total(parts) <= time.perf_counter() - start and all(seconds >= 0 for _, seconds in parts)


def test_compiled_kernels_are_parts_too():
    """They are compiled when the step first runs, which does not count."""
    inputs = torch.ones(8, 8, requires_grad=True)
    compiled = torch.compile(lambda x: (x.sin() @ x.cos()).exp().sum())
    (parts,) = harness.interleave({"x": lambda: compiled(inputs).backward()}, repeats=2).values()
    names = [name for name, _ in parts]
    assert "aten::mm" in names and any("sin" in name and "cpp_fused" in name for name in names)


def test_standard_is_timed_against_itself(monkeypatch):
    seconds = {"standard": [1.5, 0.5], "x": [1.5, 1.5], harness.CONTROL: [1.6, 0.5]}
    parts = {row: list(zip(("aten::mm", "aten::add"), both)) for row, both in seconds.items()}
    monkeypatch.setattr(harness, "interleave", lambda steps, repeats, cut: parts)
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
