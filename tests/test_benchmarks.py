"""The benchmarks: the pages are what the results say, a copy of `standard` shows the noise, and a wrong read is not
timed."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from lr_attnres import depth_routing, depth_state
from lr_attnres.variants import variant_fields


ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import depth_read  # noqa: E402
import harness  # noqa: E402
import memory  # noqa: E402
import side_by_side  # noqa: E402
import tables  # noqa: E402


def test_the_pages_are_what_the_results_say():
    """`python benchmarks/tables.py` would change nothing, and every table is on a page."""
    texts = [page.read_text() for page in tables.PAGES]
    assert [tables.fill(text) for text in texts] == texts
    assert all(any(f"<!-- table: {name} -->\n" in text for text in texts) for name in tables.TABLES)


def test_the_predictions_of_attnres_are_those_of_sliced():
    """The tables of docs/gpu.md leave them out."""
    for blocks in ("full", "n8"):
        attnres, sliced = f"attnres-{blocks}", f"sliced-{blocks}-r64"
        assert attnres not in tables.PREDICTED and sliced in tables.PREDICTED
        assert tables.decoding_launches(attnres, "torch") == tables.decoding_launches(sliced, "torch")
        for phase in tables.PHASES:
            paper = [tables.depth_bytes(tables.paper_config(variant), phase) for variant in (attnres, sliced)]
            assert abs(paper[0] / paper[1] - 1) < 1e-3


def test_tables_are_written_between_their_marks(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    rows = {"standard": {"seconds": 2.0, "ratio": 1.0}, "attnres-n8": {"seconds": 2.25, "ratio": 1.125}}
    (tmp_path / "decode.json").write_text(json.dumps({"modes": {"compiled": {"rows": rows}}}))
    page = tables.fill("before\n<!-- table: decode -->\n\nold\n\n<!-- /table -->\nbetween\n<!-- /table -->\n")
    assert page.startswith(
        "before\n<!-- table: decode -->\n\n| model | eager, 1 | eager, 8 | eager, 32 | compiled, 1 |"
    )
    assert "| standard | - | - | - | 1.000 | - | - |\n" in page
    assert "| attnres-n8 | - | - | - | 1.125 | - | - |\n" in page
    assert "standard (copy)" not in page and "old" not in page  # not measured
    assert page.endswith("\n\n<!-- /table -->\nbetween\n<!-- /table -->\n") and tables.fill(page) == page


@pytest.mark.parametrize("variant", harness.VARIANTS)
def test_rows_are_the_variants_of_their_names(variant):
    assert harness.VARIANTS[variant] == variant_fields(variant)


def test_rows_are_interleaved_and_the_first_round_does_not_count():
    """In each round each row once, in another order; the smallest time counts."""
    order = []
    costs = {"a": itertools.count(9, -1), "b": itertools.cycle([9, 5, 7]), "c": itertools.count(1)}

    def timer(name):
        order.append(name)
        return next(costs[name])

    timers = {name: lambda name=name: timer(name) for name in costs}
    assert harness.interleave(timers, repeats=6) == {"a": 3, "b": 5, "c": 2}
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == 7 and {"".join(sorted(names)) for names in rounds} == {"abc"} and len(set(rounds)) > 3


def test_ratios_are_as_timed():
    """To `standard`, whether its copy is slower or faster, and to the same row of the other checkout."""
    times = {"standard": 2.0, harness.COPY: 1.5, "x": 3.0, "standard, before": 4.0, "x, before": 2.0}
    rows = side_by_side.with_ratios(["standard", harness.COPY, "x"], times)
    assert {row: numbers["ratio"] for row, numbers in rows.items()} == {
        "standard": 1.0,
        harness.COPY: 0.75,
        "x": 1.5,
    }
    assert rows["x"] == {"seconds": 3.0, "ratio": 1.5, "seconds_before": 2.0, "ratio_to_before": 1.5}
    assert "ratio_to_before" not in rows[harness.COPY]


def test_two_checkouts_are_timed_side_by_side(tmp_path, capsys):
    """The other one here: a package with the two public classes, which leaves a trace where it was imported."""
    package = tmp_path / "other/lr_attnres"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        f"__path__.append({str(ROOT / 'lr_attnres')!r})\n"
        "from .configuration_lr_attnres import LRAttnResConfig\n"
        "from .modeling_lr_attnres import LRAttnResForCausalLM\n"
        "Path(__file__).with_name('imported').touch()\n"
    )
    options = ["--modes", "eager", "--rows", "sliced-n8-r64", harness.NAIVE, "--output", str(tmp_path)]
    parser = side_by_side.timing_parser("", repeats=1, layers=1, tokens=2)
    side_by_side.time_rows(
        "decode", None, parser.parse_args([*options, "--batch", "2", "--against", str(package.parent)])
    )
    assert (package / "imported").exists() and "of before" in capsys.readouterr().out
    content = json.loads((tmp_path / "decode_batch2.json").read_text())
    assert (
        content["settings"] == {"layers": 1, "tokens": 2, "batch": 2}
        and content["machine"]["torch"] == torch.__version__
    )
    rows = content["modes"]["eager"]["rows"]
    assert list(rows) == ["standard", harness.COPY, "sliced-n8-r64", harness.NAIVE]
    assert all(numbers["seconds"] > 0 for numbers in rows.values())
    assert [row for row in rows if "ratio_to_before" in rows[row]] == ["standard", harness.COPY, "sliced-n8-r64"]


def test_a_checkout_without_the_package_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match=f"{tmp_path} has no package lr_attnres"):
        side_by_side.Worker("decode", tmp_path, []).__enter__()


def test_a_mode_that_is_not_timed_is_kept(monkeypatch, tmp_path):
    """From a report with the same sizes on the same machine; a mode that is timed again is replaced."""
    clock = itertools.count(1)
    monkeypatch.setattr(side_by_side, "time_checkouts", lambda name, rows, *_: dict.fromkeys(rows, next(clock)))

    def times(*arguments):
        parser = side_by_side.timing_parser("", repeats=3, layers=2, tokens=4)
        arguments = parser.parse_args([*arguments, "--rows", "standard", "--output", str(tmp_path)])
        side_by_side.time_rows("x", None, arguments)
        modes = json.loads((tmp_path / "x.json").read_text())["modes"]
        return {mode: (modes[mode]["repeats"], modes[mode]["rows"]["standard"]["seconds"]) for mode in modes}

    assert times("--modes", "eager") == {"eager": (3, 1)}
    assert times("--modes", "compiled", "--repeats", "5") == {"eager": (3, 1), "compiled": (5, 2)}
    assert times("--modes", "eager", "--repeats", "7") == {"compiled": (5, 2), "eager": (7, 3)}
    assert times("--modes", "eager", "--tokens", "8") == {"eager": (3, 4)}
    monkeypatch.setattr(side_by_side, "machine", lambda: {"device": "another"})
    assert times("--modes", "compiled", "--tokens", "8") == {"compiled": (3, 5)}


@pytest.mark.parametrize("row", harness.ROWS)
def test_every_row_takes_a_training_step(row):
    """Of all models on the same weights, each of which changes."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    harness.shared_parameters.clear()
    model = harness.share_parameters(harness.build(row, vocab_size=32, **sizes))
    again = harness.share_parameters(harness.build(row, vocab_size=32, **sizes))
    assert all(one is other for one, other in zip(model.parameters(), again.parameters(), strict=True))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert harness.seconds(harness.training_step(model, torch.arange(8)[None])) > 0
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters()))


@pytest.mark.parametrize("row", ["sliced-n8-r64", "projected-full-r32", harness.NAIVE])
def test_the_depth_part_alone(row, monkeypatch):
    """It runs forward and backward through every site."""
    gradients = []
    backward = torch.autograd.backward

    def record(hidden, *arguments):
        backward(hidden, *arguments)
        gradients.append(len(hidden))

    monkeypatch.setattr(torch.autograd, "backward", record)
    depth_read.depth_part(row, layers=2, tokens=3)()
    assert gradients == [4]


def test_the_naive_read_keeps_more_memory():
    sizes = [memory.saved_bytes(row, layers=4, tokens=8) for row in ("standard", "attnres-full", harness.NAIVE)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[1] < sizes[2]


PARTS = {
    # class or module, name of the function, position of what is changed, a row that uses it
    "DepthMix": (depth_routing.DepthMix, "forward", 0, "sliced-n8-r64"),
    "DepthRead of two": (depth_routing.DepthRead, "forward", 1, "sliced-n8-r64"),
    "DepthRead of many": (depth_routing.DepthRead, "forward", 1, "sliced-full-r64"),
    "DepthBank": (depth_state.DepthBank, "read", 2, "sliced-n8-r64"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_wrong_read_is_not_timed(part, monkeypatch):
    """Wrong: with logits, or in the bank emitted values, that are a little too large."""
    owner, name, position, row = PARTS[part]
    harness.check_against_naive_read([row])
    right = getattr(owner, name)

    def wrong(*inputs):
        inputs = [*inputs]
        given = inputs[position]
        inputs[position] = tuple(1.01 * tensor for tensor in given) if isinstance(given, tuple) else 1.01 * given
        return right(*inputs)

    monkeypatch.setattr(owner, name, wrong if part == "DepthBank" else staticmethod(wrong))
    with pytest.raises(AssertionError, match=row):
        harness.check_against_naive_read([row])
