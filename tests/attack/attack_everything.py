"""The attack: thousands of bad inputs from one seed. `make attack` runs it; `tests/test_attack.py` runs a sample.

    pytest tests/attack/attack_everything.py --cases 0.1

runs a tenth of every kind. The counts go to outputs/attack.json.
"""

import json
from pathlib import Path

import bad_checkpoints
import bad_command_lines
import bad_configs
import bad_folders
import bad_tokens
import hostile_folders
import pytest
from attack_harness import Attack
from common import save_text_model


ROOT = Path(__file__).parents[2]
CASES = {"configs": 3000, "folders": 800, "tokens": 1200, "checkpoints": 200, "hostile": 200, "command_lines": 800}


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("attack")


@pytest.fixture(scope="module")
def data(work) -> Path:
    bad_tokens.make_original(work / "data")
    return work / "data"


def make_attack(name: str, work: Path, data: Path) -> Attack:
    if name == "configs":
        return Attack(name, bad_configs.make_case)
    if name == "folders":
        return Attack(name, bad_folders.make_maker(work / "model", bad_folders.make_original(work / "model")))
    if name == "tokens":
        return Attack(name, bad_tokens.make_maker(data, bad_tokens.read(data)))
    if name == "checkpoints":
        expected = bad_checkpoints.make_original(data, work / "run")
        return Attack(name, bad_checkpoints.make_maker(data, work / "run", expected))
    save_text_model(work / name)
    if name == "hostile":
        return Attack(name, hostile_folders.make_maker(work / name, work / "sentinel"))
    return Attack(name, bad_command_lines.make_maker(work / name, data))


def run_attack(name: str, work: Path, data: Path, num_cases: int) -> Attack:
    attack = make_attack(name, work, data)
    attack.run(range(num_cases), work / f"cases-{name}")
    return attack


@pytest.mark.parametrize("name", CASES)
def test_every_case_succeeds_or_is_refused_in_one_line(name, work, data, request, monkeypatch):
    monkeypatch.chdir(work)
    attack = run_attack(name, work, data, max(1, int(CASES[name] * request.config.getoption("--cases"))))
    record = ROOT / "outputs/attack.json"
    record.parent.mkdir(exist_ok=True)
    counts = json.loads(record.read_text()) if record.exists() else {}
    record.write_text(json.dumps(counts | {name: dict(attack.counts)}, indent=2) + "\n")
    assert attack.bugs == [], "\n".join([f"{len(attack.bugs)} bugs", *attack.bugs[:20]])
