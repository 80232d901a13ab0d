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


@pytest.mark.parametrize("method", STUDY["methods"])
def test_each_method_starts_from_the_original_and_trains_its_own_parameters(method, study, llama, token_data):
    run = {"method": method, "text": "wikitext", "rate": 1e-2, "seed": 0}
    model = study.build(llama, run, STUDY["methods"][method], token_data)
    tokens = torch.arange(20)[None] * 7
    if method != "prompt":  # a prompt changes the start
        with torch.no_grad():
            expected = llama(tokens).logits
            difference = (model(input_ids=tokens).logits - expected).abs().max()
        assert difference <= 1e-5 * expected.abs().max()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    study.train(model.train(), token_data, STUDY, run)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == trained
    if method.startswith("queries") and method != "queries-and-lora":
        assert trained == {"model.depth_queries.weight"}


def test_runs_are_resumed_and_become_the_table(study, llama, token_data, tmp_path, monkeypatch, capsys):
    tables = __import__("tables")
    small = STUDY | {
        "stages": [{"methods": ["queries", "norms"], "texts": ["wikitext"], "rates": [1e-2], "seeds": [0, 1]}]
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(small))
    monkeypatch.setattr(study, "prepare", lambda settings, work: (llama, dict.fromkeys(study.TEXTS, token_data)))
    answer = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    monkeypatch.setattr(study, "chat_answers", lambda settings, work: [answer])
    flags = ["--study", tmp_path / "study.yaml", "--work", tmp_path / "work", "--results", tmp_path / "results"]
    monkeypatch.setattr(sys, "argv", ["study.py", *map(str, flags)])
    study.main()
    (tmp_path / "results/norms-wikitext-0.01-seed1.json").unlink()
    capsys.readouterr()
    study.main()
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")] == [
        "[4/4] norms-wikitext-0.01-seed1"
    ]
    results = tables.load_results(tmp_path / "results")
    assert all(result["after"]["wikitext"] != result["before"]["wikitext"] for result in results)
    assert [len(result["training_losses"]) for result in results] == [2] * 4
    rows = tables.rows_of(results)
    assert [row[1:5] for row in rows] == [["`queries`", "256", "0.01", "2"], ["`norms`", "1,280", "0.01", "2"]]
    assert all("±" in cell for row in rows for cell in row[5:])
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(small | {"steps": 3}))
    with pytest.raises(SystemExit, match="was made with other settings"):
        study.main()


def test_the_page_is_written_from_the_committed_results(study):
    tables = __import__("tables")
    page = (ROOT / "docs/upgrade.md").read_text()
    assert tables.with_section(page, tables.load_results()) == page
    for file in (FOLDER / "results").glob("*.json"):
        settings = json.loads(file.read_text())["settings"]
        run = {name: settings[name] for name in ("method", "text", "rate", "seed")}
        assert settings == study.settings_of(yaml.safe_load((FOLDER / "study.yaml").read_text()), run)
