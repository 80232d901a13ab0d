"""Converted reference checkpoints give the author's outputs; unsupported options are refused by name."""

import errno
import json
import math
import shutil
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from common import byte_tokenizer
from fetched import cl100k_ranks
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lr_attnres import LRAttnResConfig, LRAttnResForCausalLM, cli
from lr_attnres.data.tokenizers import CL100K_VOCAB_SIZE
from lr_attnres.errors import LRAttnResError
from lr_attnres.folders import staging
from lr_attnres.folders.convert import convert_released_checkpoint, load_released_model


REFERENCES = Path(__file__).parents[1] / "reference_checkpoints"
NAMES = sorted(path.stem for path in REFERENCES.glob("*.pt") if ".expected" not in path.name)


def expected_outputs(name: str) -> dict:
    return torch.load(REFERENCES / f"{name}.expected.pt", weights_only=True)


def released_gradient_norms(model: LRAttnResForCausalLM, released_names: list[str]) -> dict[str, float]:
    """Gradient norms by released name; a fused weight's norm is that over its parts."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}

    def norm(*names):
        return torch.stack([gradients[f"model.{name}.weight"].norm() for name in names]).norm().item()

    norms = {}
    for name in released_names:
        parts = name.removeprefix("transformer.").split(".")
        if parts[0] == "wte":
            norms[name] = norm("embed_tokens")
        elif parts[0] == "lm_head":
            norms[name] = model.lm_head.weight.grad.norm().item()
        elif parts[0] == "lrid_embedding_key":
            norms[name] = norm("depth_embedding_key")
        elif parts[0] in ("lrid_queries", "attn_residuals"):
            norms[name] = gradients["model.depth_queries.weight"][int(parts[1])].norm().item()
        else:
            layer = f"layers.{parts[1]}"
            modules = {
                "c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                "c_proj": ("self_attn.o_proj",),
                "fc1": ("mlp.up_proj", "mlp.gate_proj"),
                "fc2": ("mlp.down_proj",),
            }[parts[3]]
            norms[name] = norm(*(f"{layer}.{module}" for module in modules))
    return norms


def test_all_fourteen_are_here():
    assert len(NAMES) == 14


@pytest.mark.compatibility("Released checkpoints, converted", parameter="name")
@pytest.mark.parametrize("name", NAMES)
def test_reference_outputs_are_reproduced(name):
    expected = expected_outputs(name)
    model = load_released_model(REFERENCES / f"{name}.pt")
    outputs = model(expected["input_ids"], labels=expected["input_ids"])
    outputs.loss.backward()

    # Relative to the largest logit: some of these random models are ill-conditioned. One float32 rounding of each
    # weight moves a logit by up to 4e-5, and the stored logits lie up to 6e-5 from those of the float64 oracle.
    scale = expected["logits"].abs().max()
    assert (outputs.logits - expected["logits"]).abs().max() / scale < 2e-5
    assert abs(outputs.loss.item() - expected["loss"]) < 1e-5
    norms = released_gradient_norms(model, list(expected["grad_norms"]))
    assert norms == pytest.approx(expected["grad_norms"], rel=1e-3)


@pytest.mark.parametrize(
    "name", ["baseline", "attnres_block3", "plr_full_r8_heads2", "plr_block3_r8_padded", "slr_full_r8"]
)
def test_converted_folder_loads_with_the_auto_class(name, tmp_path):
    folder = convert_released_checkpoint(REFERENCES / f"{name}.pt", tmp_path / "deep" / name)
    assert folder == tmp_path / "deep" / name
    input_ids = expected_outputs(name)["input_ids"]
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(reloaded(input_ids).logits, load_released_model(REFERENCES / f"{name}.pt")(input_ids).logits)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == [name]


def edited(tmp_path: Path, name: str = "slr_block3_r8", edit=lambda checkpoint: None) -> Path:
    checkpoint = torch.load(REFERENCES / f"{name}.pt", weights_only=True)
    edit(checkpoint)
    torch.save(checkpoint, tmp_path / "edited.pt")
    return tmp_path / "edited.pt"


def with_args(tmp_path: Path, name: str = "slr_block3_r8", **options) -> Path:
    return edited(tmp_path, name, lambda checkpoint: checkpoint["model_args"].update(options))


OPTIONS = [
    ({"attn_res_query_norm": True}, {"depth_query_norm": True}),
    ({"attnres_block_average": True, "attnres_block_average_mode": "sqrt"}, {"depth_block_exponent": 0.5}),
    ({"attnres_block_average": True}, {"depth_block_exponent": 1.0}),
    ({"attnres_block_alpha": 0.25, "attnres_block_beta": 2}, {"depth_block_exponent": 0.25, "depth_count_prior": 2.0}),
    ({"lrid_use_logit_scale": True, "lrid_logit_scale": None}, {"depth_logit_scale": 1 / math.sqrt(8)}),
    (
        {"lrid_num_heads": 1, "lrid_use_logit_scale": True, "lrid_logit_scale": None},
        {"depth_heads": 1, "depth_logit_scale": 1 / math.sqrt(8)},
    ),
    ({"attnres_num_blocks": 99}, {"num_depth_blocks": 99}),
    ({"attnres_type": "full"}, {"num_depth_blocks": None}),
    ({"mlp_hidden_dim": None, "mlp_ratio": 2.75}, {"intermediate_size": 88}),
    ({"rope_theta": 10_000}, {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}}),
]


@pytest.mark.parametrize("options, fields", OPTIONS, ids=[str(row[0]) for row in OPTIONS])
def test_options_become_fields(options, fields, tmp_path):
    config = load_released_model(with_args(tmp_path, **options)).config
    assert {name: getattr(config, name) for name in fields} == fields


def test_depth_heads_become_fields(tmp_path):
    """The default scale is that of a head; `lrid_num_heads` means nothing where the keys are whole values."""
    options = {"lrid_use_logit_scale": True, "lrid_logit_scale": None}
    config = load_released_model(with_args(tmp_path, "plr_block3_r8_heads4", **options)).config
    assert (config.depth_key_rank, config.depth_heads, config.depth_logit_scale) == (8, 4, 1 / math.sqrt(2))
    config = load_released_model(with_args(tmp_path, "attnres_full", lrid_num_heads=4)).config
    assert config.depth_heads == 1
    with pytest.raises(LRAttnResError, match=r"lrid_queries.0 has shape \[2, 4\]; expected \[4, 2\]"):
        load_released_model(with_args(tmp_path, "slr_block3_r8_heads2", lrid_num_heads=4))
    with pytest.raises(LRAttnResError, match="`depth_heads` is 3; it must divide `hidden_size` = 32"):
        load_released_model(with_args(tmp_path, "slr_block3_r8_heads2", lrid_num_heads=3))


def test_padding_follows_the_keys_of_all_heads(tmp_path):
    def pad(checkpoint):
        checkpoint["model_args"]["lrid_projection_rank"] = 11
        for name, tensor in checkpoint["model"].items():
            if name.endswith(("c_proj.proj.weight", "fc2.proj.weight")):
                checkpoint["model"][name] = torch.cat([tensor, torch.randn(3, tensor.shape[1])])

    padded = load_released_model(edited(tmp_path, "plr_block3_r8_heads4", pad)).state_dict()
    for name, tensor in load_released_model(REFERENCES / "plr_block3_r8_heads4.pt").state_dict().items():
        assert torch.equal(padded[name], tensor)


def test_a_file_without_the_count_prior_has_it_off(tmp_path):
    path = edited(tmp_path, "slr_block3_r8_mean_prior", lambda c: c["model_args"].pop("attnres_block_count_prior"))
    assert load_released_model(path).config.depth_count_prior == 0.0


def test_prefix_of_compiled_modules_and_tied_embeddings(tmp_path):
    def edit(checkpoint):
        checkpoint["model"].pop("lm_head.weight")
        checkpoint["model"] = {f"_orig_mod.{name}": tensor for name, tensor in checkpoint["model"].items()}
        checkpoint["model_args"]["weight_tying"] = True

    model = load_released_model(edited(tmp_path, edit=edit))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    wte = torch.load(REFERENCES / "slr_block3_r8.pt", weights_only=True)["model"]["transformer.wte.weight"]
    assert torch.equal(model.lm_head.weight, wte)


REFUSED_OPTIONS = [
    {"norm_pos": "after"},
    {"attnres_block_alpha_learned": True},
    {"attnres_block_beta_learned": True},
    {"attnres_block_learned_scale": True},
    {"attnres_block_split_sublayers": True},
    {"attnres_block_value_norm": True},
    {"lrid_num_heads": 0},
    {"lrid_num_heads": True},
    {"lrid_input_dependent_query": True},
    {"lrid_static_embedding_key": True},
    {"lrid_add_static_source_key": True},
    {"lrid_key_from_value": True},
    {"lrid_query_from_value_shared": True},
    {"clip_qkv": 8.0},
    {"attnres_type": "sparse"},
    {"attnres_block_alpha": "learned"},
    {"attnres_block_alpha": True},
    {"rope_theta": None},
    {"rope_theta": "x"},
    {"rope_theta": 0},
    {"lrid_rank": -1},
    {"an_option_of_tomorrow": True},
]


@pytest.mark.parametrize("options", REFUSED_OPTIONS, ids=str)
def test_option_that_cannot_be_expressed_is_refused_by_name(options, tmp_path):
    source, output = with_args(tmp_path, **options), tmp_path / "output"
    with pytest.raises(LRAttnResError) as error:
        convert_released_checkpoint(source, output)
    (name, value), message = *options.items(), str(error.value)
    assert name in message and repr(value) in message
    assert not output.exists()


def drop(name):
    return lambda checkpoint: checkpoint["model"].pop(name)


def put(name, *shape):
    return lambda checkpoint: checkpoint["model"].update({name: torch.zeros(shape)})


BROKEN = [
    (drop("transformer.layers.2.mlp.fc2.proj.weight"), "lacks the tensor transformer.layers.2.mlp.fc2.proj.weight"),
    (drop("transformer.lrid_queries.7"), "lacks the tensor transformer.lrid_queries.7"),
    (drop("lm_head.weight"), "lacks the tensor lm_head.weight"),
    (put("transformer.wte.weight", 96, 32), r"transformer.wte.weight has shape \[96, 32\]; expected \[97, 32\]"),
    (put("transformer.extra.weight", 3), r"does not use: \['transformer.extra.weight'\]"),
    (lambda checkpoint: checkpoint["model_args"].pop("n_layer"), "lacks n_layer"),
    (lambda checkpoint: checkpoint.pop("model_args"), "no dict `model_args`"),
    (lambda checkpoint: checkpoint["model_args"].update(lrid_rank=0), "lrid_rank=0"),
    (lambda checkpoint: checkpoint["model_args"].update(lrid_rank=33), "depth_key_rank"),
    (lambda checkpoint: checkpoint["model_args"].update(attnres_num_blocks=None), "without attnres_num_blocks"),
    (lambda checkpoint: checkpoint["model_args"].update(qk_norm=torch.ones(2)), "Tensor as qk_norm"),
    (
        lambda checkpoint: checkpoint["model"].update({"lm_head.weight": torch.ones(97, 32).to_sparse()}),
        "sparse_coo.* not a dense",
    ),
    (put("_orig_mod.lm_head.weight", 97, 32), "lm_head.weight twice"),
    (put("transformer.layers.0.mlp.fc1.weight"), "lacks the tensor transformer.layers.0.mlp.fc1.weight"),
    (lambda checkpoint: checkpoint["model_args"].update(n_layer="4"), "num_hidden_layers"),
    (lambda checkpoint: checkpoint["model_args"].update(weight_tying=True), "lm_head.weight is not the embedding"),
    (
        lambda checkpoint: checkpoint["model"].update({"lm_head.weight": torch.ones(97, 32, device="meta")}),
        "a meta tensor",
    ),
    (
        lambda checkpoint: checkpoint["model"].update({"lm_head.weight": 3}),
        r"lm_head.weight \(int\) is not a dense tensor",
    ),
]


@pytest.mark.parametrize("edit, message", BROKEN, ids=[row[1] for row in BROKEN])
def test_broken_file_is_refused(edit, message, tmp_path):
    with pytest.raises(LRAttnResError, match=message):
        convert_released_checkpoint(edited(tmp_path, edit=edit), tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_a_projection_rank_below_the_rank_is_refused_where_keys_are_projected(tmp_path):
    with pytest.raises(LRAttnResError, match="lrid_projection_rank=4"):
        convert_released_checkpoint(with_args(tmp_path, "plr_block3_r8", lrid_projection_rank=4), tmp_path / "output")
    # A sliced model has no projections, so the option has no effect.
    convert_released_checkpoint(with_args(tmp_path, lrid_projection_rank=4), tmp_path / "output")


class Payload:
    def __reduce__(self):
        return (Path.touch, (Path("code-was-run"),))


def test_code_in_a_file_is_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {}, "model_args": {}, "optimizer": Payload()}, tmp_path / "payload.pt")
    with pytest.raises(LRAttnResError, match="would run code"):
        convert_released_checkpoint(tmp_path / "payload.pt", tmp_path / "output")
    assert not Path("code-was-run").exists() and not (tmp_path / "output").exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None], ids=["empty", "text", "truncated"])
def test_unreadable_file(content, tmp_path):
    if content is None:
        content = (REFERENCES / "baseline.pt").read_bytes()[:-5000]
    (tmp_path / "broken.pt").write_bytes(content)
    with pytest.raises(LRAttnResError, match="broken.pt"):
        convert_released_checkpoint(tmp_path / "broken.pt", tmp_path / "output")
    with pytest.raises(LRAttnResError, match="is not on this machine"):
        convert_released_checkpoint(tmp_path / "absent.pt", tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_a_damaged_record(tmp_path):
    """Wrong bytes among the weights, which only the checksum shows."""
    content = bytearray((REFERENCES / "slr_block3_r8.pt").read_bytes())
    with zipfile.ZipFile(REFERENCES / "slr_block3_r8.pt") as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size)
    place = largest.header_offset + largest.file_size // 2
    content[place : place + 100] = bytes(byte ^ 255 for byte in content[place : place + 100])
    (tmp_path / "damaged.pt").write_bytes(content)
    with pytest.raises(LRAttnResError, match="damaged.pt is damaged: the checksum of .* is wrong"):
        convert_released_checkpoint(tmp_path / "damaged.pt", tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_file_of_an_old_pytorch(tmp_path):
    checkpoint = torch.load(REFERENCES / "baseline.pt", weights_only=True)
    torch.save(checkpoint, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    model, expected = load_released_model(tmp_path / "old.pt"), load_released_model(REFERENCES / "baseline.pt")
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)


def test_existing_output_is_left_alone(tmp_path):
    (tmp_path / "output").mkdir()
    with pytest.raises(LRAttnResError, match="exists already"):
        convert_released_checkpoint(REFERENCES / "baseline.pt", tmp_path / "output")
    assert list((tmp_path / "output").iterdir()) == []


# The folder


def test_dtype_and_shards(tmp_path):
    source = REFERENCES / "plr_block3_r8.pt"
    folder = convert_released_checkpoint(source, tmp_path / "half", dtype=torch.bfloat16, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(folder)
    queries = model.model.depth_queries.weight
    assert model.dtype == torch.bfloat16 and queries.dtype == torch.float32
    exact = load_released_model(source).model.depth_queries.weight
    assert torch.equal(queries, exact) and not torch.equal(exact, exact.bfloat16().float())
    for name in folder.glob("*.safetensors"):
        for key, tensor in load_file(name).items():
            assert tensor.dtype == (torch.float32 if "depth_queries" in key else torch.bfloat16)
    with pytest.raises(LRAttnResError, match="`max_shard_size` 50 lorries"):
        convert_released_checkpoint(source, tmp_path / "bad", max_shard_size="50 lorries")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half"]


def test_card_names_the_source_without_the_folders_of_this_machine(tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(REFERENCES / "slr_full_r8.pt", tmp_path / "run/ckpt_step:123.pt")
    card = (convert_released_checkpoint(tmp_path / "run", tmp_path / "model") / "README.md").read_text()
    assert "| converted from | run, ckpt_step:123.pt |" in card
    assert "| training step | 123 |" in card and "| training tokens | 503,808 |" in card
    assert str(tmp_path) not in card


def full_vocabulary(checkpoint):
    checkpoint["model_args"]["vocab_size"] = CL100K_VOCAB_SIZE
    for name in ("transformer.wte.weight", "lm_head.weight"):
        checkpoint["model"][name] = torch.randn(CL100K_VOCAB_SIZE, 32)


def test_tokenizer_of_the_released_models(tmp_path, monkeypatch):
    source = edited(tmp_path, edit=full_vocabulary)
    folder = convert_released_checkpoint(source, tmp_path / "given", tokenizer=cl100k_ranks())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("Hello world")["input_ids"] == [9906, 1917] and tokenizer.model_max_length == 64
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["eos_token_id"] == settings["pad_token_id"] == tokenizer.eos_token_id == 100_257

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cl100k_ranks().parent))
    folder = convert_released_checkpoint(source, tmp_path / "from_tiktoken")
    assert (folder / "tokenizer.json").exists()


def test_tokenizers_that_are_absent_or_do_not_fit(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr("requests.get", Mock(side_effect=ConnectionError))
    monkeypatch.setattr("lr_attnres.folders.convert.logger", (logger := Mock()))
    folder = convert_released_checkpoint(edited(tmp_path, edit=full_vocabulary), tmp_path / "without")
    assert not (folder / "tokenizer.json").exists()
    assert "No tokenizer was written: tiktoken could not download" in logger.warning.call_args.args[0]

    source = REFERENCES / "baseline.pt"
    convert_released_checkpoint(source, tmp_path / "small")
    assert "97 tokens are not cl100k_base" in logger.warning.call_args.args[0]
    byte_tokenizer().save_pretrained(tmp_path / "bytes")
    for tokenizer, message in [
        (tmp_path / "bytes", "`tokenizer`: .*bytes has 257 tokens.* 97"),
        (tmp_path / "absent", "`tokenizer`: .*absent' is not on this machine"),
        (source, "`tokenizer`: .*baseline.pt is not cl100k_base.tiktoken"),
    ]:
        with pytest.raises(LRAttnResError, match=message):
            convert_released_checkpoint(source, tmp_path / "output", tokenizer=tokenizer)
    assert not (tmp_path / "output").exists()


def test_verification_fails_if_the_folder_differs(tmp_path, monkeypatch, forked_clean_process):
    source = REFERENCES / "slr_full_r8.pt"
    write = staging.write_weights

    def write_wrongly(folder, tensors, make, max_shard_size):
        write(folder, tensors, lambda name: -make(name) if "layers.0.mlp.up" in name else make(name), max_shard_size)

    monkeypatch.setattr(staging, "write_weights", write_wrongly)
    with pytest.raises(LRAttnResError, match="logits differ from the source's by .* of the largest"):
        convert_released_checkpoint(source, tmp_path / "output", verify=True)
    assert list(tmp_path.iterdir()) == []


def test_verification_in_half_precision(tmp_path):
    folder = convert_released_checkpoint(
        REFERENCES / "attnres_block3.pt", tmp_path / "half", dtype=torch.bfloat16, verify=True
    )
    assert folder.is_dir()


@pytest.mark.parametrize(
    "owner, function, error, message",
    [
        (
            *(LRAttnResConfig, "save_pretrained"),
            *(OSError(errno.ENOSPC, "No space left on device"), "the disk is full: free some space"),
        ),
        (
            *(staging, "save_file"),
            *(SafetensorError("I/O error: No space left on device (os error 28)"), "No space left on device"),
        ),
    ],
    ids=["config", "weights"],
)
def test_full_disk_leaves_nothing_behind(owner, function, error, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(owner, function, Mock(side_effect=error))
    assert cli.main(["convert", str(REFERENCES / "baseline.pt"), str(tmp_path / "output")]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"Error: {tmp_path}/output cannot be written: ") and message in line
    assert list(tmp_path.iterdir()) == []


def test_command_errors_are_one_line(tmp_path, capsys):
    refused = with_args(tmp_path, lrid_input_dependent_query=True)
    assert cli.main(["convert", str(refused), str(tmp_path / "output")]) == 1
    assert capsys.readouterr().err == (
        "Error: `model_args` has lrid_input_dependent_query=True, which this model cannot express.\n"
    )
    assert not (tmp_path / "output").exists()
