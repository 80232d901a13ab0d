"""A folder that does not load gives one line that names it; weights are checked against the config."""

import json
import os
import shutil
import signal

import pytest
import torch
from common import byte_tokenizer, save_text_model, small_model
from safetensors.torch import load_file, save_file
from test_convert import REFERENCES
from transformers import LlamaConfig

from lr_attnres import LRAttnResForSequenceClassification, cli
from lr_attnres.data.tokenizers import load_tokenizer
from lr_attnres.errors import LRAttnResError
from lr_attnres.folders.loading import load_config, load_language_model


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


def cut_weights(size):
    def edit(folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return edit


def set_weights(**weights):
    def edit(folder):
        path = folder / "model.safetensors"
        save_file(load_file(path) | weights, path, metadata={"format": "pt"})

    return edit


def set_index(content, name="model-00001-of-00001.safetensors"):
    """Move the weights to the file `name`, and write this index."""

    def edit(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / "model.safetensors").rename(folder / name)
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return edit


def index_of(name):
    return set_index({"metadata": {}, "weight_map": {"lm_head.weight": name}})


def make_pipe(name):
    def edit(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return edit


def pipe_as_shard(folder):
    index_of("model-00002-of-00002.safetensors")(folder)
    make_pipe("model-00002-of-00002.safetensors")(folder)


HEAD = torch.zeros(257, 32)


DAMAGES = [
    (shutil.rmtree, "is not on this machine, nor a Hub repository of the form owner/name"),
    (lambda folder: (folder / "config.json").unlink(), "has no config.json; give a folder"),
    (write("config.json", "{"), "the config.json of .* cannot be used: .* not a valid JSON file"),
    (write("config.json", "[1]"), "the config.json of .* cannot be used: "),
    (set_field(depth_key_rank=999), r"model: `depth_key_rank` is 999; it must lie in 1..hidden_size = 32"),
    (set_field(depth_key_rank="x"), "model: Field 'depth_key_rank' expected int, got str"),
    (LlamaConfig().save_pretrained, "holds a llama model, not an lr_attnres one; `lr-attnres upgrade` makes one"),
    (cut_weights(0), "model.safetensors cannot be read: .*header"),
    (cut_weights(1000), "model.safetensors cannot be read: .*header"),
    (cut_weights(40_000), "model.safetensors cannot be read: "),
    (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors: save the model with"),
    (
        set_field(intermediate_size=48),
        r"the weight .*_proj.weight of .* has shape \[.*40.*\]; its config asks for \[.*48",
    ),
    (set_field(residual_type="projected"), "weight"),
    (set_field(dtype="nope"), "model: `dtype` is 'nope'; it must be a floating dtype"),
    (set_field(sliding_window=4), "model: `sliding_window` is 4; this model has no such"),
    (write("generation_config.json", "[]"), "generation_config.json cannot be used: "),
    (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "has no model.safetensors, only pytorch_model.bin, which may run code when it is read: save the model with",
    ),
    (set_field(architectures=["Other"]), r"`architectures` of .* is \['Other'\]; expected LRAttnResForCausalLM"),
    (set_field(transformers_weights="x.safetensors"), "`transformers_weights` is 'x.safetensors': remove this field"),
    (set_field(attn_implementation="owner/kernel"), "`attn_implementation` is 'owner/kernel', code on the Hub"),
    (write("adapter_config.json", "{}"), "holds an adapter: merge it into its model"),
    (
        set_weights(**{"lm_head.weight": HEAD + torch.nan}),
        "has 1 weights with NaN or infinite values, such as lm_head",
    ),
    (
        set_weights(**{"lm_head.weight": HEAD - torch.inf}),
        "has 1 weights with NaN or infinite values, such as lm_head",
    ),
    (set_weights(**{"lm_head.weight": HEAD.int()}), "the weight lm_head.weight has dtype I32; expected one of F64"),
    (set_weights(other=HEAD, more=HEAD + 1), "has 2 weights that its config does not ask for: more, other."),
    (set_index({"metadata": {}, "weight_map": 3}), "index.json is not an index of safetensors files"),
    (set_index({"metadata": {}, "weight_map": {}}), "index.json is not an index of safetensors files"),
    (set_index({"weight_map": {"a": "model-00001-of-00001.safetensors"}}), "is not an index of safetensors files"),
    (index_of("absent.safetensors"), "names absent.safetensors, which is not in the folder"),
    (index_of("../model.safetensors"), "names '../model.safetensors', which is not a safetensors file of this"),
    (index_of("/dev/zero"), "names '/dev/zero', which is not a safetensors file of this"),
    (index_of("weights.bin"), "names 'weights.bin', which is not a safetensors file of this"),
    (pipe_as_shard, "names model-00002-of-00002.safetensors, which is not in the folder"),
    (make_pipe("model.safetensors"), "has no model.safetensors"),
    (make_pipe("config.json"), "has no config.json"),
]


@pytest.mark.parametrize("damage, message", DAMAGES, ids=[row[1][-30:] for row in DAMAGES])
def test_a_damaged_folder(damage, message, saved, tmp_path):
    damage(shutil.copytree(saved, tmp_path / "model"))
    with pytest.raises(LRAttnResError, match=message) as raised:
        load_language_model(tmp_path / "model", "cpu")
    assert str(tmp_path / "model") in str(raised.value) and "\n" not in str(raised.value)


def test_code_of_a_folder_is_not_offered_to_be_run(saved, tmp_path, monkeypatch):
    """Transformers would ask the user, and run the code after a yes."""
    folder = shutil.copytree(saved, tmp_path / "model")
    set_field(model_type="other", auto_map={"AutoConfig": "other.Other"})(folder)
    (folder / "other.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(LRAttnResError, match="cannot be used: "):
        load_language_model(folder, "cpu")
    assert not (tmp_path / "was-run").exists()


def test_a_model_with_another_head(saved, tmp_path):
    small_model(model_class=LRAttnResForSequenceClassification).save_pretrained(tmp_path)
    with pytest.raises(LRAttnResError, match="is .'LRAttnResForSequenceClassification'.; expected LRAttnResForCausal"):
        load_language_model(tmp_path, "cpu")


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_tied_head(is_copied, tmp_path):
    """Older folders hold a copy of the embedding as head."""
    model = small_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    if is_copied:
        set_weights(**{"lm_head.weight": model.model.embed_tokens.weight.detach().clone()})(tmp_path)
    loaded = load_language_model(tmp_path, "cpu")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    set_weights(**{"lm_head.weight": torch.zeros(61, 32)})(tmp_path)
    with pytest.raises(LRAttnResError, match="`tie_word_embeddings` is True, but lm_head.weight is not the embedding"):
        load_language_model(tmp_path, "cpu")


@pytest.mark.parametrize(
    "command",
    [
        "prepare pipe.txt out",
        "prepare sotu out --tokenizer pipe.txt",
        "convert pipe.txt out",
        "convert folder out",
        f"convert {REFERENCES}/baseline.pt out --tokenizer pipe.txt",
        "upgrade pipe.txt out",
        "push owner/name pipe.txt --dry-run",
        "train pipe.txt",
        "generate pipe.txt --prompt x",
    ],
)
def test_commands_refuse_a_pipe_at_once(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("pipe.txt", "folder/final_model.pt"):
        os.mkfifo(name)
    signal.alarm(120)  # ends the test process, where reading the pipe would wait forever
    assert cli.main(command.split()) == 1
    signal.alarm(0)
    error = capsys.readouterr().err
    assert "Error: " in error.splitlines()[-1] and ("pipe.txt" in error or "final_model.pt" in error)
    assert not (tmp_path / "out").exists()


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for load in (load_config, load_tokenizer, load_language_model):
        with pytest.raises(LRAttnResError, match="pipe is a pipe, not a file or folder: copy its contents"):
            load(tmp_path / "pipe")


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
def test_a_source_that_does_not_exist(source, options, message):
    for load in (load_config, load_tokenizer, load_language_model):
        with pytest.raises(LRAttnResError, match=message):
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
    with pytest.raises(LRAttnResError, match=message):
        load_tokenizer(tmp_path / "model")


def test_a_tokenizer_with_more_tokens_than_the_model(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "model")
    config = load_config(tmp_path / "model")
    with pytest.raises(LRAttnResError, match="has 258 tokens.* 257"):
        load_tokenizer(tmp_path / "model", config.vocab_size)
    assert len(load_tokenizer(tmp_path / "model")) == 258
    assert len(load_tokenizer(saved, config.vocab_size)) == 257


@pytest.mark.parametrize("device", ["abacus", "meta", *([] if torch.cuda.is_available() else ["cuda", "cuda:7"])])
def test_a_missing_device_is_reported_before_anything_is_read(device):
    with pytest.raises(LRAttnResError, match=f"`device` {device} cannot be used: "):
        load_language_model("nowhere", device)


def test_folders_of_one_name_run_the_installed_code(saved, tmp_path):
    """Transformers gives the second folder of a name the code of the first; the commands run no code of a folder."""
    for number in (1, 2):
        folder = shutil.copytree(saved, tmp_path / str(number) / "model")
        (folder / "modeling_lr_attnres.py").write_text(f"raise SystemExit('code of folder {number}')")
        model = load_language_model(folder)
        assert type(model).__module__ == "lr_attnres.modeling_lr_attnres"
        assert cli.main(["generate", str(folder), "--prompt", "a", "--max-new-tokens", "1"]) in (0, None)
