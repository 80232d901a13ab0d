"""Save, load, offload, and remote code: a saved folder works where the package cannot be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import VARIANTS, random_tokens, small_config, small_model
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import lr_attnres
from lr_attnres import LRAttnResForCausalLM, LRAttnResForSequenceClassification


CODE_FILES = {
    "configuration_lr_attnres.py",
    "depth_state.py",
    "depth_routing.py",
    "depth_routing_triton.py",
    "modeling_lr_attnres.py",
}


@pytest.mark.law
@pytest.mark.compatibility("Save and load")
@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip(variant, tmp_path):
    model, input_ids = small_model(variant), random_tokens(2, 7)
    model.save_pretrained(tmp_path)
    loaded, info = LRAttnResForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict())


def test_a_folder_saved_before_there_were_depth_heads_has_one(tmp_path):
    model, input_ids = small_model(), random_tokens(2, 7)
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields.pop("depth_heads") == 1
    (tmp_path / "config.json").write_text(json.dumps(fields))
    loaded = LRAttnResForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.depth_heads == 1
    assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)


def test_sharded_and_tied(tmp_path):
    model, input_ids = small_model("projected_block", tie_word_embeddings=True), random_tokens(2, 7)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2 and "lm_head.weight" not in index["weight_map"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)


def test_auto_classes_know_the_config():
    config = small_config()
    for auto_class, name in {
        AutoModel: "LRAttnResModel",
        AutoModelForCausalLM: "LRAttnResForCausalLM",
        AutoModelForSequenceClassification: "LRAttnResForSequenceClassification",
        AutoModelForTokenClassification: "LRAttnResForTokenClassification",
        AutoModelForQuestionAnswering: "LRAttnResForQuestionAnswering",
    }.items():
        assert type(auto_class.from_config(config)) is getattr(lr_attnres, name)
    assert type(AutoConfig.for_model("lr_attnres")) is lr_attnres.LRAttnResConfig


def test_missing_weights_are_initialised(tmp_path):
    """A standard checkpoint opened as a routed model: the queries are new and start at zero."""
    small_model("standard").save_pretrained(tmp_path)
    config = small_config("sliced_block")
    model, info = LRAttnResForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert info["missing_keys"] == {"model.depth_queries.weight"}
    assert not model.model.depth_queries.weight.any()


@pytest.mark.compatibility("Layers on the CPU and on disk (`device_map`)")
@pytest.mark.parametrize("variant", VARIANTS)
def test_disk_offload(variant, tmp_path):
    model, input_ids = small_model(variant), random_tokens(2, 7)
    expected = model(input_ids).logits
    model.save_pretrained(tmp_path / "model")
    device_map = dict.fromkeys(("model.rotary_emb", "model.norm", "model.embed_tokens", "model.layers.0"), "cpu")
    device_map |= {f"model.layers.{i}": "disk" for i in (1, 2, 3)} | {"lm_head": "disk"}
    for name in ("model.depth_queries", "model.depth_embedding_key"):
        if f"{name}.weight" in model.state_dict():
            device_map[name] = "disk"
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert offloaded.model.layers[2].mlp.up_proj.weight.is_meta
    torch.testing.assert_close(offloaded(input_ids).logits, expected)
    assert offloaded.generate(input_ids, max_new_tokens=3, eos_token_id=-1).shape == (2, 10)


# Remote code


def run_without_the_package(script: str, tmp_path: Path, *arguments) -> dict:
    """Run `script` in a fresh process that cannot import `lr_attnres`; it prints JSON on its last line."""
    blocker = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'lr_attnres':\n"
        "            raise ModuleNotFoundError('the package is blocked in this test')\n"
        "sys.meta_path.insert(0, Blocker())\n"
    )
    (tmp_path / "script.py").write_text(blocker + script)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_MODULES_CACHE")}
    environment |= {"HF_HOME": str(tmp_path / "hf_home")}
    result = subprocess.run(
        [sys.executable, "script.py", *map(str, arguments)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


EVERY_CLASS = """
import json, torch, transformers
folder, resaved = sys.argv[1:]
names = ["AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification",
         "AutoModelForTokenClassification", "AutoModelForQuestionAnswering"]
config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
modules = [type(config).__module__]
for name in names:
    model = getattr(transformers, name).from_pretrained(folder, trust_remote_code=True)
    modules.append(type(model).__module__)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
input_ids = torch.arange(3, 13)[None]
model.save_pretrained(resaved)
again = transformers.AutoModelForCausalLM.from_pretrained(resaved, trust_remote_code=True)
print(json.dumps({
    "modules": modules,
    "imported": "lr_attnres" in sys.modules,
    "logits": model(input_ids).logits.tolist(),
    "again": again(input_ids).logits.tolist(),
    "tokens": model.generate(input_ids, do_sample=False, max_new_tokens=5, eos_token_id=-1).tolist(),
}))
"""


@pytest.mark.compatibility("Remote code without this package")
@pytest.mark.parametrize("variant", ["standard", "attnres_full", "projected_block", "sliced_block_weighted_norms"])
def test_remote_code(variant, tmp_path):
    model = small_model(variant)
    model.save_pretrained(tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} >= CODE_FILES
    result = run_without_the_package(EVERY_CLASS, tmp_path, tmp_path / "model", tmp_path / "resaved")
    assert all(module.startswith("transformers_modules.") for module in result["modules"])
    assert not result["imported"]
    input_ids = torch.arange(3, 13)[None]
    logits = model(input_ids).logits
    torch.testing.assert_close(torch.tensor(result["logits"]), logits)
    assert result["again"] == result["logits"]
    greedy = model.generate(input_ids, do_sample=False, max_new_tokens=5, eos_token_id=-1)
    assert result["tokens"] == greedy.tolist()
    for name in CODE_FILES:
        assert (tmp_path / "resaved" / name).read_text() == (tmp_path / "model" / name).read_text()
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "resaved"))
    assert first["auto_map"] == second["auto_map"] and len(first["auto_map"]) == 6
    # and back into a process that has the package
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "resaved")(input_ids).logits, logits)


def test_every_head_saves_its_code(tmp_path):
    small_model(model_class=LRAttnResForSequenceClassification, num_labels=3).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} >= CODE_FILES
    assert set(config["auto_map"]) >= {"AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"}
