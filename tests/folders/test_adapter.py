"""Routing adapters: saved, loaded, swapped, merged, pushed and loaded from the Hub; a wrong base is refused."""

import copy
import json

import pytest
import torch
from command_line import CommandLine, hub_environment
from common import ROUTED, perturb, random_tokens, save_text_model, small_model
from hub_server import HubServer
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lr_attnres import (
    LRAttnResForCausalLM,
    LRAttnResForSequenceClassification,
    load_routing_adapter,
    save_routing_adapter,
    set_routing_adapter,
)
from lr_attnres.errors import LRAttnResError
from lr_attnres.folders.adapter import is_adapter


def with_other_queries(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy that was adapted: only its queries differ."""
    adapted = copy.deepcopy(model)
    with torch.no_grad():
        adapted.model.depth_queries.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return adapted


@pytest.mark.law
@pytest.mark.compatibility("Routing adapters: saved, loaded, swapped, merged")
@pytest.mark.parametrize("variant", ROUTED)
@torch.no_grad()
def test_adapters_of_one_base_are_swapped_and_merged(variant, tmp_path):
    base, tokens = small_model(variant), random_tokens(2, 9)
    adapted = {name: with_other_queries(base, seed) for seed, name in enumerate(("wiki", "chat"))}
    before = base(tokens).logits
    for name, model in adapted.items():
        save_routing_adapter(model, tmp_path / name)
        load_routing_adapter(base, tmp_path / name, name)
        assert torch.equal(base(tokens).logits, model(tokens).logits)
    for name in ("wiki", "chat", "wiki"):
        set_routing_adapter(base, name)
        assert torch.equal(base(tokens).logits, adapted[name](tokens).logits)
    base.save_pretrained(tmp_path / "merged")
    set_routing_adapter(base, None)
    assert torch.equal(base(tokens).logits, before)
    merged = LRAttnResForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(merged(tokens).logits, adapted["wiki"](tokens).logits)
    with pytest.raises(
        LRAttnResError, match="`name` is 'poems'; the routing adapters of this model are: 'wiki', 'chat'"
    ):
        set_routing_adapter(base, "poems")


def test_files_are_small_and_say_what_they_are(tmp_path):
    model = small_model(hidden_size=96)
    save_routing_adapter(model, tmp_path / "adapter", base_model="owner/base", license="apache-2.0")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "adapter").iterdir()}
    assert sorted(sizes) == ["README.md", "routing_adapter.json", "routing_adapter.safetensors"]
    queries, num_weights = model.model.depth_queries.weight, len(model.state_dict())
    assert sizes["routing_adapter.safetensors"] < queries.nbytes + 8 * 4 * num_weights + 500
    card = ModelCard.load(tmp_path / "adapter/README.md")
    assert (card.data.base_model, card.data.license) == ("owner/base", "apache-2.0")
    assert torch.equal(load_file(tmp_path / "adapter/routing_adapter.safetensors")["depth_queries.weight"], queries)


@torch.no_grad()
def test_any_dtype_and_any_head_of_the_base(tmp_path):
    model = small_model()
    save_routing_adapter(model, tmp_path / "adapter")
    queries = model.model.depth_queries.weight
    for dtype in (torch.bfloat16, torch.float16):
        half = with_other_queries(model, 1).to(dtype)
        load_routing_adapter(half, tmp_path / "adapter")
        assert torch.equal(half.model.depth_queries.weight, queries) and queries.dtype == torch.float32
        save_routing_adapter(half, tmp_path / str(dtype))
        load_routing_adapter(with_other_queries(model, 1), tmp_path / str(dtype))
    model.save_pretrained(tmp_path / "model")
    classifier = LRAttnResForSequenceClassification.from_pretrained(tmp_path / "model")
    for other in (classifier, classifier.model):
        load_routing_adapter(other, tmp_path / "adapter")


def change_one_layer(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    return model


def change_head(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        model.lm_head.weight.mul_(1.001)
    return model


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda base: small_model(depth_key_rank=4), "whose `depth_key_rank` is 8; this model's is 4"),
        (lambda base: small_model("sliced_full"), "whose `num_depth_blocks` is 3; this model's is None"),
        (lambda base: small_model(rms_norm_eps=1e-3), "whose `rms_norm_eps` is .*; this model's is 0.001"),
        (lambda base: perturb(copy.deepcopy(base)), "was trained on owner/base, which has other weights"),
        (lambda base: change_one_layer(copy.deepcopy(base)), "which has other weights than this model"),
        (lambda base: change_head(copy.deepcopy(base)), "which has other weights than this model"),
        (lambda base: small_model("standard"), "`residual_type` is 'standard', which has no depth queries"),
        (
            lambda base: LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=64, num_hidden_layers=1)),
            "LlamaForCausalLM",
        ),
        (lambda base: get_peft_model(copy.deepcopy(base), LoraConfig(target_modules="all-linear")), "wrapped by PEFT"),
    ],
    ids=["rank", "blocks", "eps", "weights", "one weight", "head", "standard", "llama", "peft"],
)
def test_wrong_base_is_refused(make, message, tmp_path):
    base = small_model()
    save_routing_adapter(base, tmp_path / "adapter", base_model="owner/base")
    other = make(base)
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(LRAttnResError, match=message):
        load_routing_adapter(other, tmp_path / "adapter")
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())


@torch.no_grad()
def test_other_key_rows_are_refused(tmp_path):
    """Two upgrades of one model with other seeds differ only in the last rows, which emit the keys."""
    base = small_model("projected_block")
    save_routing_adapter(base, tmp_path / "adapter")
    other = copy.deepcopy(base)
    rank = base.config.depth_key_rank
    for layer in other.model.layers:
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            assert len(weight) == base.config.hidden_size + rank
            weight[-rank:] = torch.randn(rank, weight.shape[1])
    with pytest.raises(LRAttnResError, match="which has other weights than this model"):
        load_routing_adapter(other, tmp_path / "adapter")


@pytest.mark.parametrize("name", [None, ""])
def test_an_adapter_has_a_name(name, tmp_path):
    model = small_model()
    save_routing_adapter(model, tmp_path / "adapter")
    with pytest.raises(LRAttnResError, match=f"`name` is {name!r}; give the adapter a name"):
        load_routing_adapter(model, tmp_path / "adapter", name)


def test_a_folder_with_a_model_is_no_adapter(tmp_path):
    save_routing_adapter(small_model(), tmp_path / "adapter")
    assert is_adapter(tmp_path / "adapter")
    (tmp_path / "adapter/config.json").write_text("{}")
    assert not is_adapter(tmp_path / "adapter")


def test_damaged_adapter_is_refused(tmp_path):
    model, folder = small_model(), tmp_path / "adapter"
    save_routing_adapter(model, folder)
    config, weights = folder / "routing_adapter.json", folder / "routing_adapter.safetensors"
    tensors = load_file(weights)

    def refused(message: str) -> None:
        with pytest.raises(LRAttnResError, match=message):
            load_routing_adapter(model, folder)

    save_file(tensors | {"depth_queries.weight": tensors["depth_queries.weight"] * float("nan")}, weights)
    refused("no finite float32 tensor depth_queries.weight")
    save_file(tensors | {"depth_queries.weight": tensors["depth_queries.weight"][1:].contiguous()}, weights)
    refused(r"depth_queries.weight has shape \[7, 8\]; this model has \[8, 8\]")
    weights.write_bytes(b"x")
    refused("routing_adapter.safetensors cannot be read")
    for content in ("{", "[]", json.dumps({"base_config": {}, "base_dtype": "no_such"}), '{"base_config": []}'):
        config.write_text(content)
        refused("is not the config of a routing adapter")
    config.unlink()
    refused("has no routing_adapter.json; give a folder written by `save_routing_adapter`")
    with pytest.raises(LRAttnResError, match="exists already"):
        save_routing_adapter(model, folder)


def test_pushed_and_loaded_from_the_hub(tmp_path):
    """`push` sends the three files alone; `generate` and `evaluate` take the repository as `--adapter`."""
    base = save_text_model(tmp_path / "base")
    save_routing_adapter(with_other_queries(base, 1), tmp_path / "adapter")
    (tmp_path / "adapter/optimizer.pt").write_bytes(b"x")
    with (
        HubServer() as hub,
        CommandLine(hub_environment(hub.url, tmp_path / "home")) as run,
    ):
        result = run("push", "writer/routing", tmp_path / "adapter", "--token", "hf_writer")
        assert result.code == 0, result.err
        files = hub.files("writer/routing")
        assert {name for name in files if not name.startswith(".git")} == {
            "README.md",
            "routing_adapter.json",
            "routing_adapter.safetensors",
        }
        assert 'load_routing_adapter(model, "writer/routing")' in files["README.md"].decode()
        generate = ("generate", tmp_path / "base", "--prompt", "The sea", "--max-new-tokens", "12", "--device", "cpu")
        plain, adapted = run(*generate), run(*generate, "--adapter", "writer/routing")
        local = run(*generate, "--adapter", tmp_path / "adapter")
        assert plain.code == adapted.code == 0 and adapted.out == local.out != plain.out
        (tmp_path / "adapter/routing_adapter.json").write_text("{}")
        result = run("push", "writer/routing", tmp_path / "adapter", "--token", "hf_writer")
        assert result.code == 1 and "is not the config of a routing adapter" in result.err
