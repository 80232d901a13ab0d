"""The worked examples of docs/extending.md: each diff applies, and the laws hold in the changed package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/extending.md").read_text(), flags=re.DOTALL)
LAWS = ROOT / "tests/extended_package.py"


def test_the_page_has_both_and_they_are_small():
    """As small as the page says: the lines that a file gains."""
    assert [re.findall(r"^\+\+\+ b/(\S+)", diff, flags=re.MULTILINE) for diff in DIFFS] == [
        ["lr_attnres/configuration_lr_attnres.py", "lr_attnres/depth_state.py"],
        ["lr_attnres/depth_routing.py"],
    ]
    assert [len(re.findall(r"^\+(?!\+)", diff, flags=re.MULTILINE)) for diff in DIFFS] == [3, 2]


@pytest.mark.parametrize("diff, cases", [*zip(DIFFS, ["strided", "not strided"])], ids=["key type", "source set"])
def test_the_laws_hold_in_the_changed_package(diff, cases, tmp_path):
    shutil.copytree(ROOT / "lr_attnres", tmp_path / "lr_attnres", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, check=True, text=True)
    # `-m pytest` puts the working folder, and so the changed copy, before any installed package.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(LAWS), "-k", cases]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
