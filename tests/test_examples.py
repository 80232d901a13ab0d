"""Every example runs on its own and says what is true; every Python snippet of the README and of docs/ runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import BYTE_VOCAB_SIZE, byte_tokenizer, save_text_model
from transformers import AutoModelForCausalLM


ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run_example(name: str, *arguments: object) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_quickstart(tmp_path):
    output = run_example("quickstart.py", "--steps", 50, "--output", tmp_path / "model")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert losses[0] > 5 and losses[-1] < 3  # log(256) is 5.5
    assert "loaded back as LRAttnResForCausalLM" in output and "generated: Four score and seven" in output
    assert (tmp_path / "model/modeling_lr_attnres.py").exists()


def test_readme_snippets_run_in_order(tmp_path):
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))))
    snippets = re.findall(r"```python\n(.*?)```", pages, flags=re.DOTALL)
    runnable = [snippet for snippet in snippets if "openai" not in snippet]  # test_serving.py talks to a server
    assert len(runnable) >= 2
    (tmp_path / "snippets.py").write_text("\n".join(runnable))
    result = subprocess.run([sys.executable, "snippets.py"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "torch.Size([1, 8, 5])" in result.stdout


def test_tiny_model(tmp_path):
    assert run_example("tiny_model.py", tmp_path) == f"saved a tiny model in {tmp_path}\n"
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.vocab_size == BYTE_VOCAB_SIZE


def test_publish_model():
    output = run_example("publish_model.py")
    assert "model.safetensors" in output and "to owner/name (main)" in output
    assert "license: apache-2.0" in output and "| weights | random |" in output


@pytest.mark.parametrize("variant", ["projected_block", "attnres_full"])
def test_vllm_backend(variant, tmp_path):
    save_text_model(tmp_path, variant)
    lines = run_example("vllm_backend.py", tmp_path).splitlines()
    assert len(lines) == 7 and all(line.startswith("yes  ") for line in lines[:-1])


@torch.no_grad()
def test_lm_eval_harness(tmp_path, monkeypatch):
    """The harness chooses what the summed log-probabilities of our own logits choose."""
    monkeypatch.syspath_prepend(EXAMPLES)
    model, tokenizer = save_text_model(tmp_path), byte_tokenizer()
    result = json.loads(run_example("lm_eval_harness.py", tmp_path).splitlines()[-1])

    def score(text: str, choice: str) -> float:
        tokens = tokenizer(text + choice, return_tensors="pt")["input_ids"]
        logits = model(tokens).logits[0, :-1].log_softmax(-1)
        chosen = logits.gather(-1, tokens[0, 1:, None]).squeeze(-1)
        return chosen[-len(choice) :].sum().item()

    from lm_eval_harness import QUESTIONS

    chosen = [max(range(2), key=lambda i, q=q: score(q["text"], q["choices"][i])) for q in QUESTIONS]
    assert result["chosen"] == chosen
    assert result["accuracy"] == sum(c == q["answer"] for c, q in zip(chosen, QUESTIONS)) / len(QUESTIONS)
