"""Upgraded models give the logits of Transformers' Llama, Mistral, Qwen2 and Qwen3; unsupported fields are refused."""

import copy
import gc
import json
import shutil
import weakref
from functools import cache
from unittest.mock import Mock

import pytest
import torch
from command_line import CommandLine, hub_environment
from common import byte_tokenizer, perturb, random_tokens, small_model
from hub_server import HubServer, Repo
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from lr_attnres import cli
from lr_attnres.errors import LRAttnResError
from lr_attnres.folders import staging
from lr_attnres.folders.card import write_provenance
from lr_attnres.folders.clean_process import probe_logits
from lr_attnres.folders.pretrained_source import SavedModel, open_source
from lr_attnres.folders.upgrade import load_upgraded, upgrade_model


CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SOURCES = {
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama, like 3.2": (
        "llama",
        {
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "rope_parameters": LLAMA3 | {"rope_theta": 500_000.0, "original_max_position_embeddings": 16},
        },
    ),
    "llama, linear": ("llama", {"head_dim": 10, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama, gelu": ("llama", {"hidden_act": "gelu", "pretraining_tp": 2, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None, "rms_norm_eps": 1e-5}),
    "mistral, tied, of another shape": (
        "mistral",
        {
            "sliding_window": None,
            "tie_word_embeddings": True,
            "hidden_size": 48,
            "intermediate_size": 100,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
    ),
    "mistral, dynamic": (  # the text outgrows the context, so the frequencies change
        "mistral",
        {
            "sliding_window": None,
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
        },
    ),
    "qwen2": ("qwen2", {"num_key_value_heads": 4, "hidden_size": 16}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, yarn": (
        "qwen3",
        {
            "head_dim": 8,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
    ),
}
# For a context of 32; the tests use longer texts.
ROPES = {
    "llama3": LLAMA3 | {"original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [1.0, 3.0, 5.0, 9.0],
    },
}
DEPTHS = {
    "sliced block": {"residual_type": "sliced", "num_depth_blocks": 3, "depth_key_rank": 8},
    "sliced full": {"residual_type": "sliced", "num_depth_blocks": None, "depth_key_rank": 8},
    "projected block": {"residual_type": "projected", "num_depth_blocks": 3, "depth_key_rank": 8},
    "projected full": {"residual_type": "projected", "num_depth_blocks": None, "depth_key_rank": 8},
}
DEPTHS["sliced block, heads"] = DEPTHS["sliced block"] | {"depth_heads": 4}
SLICED = DEPTHS["sliced block"]


def pretrained(kind: str = "llama", **fields) -> torch.nn.Module:
    """A random model that, like a trained one, has embeddings small enough for eps to matter and free norm weights."""
    config_class, model_class = CLASSES[kind]
    model = perturb(model_class(config_class(**(SIZES | fields)))).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.05)
    return model


@cache
def source(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    kind, fields = SOURCES[name]
    return pretrained(
        kind, **{key: dict(value) if isinstance(value, dict) else value for key, value in fields.items()}
    )


@cache
def prompt_and_text(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    prompt = random_tokens(2, 7)
    return prompt, generate(source(name), prompt)


def generate(model: torch.nn.Module, prompt: torch.Tensor) -> torch.Tensor:
    return model.generate(prompt, do_sample=False, max_new_tokens=64, use_cache=True, pad_token_id=0)


# The law


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", SOURCES)
@torch.no_grad()
def test_same_logits_and_the_same_text(name, depth):
    model = load_upgraded(source(name), **DEPTHS[depth])
    assert model.config.residual_type == DEPTHS[depth]["residual_type"]
    prompt, text = prompt_and_text(name)
    torch.testing.assert_close(model(text).logits, source(name)(text).logits, atol=1e-4, rtol=0)
    assert torch.equal(generate(model, prompt), text)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", CLASSES)
@torch.no_grad()
def test_same_logits_with_any_rope(kind, rope):
    length = 32 if rope == "dynamic" else 128  # its `max_position_embeddings` is the context without scaling
    fields = {"head_dim": 8, "rope_parameters": dict(ROPES[rope]), "max_position_embeddings": length}
    fields |= {"sliding_window": None} if kind == "mistral" else {}
    original, input_ids = pretrained(kind, **fields), random_tokens(2, 48)
    unscaled = copy.deepcopy(original.config)
    expected = original(input_ids).logits
    for depth in ("sliced block", "projected full"):
        model = load_upgraded(original, **DEPTHS[depth])
        torch.testing.assert_close(model(input_ids).logits, expected, atol=1e-4, rtol=0)
    unscaled.rope_parameters = {"rope_type": "default", "rope_theta": unscaled.rope_parameters["rope_theta"]}
    plain = type(original)(unscaled).eval()
    plain.load_state_dict(original.state_dict())
    assert (plain(input_ids).logits - expected).abs().max() > 1e-2  # the scaling matters here


@pytest.mark.parametrize("name", SOURCES)
@torch.no_grad()
def test_standard_is_the_source(name):
    model, (_, text) = load_upgraded(source(name), residual_type="standard"), prompt_and_text(name)
    torch.testing.assert_close(model(text).logits, source(name)(text).logits, atol=1e-5, rtol=0)


@torch.no_grad()
def test_whole_values_as_keys():
    model, (_, text) = load_upgraded(source("qwen3"), residual_type="attnres"), prompt_and_text("qwen3")
    assert model.model.depth_queries.weight.shape == (10, 32)
    torch.testing.assert_close(model(text).logits, source("qwen3")(text).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", ["llama, like 3.2", "mistral", "qwen3"])
def test_gradients_reach_every_query_at_the_first_step(name, depth):
    model, input_ids = load_upgraded(source(name), **DEPTHS[depth]), random_tokens(2, 9)
    model(input_ids, labels=input_ids).loss.backward()
    gradients = model.model.depth_queries.weight.grad
    assert gradients.shape == (10, 8) and (gradients.abs().amax(-1) > 0).all()


@pytest.mark.parametrize("depth", DEPTHS)
@torch.no_grad()
def test_standard_models_of_this_project_upgrade_too(depth, tmp_path):
    for fields in ({}, {"norm_weight": True, "qk_norm": False, "tie_word_embeddings": True}):
        baseline = small_model("standard", **fields)
        input_ids = random_tokens(2, 9)
        upgraded = load_upgraded(baseline, **DEPTHS[depth])
        torch.testing.assert_close(upgraded(input_ids).logits, baseline(input_ids).logits, atol=1e-4, rtol=0)
    baseline.save_pretrained(tmp_path / "run")
    folder = upgrade_model(tmp_path / "run", tmp_path / "upgraded", **DEPTHS[depth])
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(reloaded(input_ids).logits, upgraded(input_ids).logits)


def test_upgraded_weights_are_a_copy():
    before = source("llama").lm_head.weight.clone()
    model = load_upgraded(source("llama"), **SLICED)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(source("llama").lm_head.weight, before)


# The folder


def save_source(folder, kind: str = "llama", max_shard_size: str = "5GB", dtype=torch.float32, **fields):
    model = pretrained(kind, vocab_size=257, **fields).to(dtype)
    model.generation_config.update(do_sample=True, temperature=0.6, eos_token_id=[256, 0], pad_token_id=256)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(folder)
    return model


@torch.no_grad()
def test_folder_is_complete(tmp_path):
    """Shards, dtype, tokenizer, chat template, generation config, licence, code and card."""
    model = save_source(tmp_path / "base", "qwen3", max_shard_size="50KB", dtype=torch.bfloat16, head_dim=8)
    (tmp_path / "base/LICENSE").write_text("Free.")
    ModelCard("---\nlicense: mit\n---\n").save(tmp_path / "base/README.md")
    folder = upgrade_model(
        tmp_path / "base", tmp_path / "deep/new", **DEPTHS["projected block"], max_shard_size="40KB", verify=True
    )
    shards = [load_file(path) for path in folder.glob("model-*.safetensors")]
    assert len(shards) > 2
    for name, tensor in {name: tensor for shard in shards for name, tensor in shard.items()}.items():
        assert tensor.dtype == (torch.float32 if "depth_queries" in name else torch.bfloat16)
        if name in model.state_dict():
            old = model.state_dict()[name]
            assert torch.equal(tensor[: len(old)], old) and len(tensor) - len(old) in (0, 8)

    base, new = AutoTokenizer.from_pretrained(tmp_path / "base"), AutoTokenizer.from_pretrained(folder)
    assert new.get_vocab() == base.get_vocab() and new.chat_template == base.chat_template
    for name in ("generation_config.json", "LICENSE"):
        assert (folder / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    assert reloaded.dtype == torch.bfloat16
    assert reloaded.generation_config.eos_token_id == [256, 0] and reloaded.generation_config.temperature == 0.6
    card = ModelCard.load(folder / "README.md")
    assert "| upgraded from | base |" in card.text and str(tmp_path) not in card.text
    assert card.data.license == "mit" and card.data.base_model is None  # a folder is no Hub name
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["new"]

    (tmp_path / "base/README.md").unlink()  # a trained folder has no card, but its provenance has the licence
    write_provenance(tmp_path / "base", license="cc0-1.0")
    again = upgrade_model(tmp_path / "base", tmp_path / "again", **DEPTHS["projected block"])
    assert ModelCard.load(again / "README.md").data.license == "cc0-1.0"


def test_one_shard_at_a_time_is_in_memory(tmp_path, monkeypatch):
    """While a file is written, only that file's tensors are alive."""
    save_source(tmp_path / "base", max_shard_size="20KB")
    alive, files = weakref.WeakSet(), []
    read, save = SavedModel.read, staging.save_file

    def remember(self, name):
        tensor = read(self, name)
        alive.add(tensor)
        return tensor

    def look(tensors, path, metadata):
        gc.collect()
        files.append(path.name)
        assert sum(tensor.nbytes for tensor in alive) <= sum(tensor.nbytes for tensor in tensors.values())
        save(tensors, path, metadata=metadata)

    monkeypatch.setattr(SavedModel, "read", remember)
    monkeypatch.setattr(staging, "save_file", look)
    upgrade_model(tmp_path / "base", tmp_path / "new", **DEPTHS["projected block"], max_shard_size="20KB")
    assert len(files) > 4


def test_key_projections_depend_on_the_seed_alone(tmp_path):
    save_source(tmp_path / "base")

    def weights(name, **options):
        folder = upgrade_model(tmp_path / "base", tmp_path / name, **DEPTHS["projected full"], **options)
        return {key: tensor for path in folder.glob("*.safetensors") for key, tensor in load_file(path).items()}

    whole, sharded, other = weights("whole"), weights("sharded", max_shard_size="20KB"), weights("other", seed=1)
    assert whole.keys() == sharded.keys() and all(torch.equal(whole[name], sharded[name]) for name in whole)
    changed = {name.split(".")[-2] for name in whole if not torch.equal(whole[name], other[name])}
    assert changed == {"o_proj", "down_proj", "depth_embedding_key"}


def test_model_in_memory_to_folder(tmp_path):
    model = save_source(tmp_path / "base", "mistral", sliding_window=None)
    loaded = MistralForCausalLM.from_pretrained(tmp_path / "base")
    folder = upgrade_model(loaded, tmp_path / "new", **SLICED, base_model="owner/mistral")
    assert ModelCard.load(folder / "README.md").data.base_model == "owner/mistral"
    assert AutoTokenizer.from_pretrained(folder).chat_template == byte_tokenizer().chat_template
    folder = upgrade_model(model, tmp_path / "bare", **SLICED, tokenizer=byte_tokenizer())
    assert "| upgraded from | MistralForCausalLM |" in (folder / "README.md").read_text()
    assert (folder / "tokenizer.json").exists() and (folder / "generation_config.json").exists()


@torch.no_grad()
def test_verification_uses_float32(base):
    half = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    expected = probe_logits(LlamaForCausalLM.from_pretrained(base))
    assert torch.equal(open_source(base).probe_logits(), expected)
    from_memory = open_source(half).probe_logits()
    assert from_memory.dtype == torch.float32 and half.dtype == torch.bfloat16
    assert torch.equal(from_memory, probe_logits(copy.deepcopy(half).float()))


def test_a_card_that_cannot_be_read_costs_the_licence_alone(tmp_path, monkeypatch):
    save_source(tmp_path / "base")
    (tmp_path / "base/README.md").write_text("---\nlicense: [a\n---\n")
    monkeypatch.setattr("lr_attnres.folders.pretrained_source.logger", (logger := Mock()))
    assert upgrade_model(tmp_path / "base", tmp_path / "new", **SLICED).is_dir()
    assert "its licence is not copied" in logger.warning.call_args.args[0]


def test_source_without_a_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr("lr_attnres.folders.upgrade.logger", (logger := Mock()))
    upgrade_model(source("llama"), tmp_path / "new", **SLICED)
    assert "so none was written" in logger.warning.call_args.args[0]


def test_verification_fails_if_the_folder_differs(tmp_path, monkeypatch, forked_clean_process):
    save_source(tmp_path / "base")
    write = staging.write_weights

    def write_wrongly(folder, tensors, make, max_shard_size):
        write(folder, tensors, lambda name: -make(name) if "layers.1.mlp.up" in name else make(name), max_shard_size)

    monkeypatch.setattr("lr_attnres.folders.staging.write_weights", write_wrongly)
    with pytest.raises(LRAttnResError, match="logits differ from the source's by .* of the largest"):
        upgrade_model(tmp_path / "base", tmp_path / "new", **SLICED, verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_upgrade_from_the_hub(tmp_path):
    save_source(tmp_path / "base", max_shard_size="50KB", tie_word_embeddings=True)
    (tmp_path / "base/consolidated.safetensors").write_bytes(b"another copy")
    options = ("--residual-type", "projected", "--num-depth-blocks", "full", "--depth-key-rank", "4")
    options += ("--depth-heads", "2")
    with HubServer() as hub, CommandLine(hub_environment(hub.url, tmp_path / "hf_home")) as run:
        hub.repos["model", "meta/small"] = repo = Repo()
        files = {path.name: hub.store(path.read_bytes(), lfs=True) for path in (tmp_path / "base").iterdir()}
        repo.commit("main", files)
        result = run("upgrade", "meta/small", tmp_path / "new", *options)
        assert (result.code, result.out) == (0, f"{tmp_path}/new\n"), result.err
        card = ModelCard.load(tmp_path / "new/README.md")
        assert card.data.base_model == "meta/small" and "| upgraded from | meta/small |" in card.text
        assert not list((tmp_path / "hf_home").rglob("consolidated*"))
        assert run("push", "writer/upgraded", tmp_path / "new", "--token", "hf_writer").code == 0
        assert b"base_model: meta/small" in hub.files("writer/upgraded")["README.md"]
        for arguments, message in [
            (("meta/absent",), "meta/absent is not on this machine, and the Hub answered"),
            (("meta/small", "--revision", "no"), "meta/small has no revision 'no'"),
            (("no repository",), "nor a Hub repository of the form owner/name"),
            (("",), "'' is not on this machine"),
            (("meta/small", "--depth-key-rank", "33"), "`depth_key_rank` is 33"),
            (("meta/small", "--depth-key-rank", "8", "--depth-heads", "3"), "`depth_heads` is 3; it must divide"),
        ]:
            result = run("upgrade", arguments[0], tmp_path / "other", *arguments[1:])
            assert result.code == 1 and message in result.err.splitlines()[-1], result
            assert not (tmp_path / "other").exists()


# What is refused

REFUSED = [
    ("llama", {"attention_bias": True}, "`attention_bias` is True, which adds a bias to `o_proj`"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "`sliding_window` is 8"),
    ("llama", {"mlp_bias": True}, "`mlp_bias` is True"),
    ("qwen3", {"attention_bias": True}, "`attention_bias` is True"),
    ("mistral", {"sliding_window": 64}, "`sliding_window` is 64"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 9}, "`sliding_window` is 8"),
    (
        "llama",
        {"layer_types": ["full_attention"] * 4 + ["sliding_attention"]},
        "`layer_types` has ['sliding_attention']",
    ),
    ("llama", {"final_logit_softcapping": 30.0}, "`final_logit_softcapping` is 30.0"),
    ("llama", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5"),
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "`quantization_config` is"),
]


@pytest.mark.parametrize("kind, fields, message", REFUSED, ids=[row[2] for row in REFUSED])
def test_field_that_cannot_be_upgraded_is_refused_by_name(kind, fields, message, tmp_path, capsys):
    if kind == "mistral":
        fields = {"sliding_window": None} | fields
    CLASSES[kind][0](**SIZES | fields).save_pretrained(tmp_path / "base")
    assert cli.main(["upgrade", str(tmp_path / "base"), str(tmp_path / "new"), "--depth-key-rank", "8"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("Error: ") and message in line
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_other_models_are_refused():
    phi = PhiForCausalLM(
        PhiConfig(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4)
    )
    config = LlamaConfig(**SIZES)
    for model, message in [
        (phi, "`model_type` is 'phi'; llama, mistral, qwen2, qwen3"),
        (LlamaModel(config), "`architectures` has LlamaModel; only LlamaForCausalLM"),
        (Qwen3ForSequenceClassification(Qwen3Config(**SIZES, head_dim=8)), "has Qwen3ForSequenceClassification"),
        (small_model("sliced_block"), "`residual_type` is 'sliced' already"),
        (torch.nn.Linear(2, 2), "A Linear is not a Transformers model"),
    ]:
        with pytest.raises(LRAttnResError, match=message):
            load_upgraded(model, **SLICED)


def edit_weights(change):
    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def edit_config(**fields):
    def edit(folder):
        content = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(content))

    return edit


def add_a_token(folder):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(folder)


NORM, UP, BIAS = "model.norm.weight", "model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"
BROKEN = [
    (edit_weights(lambda t: t.pop(NORM)), r"lacks the tensor model.norm.weight of shape \[32\]"),
    (edit_weights(lambda t: t.update({UP: torch.ones(3, 32)})), rf"{UP} has shape \[3, 32\]; expected \[40, 32\]"),
    (edit_weights(lambda t: t.update({BIAS: torch.ones(3)})), f"does not use: {BIAS}"),
    (
        edit_weights(lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)})),
        rf"{UP} \(torch.float8_e4m3fn, .*\) is not a dense tensor of float",
    ),
    (
        edit_weights(lambda t: t.update({UP: t[UP].to(torch.int8)})),
        rf"{UP} \(torch.int8, .*\) is not a dense tensor of float",
    ),
    (edit_config(tie_word_embeddings=True), "lm_head.weight is not the embedding"),
    (edit_config(model_type="gpt_of_tomorrow"), "config.json of .* cannot be used: .*gpt_of_tomorrow"),
    (edit_config(architectures=["LlamaForTokenClassification"]), "`architectures` has LlamaForTokenClassification"),
    (
        edit_config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        "`rope_type` is 'spiral'; only models with 'default' or 'linear'",
    ),
    (edit_config(pad_token_id=-1), "`pad_token_id` is -1"),
    (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json of .* cannot be used"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "model.safetensors cannot be read"),
    (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "has no model.safetensors"),
    (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer of .* cannot be loaded"),
    (lambda folder: (folder / "generation_config.json").write_text("["), "generation_config.json cannot be used"),
    (lambda folder: (folder / "LICENSE").symlink_to("/dev/zero"), "LICENSE is a character device"),
    (add_a_token, "the tokenizer of base has 258 tokens.* 257"),
    (edit_config(is_causal=False), "`is_causal` is False; only models with True can be upgraded"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base") / "base"
    save_source(folder)
    return folder


@pytest.mark.parametrize("edit, message", BROKEN, ids=[row[1] for row in BROKEN])
def test_broken_folder_is_refused(base, edit, message, tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    for path in base.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    edit(folder)
    with pytest.raises(LRAttnResError, match=message):
        upgrade_model(folder, tmp_path / "new", **SLICED)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_missing_shard_and_bad_index(tmp_path):
    save_source(tmp_path / "base", max_shard_size="50KB")
    next((tmp_path / "base").glob("model-00002*")).unlink()
    with pytest.raises(LRAttnResError, match="names model-00002.*, which is not in the folder"):
        upgrade_model(tmp_path / "base", tmp_path / "new", **SLICED)
    (tmp_path / "base/model.safetensors.index.json").write_text("[]")
    with pytest.raises(LRAttnResError, match="index.json is not an index"):
        upgrade_model(tmp_path / "base", tmp_path / "new", **SLICED)


def test_code_that_the_tokenizer_names_is_not_passed_on(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "base")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))
    upgrade_model(folder, tmp_path / "new", **SLICED)
    assert "auto_map" not in json.loads((tmp_path / "new/tokenizer_config.json").read_text())


def test_bad_arguments(base, tmp_path):
    (tmp_path / "taken").mkdir()
    for arguments, options, message in [
        ((base, tmp_path / "taken"), {}, "exists already"),
        ((base, tmp_path / "new"), {"max_shard_size": "5 lorries"}, "`max_shard_size` 5 lorries"),
        ((base, tmp_path / "new"), {"num_depth_blocks": 0}, "`num_depth_blocks` is 0"),
        ((base, tmp_path / "new"), {"revision": "main"}, "`revision` goes with a Hub repository"),
        ((base / "config.json", tmp_path / "new"), {}, "is a file; give the folder"),
    ]:
        with pytest.raises(ValueError, match=message):
            upgrade_model(*arguments, **SLICED | options)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
