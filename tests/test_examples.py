"""Every example runs on its own and says what is true."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from common import BYTE_VOCAB_SIZE, ONE_OF_EACH, byte_tokenizer, save_text_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lr_attnres import LRAttnResForCausalLM
from lr_attnres.training.optimizers import split_parameters


ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run_example(name: str, *arguments: object) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_quickstart(tmp_path):
    output = run_example("quickstart.py", "--steps", 20, "--output", tmp_path)
    before, after = map(float, re.search(r"before (\d+\.\d+), after (\d+\.\d+) nats", output).groups())
    entropy = float(re.search(r"unigram entropy of the text (\d+\.\d+)", output)[1])
    assert 7.5 < before < 7.8 and after < before - 0.5  # log(2048) is 7.6
    assert 5 < entropy < 7
    assert "loaded, 0 problems, logits [1, 8, 2048]" in output and "The Congress of the United States" in output
    assert (tmp_path / "run/model/modeling_lr_attnres.py").exists() and (tmp_path / "run/metrics.jsonl").exists()


def test_tiny_model(tmp_path):
    assert run_example("tiny_model.py", tmp_path) == f"saved a tiny model in {tmp_path}\n"
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.vocab_size == BYTE_VOCAB_SIZE


def test_upgrade_smollm2(tmp_path):
    """With a small Llama, whose adapter has other queries than its base; real_weights.py runs it with the real one."""
    config = LlamaConfig(
        vocab_size=BYTE_VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    options = ["--model", tmp_path / "llama", "--steps", 4, "--max-tokens", 8000, "--output", tmp_path / "out"]
    output = run_example("upgrade_smollm2.py", *options)
    losses = [float(loss) for loss in re.findall(r"step \d+: validation loss (\S+)", output)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert "without the adapter: " in output and "with the adapter: " in output
    assert (tmp_path / "out/figures/depth_weights.png").is_file()
    adapter = load_file(tmp_path / "out/run/adapter/routing_adapter.safetensors")
    assert adapter["depth_queries.weight"].abs().max() > 0


def test_publish_model():
    output = run_example("publish_model.py")
    assert "model.safetensors" in output and "to owner/name (main)" in output
    assert "license: apache-2.0" in output and "| weights | random |" in output


def test_publish_model_adds_nothing_to_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    import publish_model

    monkeypatch.setattr(publish_model, "push", lambda *args, **options: None)  # which loads it in a clean process
    save_text_model(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    publish_model.main(str(tmp_path))
    assert "license:" not in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def losses_before_and_after(output: str) -> list[float]:
    return [float(loss) for loss in re.search(r"validation loss (\S+) -> (\S+)", output).groups()]


def test_finetune_trainer(tmp_path):
    options = ["--steps", 40, "--sequence-length", 128, "--output", tmp_path]
    before, after = losses_before_and_after(run_example("finetune_trainer.py", *options))
    assert before > 5 and after < 3.5  # log(257) is 5.5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.model.depth_queries.weight.abs().max() > 0
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == "<|end|>"


def test_finetune_lora(tmp_path):
    options = ["--steps", 30, "--sequence-length", 128, "--output", tmp_path]
    before, after = losses_before_and_after(run_example("finetune_lora.py", *options))
    assert after < before - 0.1
    base, merged = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "merged"))
    for name, parameter in merged.named_parameters():
        adapted = "layers" in name or "depth_queries" in name
        assert torch.equal(parameter, base.get_parameter(name)) != adapted, name
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").vocab_size > 0  # `lr-attnres generate` needs it


def test_finetune_sft(tmp_path):
    output = run_example("finetune_sft.py", "--epochs", 2, "--output", tmp_path)
    assert "user: What is a source?\nassistant:" in output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").model.depth_queries.weight.abs().max() > 0


@pytest.mark.parametrize("path", sorted((EXAMPLES / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_configs(path):
    """Accelerate reads them, and they choose what their names say."""
    config = load_config_from_file(str(path))  # refuses keys that it does not know
    kinds = {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}
    assert config.distributed_type == kinds[path.stem.split("_")[0]] and config.mixed_precision == "bf16"
    if path.stem == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] in LRAttnResForCausalLM._no_split_modules


def test_plan_run_is_what_the_page_quotes(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import plan_run

    page = (ROOT / "docs/training_at_scale.md").read_text()
    lines = [*plan_run.compute(), *plan_run.speed(), *plan_run.pipeline(), f"| {plan_run.memory_row('standard')} |"]
    assert [line for line in lines if line not in page] == []
    for variant in plan_run.VARIANTS:
        config = plan_run.config_of(variant)
        with torch.device("meta"):
            model = LRAttnResForCausalLM(config)
        names = split_parameters(model)["muon"]
        muon = sum(model.get_parameter(name).numel() for name in names)
        assert plan_run.parameters(config) == (model.num_parameters(), muon)


def test_lm_eval_harness_alone():
    result = json.loads(run_example("lm_eval_harness.py").splitlines()[-1])
    assert len(result["chosen"]) > 1 and set(result["chosen"]) <= {0, 1}


@pytest.mark.compatibility("lm-evaluation-harness")
@torch.no_grad()
@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_lm_eval_harness(variant, tmp_path, monkeypatch):
    """The harness chooses what the summed log-probabilities of our own logits choose."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from lm_eval_harness import QUESTIONS, evaluate

    model, tokenizer = save_text_model(tmp_path, variant), byte_tokenizer()
    result = evaluate(str(tmp_path), tmp_path)

    def score(text: str, choice: str) -> float:
        tokens = tokenizer(text + choice, return_tensors="pt")["input_ids"]
        logits = model(tokens).logits[0, :-1].log_softmax(-1)
        chosen = logits.gather(-1, tokens[0, 1:, None]).squeeze(-1)
        return chosen[-len(choice) :].sum().item()

    chosen = [max(range(2), key=lambda i, q=q: score(q["text"], q["choices"][i])) for q in QUESTIONS]
    assert result["chosen"] == chosen
    assert result["accuracy"] == sum(c == q["answer"] for c, q in zip(chosen, QUESTIONS)) / len(QUESTIONS)
