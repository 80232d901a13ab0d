"""The study of a real model, with a small one: what each method trains, its JSON, and the table of the page."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from common import perturb
from transformers import LlamaConfig, LlamaForCausalLM


ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples/real_weights"
STUDY = yaml.safe_load((FOLDER / "study.yaml").read_text()) | {"sequence_length": 32, "steps": 2, "validation_rows": 2}
SIZES = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import study

    yield study
    for name in ("study", "tables", "corpus", "run", "measure", "sweep", "report"):  # test_miniature.py has its own
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    return perturb(LlamaForCausalLM(LlamaConfig(vocab_size=257, **SIZES, num_key_value_heads=2))).eval()


METHODS = STUDY["compared"] | STUDY["explored"]


@pytest.mark.parametrize("method", METHODS)
def test_each_method_starts_from_the_original_and_trains_its_own_parameters(method, study, llama, token_data):
    settings = study.settings_of(STUDY, {"method": method, "text": "wikitext", "rate": 1e-2, "seed": 0})
    model = study.build(llama, settings, token_data)
    tokens = torch.arange(20)[None] * 7
    if method != "prompt":  # a prompt changes the start
        with torch.no_grad():
            expected = llama(tokens).logits
            difference = (model(input_ids=tokens).logits - expected).abs().max()
        assert difference <= 1e-5 * expected.abs().max()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    curves = study.train(model.train(), token_data, settings)
    has_queries = any("depth_queries" in name for name in trained)
    assert all(norm > 0 for norm in curves["gradient_norms"])
    assert all((norm > 0) == has_queries for norm in curves["query_gradient_norms"])
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == trained
    if method.startswith("queries") and method != "queries-and-lora":
        assert trained == {"model.depth_queries.weight"}


def test_runs_are_resumed_and_become_the_table(study, llama, token_data, tmp_path, monkeypatch, capsys):
    tables = __import__("tables")
    compared = {name: STUDY["compared"][name] | {"rates": [1e-4, 1e-2]} for name in ("queries", "norms")}
    small = STUDY | {"compared": compared, "explored": {}, "texts": ["wikitext"], "seeds": [0, 1]}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(small))
    monkeypatch.setattr(study, "prepare", lambda settings, work: (llama, dict.fromkeys(study.TEXTS, token_data)))
    answer = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    monkeypatch.setattr(study, "chat_answers", lambda settings, work: [answer])
    flags = ["--study", tmp_path / "study.yaml", "--work", tmp_path / "work", "--results", tmp_path / "results"]
    monkeypatch.setattr(sys, "argv", ["study.py", *map(str, flags)])
    study.main()
    names = {path.stem for path in (tmp_path / "results").iterdir()}
    tuned = {f"{method}-wikitext-{rate}-seed0" for method in compared for rate in ("0.0001", "0.01")}
    best = {method: study.best_rate(small, method, tmp_path / "results") for method in compared}
    assert names == tuned | {f"{method}-wikitext-{rate:g}-seed1" for method, rate in best.items()}
    for method, rate in best.items():
        found = [json.loads((tmp_path / f"results/{name}.json").read_text()) for name in tuned if method in name]
        assert min(found, key=lambda result: result["after"]["wikitext"])["settings"]["rate"] == rate
    diverged = tmp_path / f"results/queries-wikitext-{best['queries']:g}-seed0.json"
    content = diverged.read_text()
    diverged.write_text(json.dumps(json.loads(content) | {"after": {"wikitext": float("nan")}}))
    assert study.best_rate(small, "queries", tmp_path / "results") != best["queries"]
    diverged.write_text(content)
    last = f"norms-wikitext-{best['norms']:g}-seed1"
    (tmp_path / f"results/{last}.json").unlink()
    capsys.readouterr()
    study.main()
    assert [line for line in capsys.readouterr().out.splitlines() if "->" not in line] == [last]
    results = tables.load_results(tmp_path / "results")
    assert all(result["after"]["wikitext"] != result["before"]["wikitext"] for result in results)
    assert [len(result["training_losses"]) for result in results] == [2] * 6
    depths = [result["depth"] for result in results if result["settings"]["method"] == "queries"]
    assert [(len(depth["output_sizes"]), len(depth["effective_sources"])) for depth in depths] == [(5, 4)] * 3
    rows = tables.rows_of(results)
    seeds = {(row[1], row[2]): row[4] for row in rows if row[4] == "2"}
    assert seeds == {("`queries`", "256"): "2", ("`norms`", "1,280"): "2"} and len(rows) == 4
    assert all(("±" in cell) == (row[4] == "2") for row in rows for cell in row[5:])
    assert tables.section(results).count("| text |") == 2
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(small | {"steps": 3}))
    with pytest.raises(SystemExit, match="was made with other settings"):
        study.main()


def test_the_page_is_written_from_the_committed_results(study):
    tables = __import__("tables")
    page = (ROOT / "docs/upgrade.md").read_text()
    assert tables.with_section(page, tables.load_results()) == page
    whole = yaml.safe_load((FOLDER / "study.yaml").read_text())
    runs = [run for method in METHODS for run in study.tuning_runs(whole, method)]
    assert len({study.name_of(run) for run in runs}) == 3 * len(METHODS)
    for file in (FOLDER / "results").glob("*.json"):
        settings = json.loads(file.read_text())["settings"]
        run = {name: settings[name] for name in ("method", "text", "rate", "seed")}
        assert run["method"] in METHODS
        assert settings == study.settings_of(whole, run)
