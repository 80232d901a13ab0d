"""Every example runs, and so does every Python snippet of the README."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
README_SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def run(*arguments, cwd: Path) -> str:
    result = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_quickstart(tmp_path):
    output = run(ROOT / "examples/quickstart.py", "--steps", 50, "--output", tmp_path / "model", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert losses[0] > 5 and losses[-1] < 3  # log(256) is 5.5
    assert "loaded back as LRAttnResForCausalLM" in output and "generated: Four score and seven" in output
    assert (tmp_path / "model/modeling_lr_attnres.py").exists()


def test_readme_snippets_run_in_order(tmp_path):
    if not README_SNIPPETS:
        pytest.fail("README.md has no Python snippet")
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # the snippets name files relative to the repository
    (tmp_path / "snippets.py").write_text("\n".join(README_SNIPPETS))
    assert "torch.Size([1, 8, 5])" in run("snippets.py", cwd=tmp_path)
    assert (tmp_path / "outputs/converted/model.safetensors").exists()
