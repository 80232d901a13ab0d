"""The miniature: its sweep is what it says, runs end to end and resumes; the page is what the results say."""

import json
import sys
from pathlib import Path

import processes
import pytest
import yaml

from lr_attnres.evaluation import evaluate_folder
from lr_attnres.metrics import read_metrics
from lr_attnres.training_arguments import PAPER_VARIANTS


ROOT = Path(__file__).parents[1]
MINIATURE = ROOT / "examples/miniature"
sys.path.insert(0, str(MINIATURE))

import run  # noqa: E402
import sweep as sweeps  # noqa: E402
from measure import as_analysis  # noqa: E402


CONTINUED = ("continued-standard", "continued-projected-n2-r4")
KEY_ROWS = ("standard", "attnres-n8", "projected-n8-r4", "sliced-n8-r8")


def test_the_sweep_is_the_paper_s_table():
    sweep = sweeps.load_sweep()
    assert sorted(sweep.rows.values()) == sorted(PAPER_VARIANTS)
    runs = sweep.runs()
    for row in [*KEY_ROWS, *sweep.continued]:
        assert [run.seed for run in runs if run.row == row] == [0, 1, 2]
    assert {run.row for run in runs} == {*sweep.rows, *sweep.continued}
    assert [run.name for run in runs[:4]] == [
        f"{row}-seed0" for row in ("standard", "sliced-n8-r8", "attnres-n8", "projected-n8-r4")
    ]
    recipes = [sweep.arguments(run, Path(), Path()).bound() for run in runs]
    for recipe in recipes:
        for name in ("variant", "seed", "init_from"):
            del recipe[name]
        assert recipe == recipes[0]  # one for all
    assert sweep.steps * sweep.recipe["batch_tokens"] >= 5_000_000
    positions = {run: index for index, run in enumerate(runs)}
    assert all(positions[run.baseline] < positions[run] for run in runs if run.is_continued)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rows": {"standard": "standard", "sliced-n8-r8": "sliced-n9"}}, "no row of the paper"),
        ({"rows": {"standard": "standard", "sliced-8": "standard"}}, "`variant` is 'sliced-8'"),
        ({"order": [{"seeds": [0], "rows": ["attnres-n3"]}]}, "`order` has 'attnres-n3'"),
        ({"order": [{"seeds": [0, 0], "rows": ["standard"]}]}, "a run twice"),
        ({"recipe": {"batch_tokens": 4096, "lr_moun": 0.1}}, "did you mean lr_muon"),
        ({"tokens": 0}, "`tokens` is 0"),
        ({"seeds": [0]}, "must have the keys"),
    ],
)
def test_a_bad_sweep_is_refused(change, message, tmp_path):
    values = yaml.safe_load(sweeps.SWEEP.read_text())
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(values | change))
    with pytest.raises(ValueError, match=message):
        sweeps.load_sweep(tmp_path / "sweep.yaml")


@pytest.fixture(scope="module")
def micro(tmp_path_factory) -> Path:
    """A sweep of four rows that takes moments, and a text for it."""
    folder = tmp_path_factory.mktemp("micro")
    texts = [" ".join(str((i * n) % 97) for i in range(60 + 7 * n % 90)) for n in range(80)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    model = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    recipe = {"model": model, "batch_tokens": 128, "micro_batch_size": 4, "lr_muon": 0.01, "lr_adamw": 0.01}
    recipe |= {"warmup_steps": 2, "log_steps": 1, "save_steps": 3}
    micro = {
        "tokens": 1024,
        "data": {"sequence_length": 32, "train_tokenizer": 280, "validation_fraction": 0.1},
        "recipe": recipe,
        "rows": {"standard": "standard", "sliced-n2-r4": "sliced-n8-r64"},
        "continued": {"continued-standard": "standard", "continued-projected-n2-r4": "projected-n2-r4"},
        "order": [{"seeds": [0], "rows": ["standard", "sliced-n2-r4"]}]
        + [{"seeds": [0], "rows": ["continued-standard", "continued-projected-n2-r4"]}],
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(micro))
    return folder


@pytest.fixture(scope="module")
def micro_results(micro) -> Path:
    """Results of the micro sweep, whose second row was killed and, started again, stopped once more."""
    sweep, work, results = sweeps.load_sweep(micro / "sweep.yaml"), micro / "work", micro / "results"
    stops = iter([None, ("killed in a step", 5), ("terminated", 2), None, None, None])
    calls = []

    def call(command: list[str]) -> int:
        assert command[:3] == [sys.executable, "-m", "lr_attnres.cli"]
        calls.append(command[command.index("--output-dir") + 1].rsplit("/", 1)[1])
        return processes.run(processes.command, command[3:], next(stops))[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "call", call)
        options = (work, results, [str(micro / "text.jsonl")])
        chosen = sweep.runs(["standard", "sliced-n2-r4"])
        failed = run.run_sweep(sweep, chosen, *options)
        assert failed == ["sliced-n2-r4-seed0: training ended with code -9, see above."]
        assert [path.name for path in results.iterdir()] == ["standard-seed0.json"]
        with pytest.raises(SystemExit, match="143"):
            run.run_sweep(sweep, chosen, *options)
        before = (results / "standard-seed0.json").stat().st_mtime_ns
        assert run.run_sweep(sweep, sweep.runs(), *options) == []
        assert run.run_sweep(sweep, sweep.runs(), *options) == []  # nothing is left to do
        assert (results / "standard-seed0.json").stat().st_mtime_ns == before
    assert calls == ["standard-seed0"] + 3 * ["sliced-n2-r4-seed0"] + [f"{row}-seed0" for row in CONTINUED]
    return results


def test_a_micro_sweep(micro, micro_results):
    """Every row has its loss and statistics, from a run that saw all of its tokens once, interrupted or not."""
    results = {path.stem: json.loads(path.read_text()) for path in micro_results.iterdir()}
    assert len(results) == 4 and not [*micro_results.glob(".*")]
    for name, result in results.items():
        records = read_metrics(micro / f"work/runs/{name}/metrics.jsonl")
        assert [record["step"] for record in records] == list(range(1, 9))
        assert result["tokens"] == 1024 and result["validation_loss"] == records[-1]["validation_loss"]
        assert result["gradient_norm"] == pytest.approx(sum(r["grad_norm"] for r in records) / 8)
        found = evaluate_folder(micro / f"work/runs/{name}/model", micro / "work/data")
        assert result["validation_loss"] == pytest.approx(found.loss, abs=1e-6)
        routed = result["variant"] != "standard"
        assert len(result["depth"]["effective_sources"]) == (4 if routed else 0)
        analysis = as_analysis(result)
        assert not routed or analysis.tensors["depth_weights"].nansum(-1).tolist() == pytest.approx([1] * 4, abs=1e-4)
        assert not (micro / f"work/runs/{name}/checkpoints").exists()
    # A continued run goes on: it starts where the baseline ended, whatever it is continued as.
    ends = read_metrics(micro / "work/runs/standard-seed0/metrics.jsonl")[-1]["loss"]
    starts = [read_metrics(micro / f"work/runs/{row}-seed0/metrics.jsonl")[0]["loss"] for row in CONTINUED]
    assert starts[0] == pytest.approx(starts[1], abs=1e-5) and abs(starts[0] - ends) < 0.5
    assert results["sliced-n2-r4-seed0"]["curve"]["tokens"][-1] == 1024


def test_results_of_another_recipe_are_refused(micro, micro_results):
    sweep = sweeps.load_sweep(micro / "sweep.yaml", tokens=512)
    with pytest.raises(ValueError, match="standard-seed0.json was made with `steps` = 8, this sweep has 4"):
        run.run_sweep(sweep, sweep.runs(), micro / "work", micro_results)
    with pytest.raises(ValueError, match="trained by another recipe"):
        run.train_row(sweep, sweep.run("standard", 0), micro / "work/data", micro / "work")
    missing = sweep.run("continued-standard", 5)
    with pytest.raises(ValueError, match="train standard-seed5 first"):
        run.train_row(sweep, missing, micro / "work/data", micro / "work")
