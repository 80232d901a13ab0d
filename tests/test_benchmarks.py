"""The benchmarks: the page is what the results say, a control shows the noise, and a wrong read is not timed."""

import itertools
import json
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


def test_the_pages_are_what_the_results_say():
    """`python benchmarks/tables.py` would change nothing; every table is shown."""
    performance, readme = (page.read_text() for page in tables.PAGES)
    assert tables.fill(performance) == performance and tables.fill(readme) == readme
    assert all("\n".join(make()) in performance for make in tables.TABLES)
    assert all("\n".join(make()) in readme for make in (tables.times, tables.memory))


def test_rows_are_interleaved_and_the_first_round_does_not_count():
    """With steps that say what they cost: in each round each once, in another order."""
    order = []
    costs = {"a": itertools.count(9, -1), "b": itertools.cycle([9, 5, 7]), "c": itertools.count(1)}

    def step(name):
        order.append(name)
        return next(costs[name])

    steps = {name: lambda name=name: step(name) for name in costs}
    times = harness.interleave(steps, 6, lambda step: [("x", step()), ("y", 1)])
    assert times == {"a": [("x", 3), ("y", 1)], "b": [("x", 5), ("y", 1)], "c": [("x", 2), ("y", 1)]}
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == 7 and {"".join(sorted(names)) for names in rounds} == {"abc"} and len(set(rounds)) > 3


def test_each_part_counts_with_its_smallest_time():
    assert harness.smallest([("x", 2.0), ("y", 5.0)], [("x", 4.0), ("y", 3.0)]) == [("x", 2.0), ("y", 3.0)]
    with pytest.raises(RuntimeError, match="other operators"):
        harness.smallest([("x", 2.0), ("y", 5.0)], [("y", 4.0), ("x", 3.0)])


def test_a_product_is_one_part_whatever_it_calls():
    spans = [
        (1, 5, "other"),  # a linear map around
        (2, 4, "products a"),
        (2, 3, "other"),
        (6, 9, "attention"),
        (6, 8, "attention"),
        (7, 8, "other"),
        (10, 11, "other"),
    ]
    parts = harness.cut(0, spans[::-1])
    assert [(name, round(1e9 * seconds)) for name, seconds in parts] == [
        ("other", 2),
        ("products a", 2),
        ("other", 1),
        ("other", 1),
        ("attention", 3),
        ("other", 2),
    ]


def test_the_same_products_count_alike_in_all_models():
    times = {
        "a": [("products x", 2.0), ("products x", 3.0), ("other", 1.0)],
        "b": [("products x", 4.0), ("products y", 5.0), ("other", 2.0)],
    }
    assert harness.settle(times) == {
        "a": [("products x", 2.0), ("products x", 2.0), ("other", 1.0)],
        "b": [("products x", 2.0), ("products y", 5.0), ("other", 2.0)],
    }


@pytest.mark.parametrize("row", ["standard", "sliced-n4-r64", "Qwen3ForCausalLM"])
def test_a_step_is_cut_where_its_operators_end(row):
    """The products of one shape are those of the linear maps: all models have the same ones."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    step = harness.training_step(harness.build(row, vocab_size=32, **sizes), torch.arange(8)[None])
    (parts,) = harness.interleave({row: step}, repeats=2).values()  # the same operators twice, or it would fail
    names = [name for name, _ in parts]
    assert names.count("products [[8, 128], [128, 64]]") == 3 * 3  # gate, up; backward of down
    assert names.count("products [[8, 64], [64, 128]]") == 3 * 3
    assert sum(name.startswith("attention") for name in names) == 2 * 3 and "other" in names
    start = time.perf_counter()
    parts = harness.cut_at_operators(step)
    assert 0 < harness.total(parts) <= time.perf_counter() - start and all(seconds >= 0 for _, seconds in parts)


def test_a_small_step_is_cut_at_its_linear_maps():
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    model = harness.mark_linears(harness.build("sliced-n4-r64", vocab_size=32, **sizes))
    parts = harness.cut_at_linears(lambda: model(torch.arange(8)[None]))
    assert [name for name, _ in parts].count("products 128 64") == 2 * 3 and len(parts) == 2 * 22 + 1
    assert parts[-1][0] == "other" and all(seconds > 0 for _, seconds in parts)


def test_compiled_kernels_are_parts_too(monkeypatch):
    """They are compiled when the step first runs, which does not count."""
    names = []
    monkeypatch.setattr(harness, "describe", lambda name, shapes: names.append(name) or "other")
    inputs = torch.ones(8, 8, requires_grad=True)
    compiled = torch.compile(lambda x: (x.sin() @ x.cos()).exp().sum())
    harness.interleave({"x": lambda: compiled(inputs).backward()}, repeats=2)
    assert "aten::mm" in names and any("sin" in name and "cpp_fused" in name for name in names)
    assert not torch._inductor.config.cpp.enable_kernel_profile


@pytest.mark.parametrize("copies", [("standard", harness.CONTROL), (harness.CONTROL, "standard")])
def test_standard_is_timed_against_itself(copies, monkeypatch):
    """Whichever of its two copies is the faster one counts, and the parts of a step add up to its ratio."""
    seconds = dict(zip((*copies, "x"), ([1.6, 0.5], [1.8, 0.6], [1.5, 1.5])))
    parts = {row: list(zip(("products", "other"), both)) for row, both in seconds.items()}
    monkeypatch.setattr(harness, "interleave", lambda steps, repeats, time_parts: parts)
    columns = harness.compare(lambda row, compiled: None, ["x"], {"eager": ["x"]}, repeats=1)
    assert columns["eager"] == pytest.approx({"standard": 1.0, harness.CONTROL: 1.05, "x": 1.5})
    assert columns["eager, as timed"] == pytest.approx({"standard": 1.0, harness.CONTROL: 2.4 / 2.1, "x": 3 / 2.1})
    assert columns["eager, products"] == pytest.approx({"standard": 0.75, harness.CONTROL: 0.75, "x": 0.75})
    assert columns["eager, other"] == pytest.approx({"standard": 0.25, harness.CONTROL: 0.3, "x": 0.75})
    assert all(list(column) == ["standard", harness.CONTROL, "x"] for column in columns.values())


def test_a_mode_that_is_not_timed_keeps_its_columns(monkeypatch, tmp_path):
    """Of the same sizes on the same machine; a mode that is timed again is replaced."""
    ratios = itertools.count(1)

    def compare(make_step, rows, modes, *_):
        return {f"{mode}{kind}": {"standard": next(ratios)} for mode in modes for kind in ("", ", as timed")}

    def run(*arguments):
        parser = harness.timing_parser("", repeats=3, layers=2, tokens=4)
        harness.time_rows("x", None, parser.parse_args([*arguments, "--rows", "standard", "--output", str(tmp_path)]))
        content = json.loads((tmp_path / "x.json").read_text())
        return content["settings"]["repeats"], [column["standard"] for column in content["columns"].values()]

    monkeypatch.setattr(harness, "compare", compare)
    assert run("--modes", "eager") == ({"eager": 3}, [1, 2])
    assert run("--modes", "compiled", "--repeats", "5") == ({"eager": 3, "compiled": 5}, [1, 2, 3, 4])
    assert run("--modes", "eager", "--repeats", "7") == ({"compiled": 5, "eager": 7}, [3, 4, 5, 6])
    assert run("--modes", "eager", "--tokens", "8") == ({"eager": 3}, [7, 8])
    run("--modes", "compiled", "--tokens", "8")
    monkeypatch.setattr(harness, "machine", lambda: {"device": "another"})
    assert run("--modes", "eager", "--tokens", "8") == ({"eager": 3}, [11, 12])


@pytest.mark.parametrize("part", ["DepthMix", "DepthMerge", "DepthRead", "DepthBank"])
def test_a_wrong_read_is_not_timed(part, monkeypatch):
    rows = ["sliced-full-r64" if part == "DepthRead" else "sliced-n4-r64"]
    harness.check_against_naive_read(rows)
    changed = getattr(depth_routing, part)
    name, position = ("read", 2) if part == "DepthBank" else ("forward", 0 if part == "DepthMix" else 1)
    right = getattr(changed, name)

    def wrong(*inputs):
        """With logits, or in the bank what a sub-layer emitted, that are a little too large."""
        inputs = [*inputs]
        given = inputs[position]
        inputs[position] = [1.01 * part for part in given] if isinstance(given, list) else 1.01 * given
        return right(*inputs)

    monkeypatch.setattr(changed, name, wrong if part == "DepthBank" else staticmethod(wrong))
    with pytest.raises(AssertionError, match=rows[0]):
        harness.check_against_naive_read(rows)
