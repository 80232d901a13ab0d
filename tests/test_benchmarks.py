"""The benchmarks: the page is what the results say, a control shows the noise, and a wrong read is not timed."""

import itertools
import sys
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


def test_rows_are_interleaved_and_count_with_their_smallest_time(monkeypatch):
    """A clock that a step moves on by what it costs; the first round does not count, and each begins elsewhere."""
    clock, order = [0.0], []
    costs = {"a": itertools.count(3, -1), "b": itertools.cycle([9, 5, 7])}

    def step(name):
        order.append(name)
        clock[0] += next(costs[name])

    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock[0])
    times = harness.interleave({name: lambda name=name: step(name) for name in costs}, repeats=2)
    assert times == {"a": 1, "b": 5} and "".join(order) == "abbaab"


def test_each_part_of_a_step_counts_with_its_smallest_time(monkeypatch):
    clock, costs = [0.0], iter([9, 9, 2, 5, 4, 3])

    def step():
        clock[0] += next(costs)
        harness.lap()
        clock[0] += next(costs)

    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock[0])
    assert harness.interleave({"a": step}, repeats=2) == {"a": 2 + 3}


def test_a_step_has_a_part_for_each_linear_map_forward_and_backward():
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    for row in ("standard", "sliced N=4 r=64", "Qwen3ForCausalLM"):
        step = harness.training_step(harness.build(row, vocab_size=32, **sizes), torch.arange(8)[None])
        harness.laps.clear()
        step()
        assert len(harness.laps) == 22 + 1 + 22 + 1  # 7 in each layer and the head; the loss; backward; the optimizer


def test_standard_is_timed_against_itself(monkeypatch):
    made = []
    batches = iter(
        [{"standard": 2.0, "x": 3.0, harness.CONTROL: 2.1}, {"standard": 4.0, "y": 4.0, harness.CONTROL: 3.0}]
    )
    monkeypatch.setattr(harness, "interleave", lambda steps, repeats: next(batches))
    rows = ["standard", "x", *(f"row {i}" for i in range(harness.BATCH - 1)), "y"]
    columns = harness.compare(lambda row, compiled: made.append(row), rows, {"eager": rows}, repeats=1)
    assert columns["eager"] == {"standard": 1.0, "x": 1.5, "y": 4 / 3, harness.CONTROL: 4 / 3}
    assert made == [*rows[:-1], "standard", "y"]


def test_a_wrong_read_is_not_timed(monkeypatch):
    rows = ["sliced N=4 r=64"]
    harness.check_against_naive_read(rows)
    read = depth_routing.read_sources
    wrong = staticmethod(lambda dtype, logits, *values: read(dtype, 1.01 * logits, *values))
    monkeypatch.setattr(depth_routing.DepthRead, "forward", wrong)
    with pytest.raises(AssertionError, match="sliced N=4 r=64"):
        harness.check_against_naive_read(rows)
