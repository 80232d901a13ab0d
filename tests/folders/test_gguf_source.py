"""GGUF files upgrade to models with the logits and the text of Transformers' own load; damaged ones are refused."""

import sys
from pathlib import Path
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from common import byte_tokenizer, random_tokens
from test_upgrade import SIZES, SLICED, generate, pretrained
from transformers import AutoModelForCausalLM, AutoTokenizer

from lr_attnres import LRAttnResForCausalLM, cli, load_upgraded, upgrade_model
from lr_attnres.errors import LRAttnResError
from lr_attnres.folders import gguf_source


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{letter}_norm": f"attn_{letter}_norm" for letter in "qk"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
TEXT = ["a", "b", "c", "ab", "abc"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def llama_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q and k in pairs, as llama.cpp has them for the architecture `llama`."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: torch.nn.Module, kind: str, quantization: str = "F32", **fields) -> Path:
    """A GGUF file as llama.cpp's converter writes it; `fields` are added to those of the architecture."""
    config, architecture = model.config, "llama" if kind == "mistral" else kind
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"small {kind}")
    writer.add_license("apache-2.0")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = model.model.layers[0].self_attn.head_dim
    if architecture == "llama":
        writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    tokens = [*TEXT, *(f"<{number}>" for number in range(config.vocab_size - len(TEXT)))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(5)
    writer.add_eos_token_id(6)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, value in fields.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}.get(type(value))
        if add is None:
            writer.add_tensor(name, value)
        else:
            add(name, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, suffix = name.rsplit(".", 1)
        layer = f"blk.{module.split('.')[2]}." if "layers." in module else ""
        weight = tensor.numpy()
        if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            weight = llama_order(weight, heads)
        kind_of_numbers = gguf.GGMLQuantizationType[quantization if weight.ndim == 2 else "F32"]
        raw = gguf.quants.quantize(np.ascontiguousarray(weight), kind_of_numbers)
        inner = NAMES[module.split(".", 3)[3] if layer else module]
        writer.add_tensor(f"{layer}{inner}.{suffix}", raw, raw_dtype=kind_of_numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


MODELS = {
    "llama": ("llama", {"num_key_value_heads": 4}, "F32"),
    "llama, tied, GQA, quantised": (
        "llama",
        {"tie_word_embeddings": True, "hidden_size": 64, "intermediate_size": 96},
        "Q4_0",
    ),
    "llama, wide heads": ("llama", {"head_dim": 16, "num_key_value_heads": 1}, "F16"),
    "mistral": ("mistral", {"sliding_window": None, "intermediate_size": 64}, "Q8_0"),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "F16"),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}, "F32"),
    "qwen3": ("qwen3", {"head_dim": 128}, "F16"),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_same_logits_and_the_same_text_as_in_transformers(name, tmp_path):
    kind, fields, quantization = MODELS[name]
    torch.manual_seed(0)
    path = write_gguf(tmp_path / "model.gguf", pretrained(kind, **fields), kind, quantization)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    folder = upgrade_model(path, tmp_path / "upgraded", **SLICED)
    model = LRAttnResForCausalLM.from_pretrained(folder)
    tokens = random_tokens(2, 40)
    logits = expected(tokens).logits
    assert (model(tokens).logits - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert torch.equal(generate(model, tokens[:1, :8]), generate(expected, tokens[:1, :8]))


def test_tokenizer_chat_template_and_licence_come_along(tmp_path):
    path = write_gguf(tmp_path / "small.gguf", pretrained(), "llama")
    assert cli.main(["upgrade", str(path), str(tmp_path / "new"), "--depth-key-rank", "8"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert tokenizer("abcab")["input_ids"] == [4, 3] and tokenizer.eos_token_id == 6 and len(tokenizer) == 61
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False) == "abc"
    assert tokenizer.model_max_length == SIZES["max_position_embeddings"]
    card = (tmp_path / "new/README.md").read_text()
    assert "license: apache-2.0" in card and "| upgraded from | small |" in card


def test_tokenizer_files_beside_the_file_are_not_read(tmp_path):
    (tmp_path / "gguf").mkdir()
    path = write_gguf(tmp_path / "gguf/small.gguf", pretrained(), "llama")
    expected = gguf_source.GGUFModel(path).tokenizer()
    byte_tokenizer().save_pretrained(path.parent)
    assert {"tokenizer.json", "tokenizer_config.json"} <= {file.name for file in path.parent.iterdir()}
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    for source in (path, link):
        tokenizer = gguf_source.GGUFModel(source).tokenizer()
        assert tokenizer.get_vocab() == expected.get_vocab()
        assert tokenizer("abcab")["input_ids"] == [4, 3] and tokenizer.eos_token_id == 6
        assert tokenizer.chat_template == CHAT_TEMPLATE


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, {}),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope.scaling.original_context_length": 32},
    ),
    "llama3": (LLAMA3 | {"original_max_position_embeddings": 32}, None),
}


@pytest.mark.parametrize("name", SCALED)
@torch.no_grad()
def test_scaled_rope_of_the_file_is_kept(name, tmp_path):
    """Transformers ignores it in a GGUF. The model that the file was made from has it in its config."""
    rope, fields = SCALED[name]
    torch.manual_seed(0)
    model = pretrained("llama", rope_parameters=rope | {"rope_theta": 1e4})
    if fields is None:  # llama.cpp's converter writes the divisors of the frequencies
        frequencies = 1e4 ** -(torch.arange(0, 8, 2) / 8)
        fields = {"rope_freqs.weight": (frequencies / model.model.rotary_emb.inv_freq).numpy()}
    else:
        fields = {f"llama.{key}": value for key, value in fields.items()}
        fields |= {"llama.rope.scaling.type": name, "llama.rope.scaling.factor": rope["factor"]}
    path = write_gguf(tmp_path / "model.gguf", model, "llama", **fields)
    tokens = random_tokens(2, 60)
    logits = model(tokens).logits
    assert (load_upgraded(path, **SLICED)(tokens).logits - logits).abs().max() <= 1e-5 * logits.abs().max()


def damaged(path: Path, change) -> Path:
    content = bytearray(path.read_bytes())
    path.write_bytes(change(content))
    return path


BROKEN = [
    ("no GGUF at all", lambda content: b"PK" + content[2:]),
    ("cut short", lambda content: content[: len(content) // 2]),
    ("cut in its header", lambda content: content[:40]),
    ("empty", lambda content: b""),
]


@pytest.mark.parametrize("name, change", BROKEN, ids=[row[0] for row in BROKEN])
def test_damaged_file_is_refused_in_one_line(name, change, tmp_path, capsys):
    path = damaged(write_gguf(tmp_path / "model.gguf", pretrained(), "llama"), change)
    assert cli.main(["upgrade", str(path), str(tmp_path / "new")]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"Error: {path} cannot be used, because it is damaged, cut short or no GGUF file: ")
    assert not (tmp_path / "new").exists()


def test_what_differs_is_named(tmp_path):
    def refused(message: str, kind: str = "llama", **fields) -> None:
        path = write_gguf(tmp_path / "model.gguf", pretrained(kind), kind, **fields)
        with pytest.raises(LRAttnResError, match=message):
            load_upgraded(path, **SLICED)

    refused("`rope.scaling.type` is 'longrope'; only none, linear", **{"llama.rope.scaling.type": "longrope"})
    refused("is one of 3 parts of a model: merge them", **{"split.count": 3})
    refused("`sliding_window` is 8", **{"llama.attention.sliding_window": 8})
    refused(r"does not use: blk.0.attn_q.bias", **{"blk.0.attn_q.bias": np.ones(32, np.float32)})
    with pytest.raises(LRAttnResError, match="'absent.gguf' is not on this machine, nor a file of the Hub"):
        load_upgraded("absent.gguf")
    with pytest.raises(LRAttnResError, match="`revision` goes with a Hub repository"):
        load_upgraded(tmp_path / "model.gguf", revision="main")


REFUSED_ROPE = [
    ("`rope.scaling.factor` is 4.0", {"scaling.factor": 4.0}),
    ("`rope.scale_linear` is 2.0", {"scale_linear": 2.0}),
    ("`rope.scaling.attn_factor` is 0.5", {"scaling.type": "linear", "scaling.attn_factor": 0.5}),
    ("`rope.scaling.yarn_beta_fast` is 16.0", {"scaling.type": "yarn", "scaling.yarn_beta_fast": 16.0}),
    ("`rope.scaling.yarn_log_multiplier` is 1.0", {"scaling.type": "yarn", "scaling.yarn_log_multiplier": 1.0}),
    ("`rope.freq_base_swa` is 10000.0", {"freq_base_swa": 1e4}),
    ("`rope.scaling.original_context_length` is None", {"scaling.type": "yarn", "scaling.factor": 4.0}),
    ("is 'linear' and the file has rope_freqs.weight", {"scaling.type": "linear", "scaling.factor": 4.0}),
    ("is 'yarn' and the file has rope_freqs.weight", {"scaling.type": "yarn"}),
]


@pytest.mark.parametrize("message, rope", REFUSED_ROPE, ids=[row[0] for row in REFUSED_ROPE])
def test_rope_that_would_be_lost_is_refused(message, rope, tmp_path):
    fields = {f"llama.rope.{name}": value for name, value in rope.items()}
    if "rope_freqs" in message:
        fields["rope_freqs.weight"] = np.full(4, 2.0, np.float32)
    path = write_gguf(tmp_path / "model.gguf", pretrained(), "llama", **fields)
    with pytest.raises(LRAttnResError, match=message):
        gguf_source.GGUFModel(path)


def test_rope_fields_that_change_nothing_are_accepted(tmp_path):
    plain = write_gguf(tmp_path / "plain.gguf", pretrained(), "llama")
    neutral = {"scale_linear": 1.0, "scaling.factor": 1.0, "scaling.attn_factor": 1.0, "scaling.yarn_beta_fast": 32.0}
    fields = {f"llama.rope.{name}": value for name, value in neutral.items()}
    path = write_gguf(tmp_path / "neutral.gguf", pretrained(), "llama", **fields)
    expected = gguf_source.GGUFModel(plain).config.rope_parameters
    assert gguf_source.GGUFModel(path).config.rope_parameters == expected


@pytest.mark.parametrize("architecture", ["phi3", "gpt2"])
def test_other_architectures_are_refused_by_name(architecture, tmp_path):
    """Whatever their tensors are called."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    for add in (writer.add_block_count, writer.add_head_count, writer.add_head_count_kv, writer.add_vocab_size):
        add(2)
    writer.add_embedding_length(32)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        writer.add_tensor(name, np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LRAttnResError, match=f"`model_type` is '{architecture}'; llama, mistral, qwen2, qwen3"):
        load_upgraded(tmp_path / "model.gguf")


def test_missing_first_query_projection_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(NAMES, "self_attn.q_proj", "other")
    path = write_gguf(tmp_path / "model.gguf", pretrained(), "llama")
    with pytest.raises(LRAttnResError, match="lacks the tensor blk.0.attn_q.weight"):
        load_upgraded(path)


def test_file_of_the_hub(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "small.gguf", pretrained(), "llama")
    download = Mock(return_value=str(path))
    monkeypatch.setattr(gguf_source, "hf_hub_download", download)
    source = gguf_source.GGUFModel("owner/name-GGUF:quants/small.gguf", revision="main")
    download.assert_called_once_with("owner/name-GGUF", "quants/small.gguf", revision="main", token=None)
    assert source.name == "owner/name-GGUF"


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(LRAttnResError, match=r'needs the package gguf: pip install "lr-attnres\[gguf\]"'):
        load_upgraded(tmp_path / "model.gguf")
