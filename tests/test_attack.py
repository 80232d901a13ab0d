"""A sample of the attack (see tests/attack), and that it notices what it should."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent / "attack"))

from attack_everything import CASES, data, run_attack, work  # noqa: E402, F401
from attack_harness import Attack, Bug  # noqa: E402


SHARE = 0.015


@pytest.mark.parametrize("name", CASES)
def test_a_sample_succeeds_or_is_refused_in_one_line(name, work, data, monkeypatch):  # noqa: F811
    monkeypatch.chdir(work)
    attack = run_attack(name, work, data, int(CASES[name] * SHARE))
    assert attack.bugs == [] and attack.counts["refused"] > 0


def crash() -> None:
    raise KeyError("manifest")


def refuse() -> None:
    raise ValueError("`rows` is -1; prepare the folder again.")


def notice() -> None:
    raise Bug("damaged weights were accepted")


def test_the_attack_notices_a_traceback_and_silent_acceptance(tmp_path):
    cases = [crash, refuse, notice, lambda: None]
    attack = Attack("example", lambda chance, folder: (folder.name, cases[int(folder.name)]))
    attack.run(range(4), tmp_path)
    assert attack.counts == {"bug": 2, "refused": 1, "success": 1}
    assert "KeyError" in attack.bugs[0] and "accepted" in attack.bugs[1]
