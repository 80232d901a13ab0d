"""What does not load is told in one line that names the folder; what loads is checked against its own config."""

import json
import shutil

import pytest
import torch
from common import byte_tokenizer, save_text_model, small_model
from transformers import LlamaConfig

from lr_attnres import LRAttnResForSequenceClassification
from lr_attnres.loading import LoadingError, load_config, load_language_model, load_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_text_model(folder)
    return folder


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


def set_field(**fields):
    def edit(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


DAMAGES = [
    (shutil.rmtree, "is not on this machine, nor a Hub repository of the form owner/name"),
    (lambda folder: (folder / "config.json").unlink(), "has no config.json; give a folder"),
    (write("config.json", "{"), "the config.json of .* cannot be used: .* not a valid JSON file"),
    (write("config.json", "[1]"), "the config.json of .* cannot be used: "),
    (set_field(depth_key_rank=999), r"model: `depth_key_rank` is 999; it must lie in 1..hidden_size = 32"),
    (set_field(depth_key_rank="x"), "model: Field 'depth_key_rank' expected int, got str"),
    (LlamaConfig().save_pretrained, "holds a llama model, not an lr_attnres one; `lr-attnres upgrade` makes one"),
    (cut_weights, "the weights of .* cannot be loaded: .*header"),
    (lambda folder: (folder / "model.safetensors").unlink(), "the weights of .* cannot be loaded: .*no file named"),
    (
        set_field(intermediate_size=48),
        r"the weight .*_proj.weight of .* has shape \[.*40.*\]; its config asks for \[.*48",
    ),
    (set_field(residual_type="projected"), "weight"),
    (set_field(dtype="nope"), "the config.json of .* cannot be used: `dtype` is 'nope'"),
    (set_field(sliding_window=4), "model: `sliding_window` is 4; every layer attends to all tokens"),
    (write("generation_config.json", "[]"), "the weights of .* cannot be loaded: "),
    (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "cannot be loaded: "),
]


@pytest.mark.parametrize("damage, message", DAMAGES, ids=[row[1][:30] for row in DAMAGES])
def test_a_damaged_folder(damage, message, saved, tmp_path):
    damage(shutil.copytree(saved, tmp_path / "model"))
    with pytest.raises(LoadingError, match=message) as raised:
        load_language_model(tmp_path / "model", "cpu")
    assert str(tmp_path / "model") in str(raised.value) and "\n" not in str(raised.value)


def test_code_of_a_folder_is_not_offered_to_be_run(saved, tmp_path, monkeypatch):
    """Transformers would ask, and run it after a yes."""
    folder = shutil.copytree(saved, tmp_path / "model")
    set_field(model_type="other", auto_map={"AutoConfig": "other.Other"})(folder)
    (folder / "other.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(LoadingError, match="cannot be used: "):
        load_language_model(folder, "cpu")
    assert not (tmp_path / "was-run").exists()


def test_a_model_with_another_head(saved, tmp_path):
    small_model(model_class=LRAttnResForSequenceClassification).save_pretrained(tmp_path)
    with pytest.raises(LoadingError, match="lacks 1 weights that its config asks for, such as lm_head.weight"):
        load_language_model(tmp_path, "cpu")


@pytest.mark.parametrize(
    "source, options, message",
    [
        ("", {}, "'' is not on this machine, nor a Hub repository"),
        ("a/b/c", {}, "'a/b/c' is not on this machine, nor a Hub repository"),
        ("owner/absent", {}, "owner/absent is not on this machine, and the Hub cannot be reached"),
        (__file__, {}, "test_loading.py is a file; give the folder of the model"),
        (".", {"revision": "v1"}, "`revision` goes with a Hub repository; . is on this machine"),
    ],
)
def test_a_source_that_is_none(source, options, message):
    for load in (load_config, load_tokenizer, load_language_model):
        with pytest.raises(LoadingError, match=message):
            load(source, **options)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: (folder / "tokenizer_config.json").unlink(), "has no tokenizer_config.json"),
        (write("tokenizer.json", "{"), "the tokenizer of .* cannot be loaded: Expecting property name"),
    ],
    ids=["absent", "broken"],
)
def test_a_damaged_tokenizer(damage, message, saved, tmp_path):
    damage(shutil.copytree(saved, tmp_path / "model"))
    with pytest.raises(LoadingError, match=message):
        load_tokenizer(tmp_path / "model")


def test_a_tokenizer_with_more_tokens_than_the_model(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "model")
    config = load_config(tmp_path / "model")
    with pytest.raises(LoadingError, match="has 258 tokens, its model knows 257"):
        load_tokenizer(tmp_path / "model", config)
    assert len(load_tokenizer(tmp_path / "model")) == 258
    assert len(load_tokenizer(saved, config)) == 257


@pytest.mark.parametrize("device", ["abacus", "meta", *([] if torch.cuda.is_available() else ["cuda", "cuda:7"])])
def test_a_device_that_is_not_there_is_told_before_anything_is_read(device):
    with pytest.raises(LoadingError, match=f"`device` {device} cannot be used: "):
        load_language_model("nowhere", device)
