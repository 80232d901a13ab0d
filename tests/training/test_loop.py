"""A run learns, writes what it promises, and gives the same numbers when killed and resumed, or accumulated."""

import json
import re
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from common import byte_tokenizer
from compatibility import RESIDUAL_TYPES
from processes import DEFAULT_VARIANT, LENGTH, arguments, losses
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.utils import logging

from lr_attnres import LRAttnResConfig, LRAttnResForCausalLM, load_routing_adapter
from lr_attnres.data.packed_tokens import PackedTokens
from lr_attnres.data.packing import prepare_data
from lr_attnres.data.tokenizers import train_tokenizer
from lr_attnres.errors import LRAttnResError
from lr_attnres.folders.card import read_provenance
from lr_attnres.training.arguments import TrainArguments, load_arguments
from lr_attnres.training.batches import flatten_for_flash
from lr_attnres.training.checkpoints import Checkpoints, read_state
from lr_attnres.training.evaluation import evaluate
from lr_attnres.training.loop import learning_rate_factor, train
from lr_attnres.training.metrics import read_metrics
from lr_attnres.training.setup import build_model, start_accelerator


SPEED = "tokens_per_second"


@pytest.fixture(autouse=True)
def fresh_accelerate():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run_here(token_data: Path, output: Path, **overrides) -> list[dict]:
    train(TrainArguments(**arguments(token_data, output, **overrides)))
    return read_metrics(output / "metrics.jsonl")


def without_speed(records: list[dict]) -> list[dict]:
    return [{name: value for name, value in record.items() if name != SPEED} for record in records]


def test_the_first_line_describes_the_run(token_data, tmp_path, capsys):
    run_here(token_data, tmp_path, steps=2, warmup_steps=0)
    epochs = 2 * 8 / len(PackedTokens(token_data))
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("sliced-n2-r8, ") and line.endswith(
        f" parameters, 2 steps of 256 tokens (1 x 2 x 4 rows), {epochs:.2f} epochs of the data, from the start"
    )


@pytest.mark.compatibility("`lr-attnres train`")
@pytest.mark.parametrize("variant", ["attnres-full", "projected-n2-r8", "standard"])
def test_a_run(variant, token_data, tmp_path):
    """Every parameter changes, all promised files are written, and the folder is a model."""
    values = arguments(token_data, tmp_path, variant=variant, model={"norm_weight": True})
    model_folder = train(TrainArguments(**values))
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 9))
    assert {"tokens", "loss", "grad_norm", "lr_muon", "lr_adamw", SPEED} <= records[0].keys()
    assert records[-1]["loss"] < records[0]["loss"] and records[-1]["tokens"] == 8 * 8 * LENGTH
    assert [record["step"] for record in records if "validation_loss" in record] == [3, 4, 6, 8]
    entropies = [record["depth_entropy"] for record in records if "depth_entropy" in record]
    assert [len(entropy) for entropy in entropies] == ([] if variant == "standard" else [4, 4])

    trained, info = LRAttnResForCausalLM.from_pretrained(model_folder, output_loading_info=True)
    assert not any(info.values()) and (model_folder / "modeling_lr_attnres.py").exists()
    torch.manual_seed(0)
    untrained = build_model(TrainArguments(**values), PackedTokens(token_data), byte_tokenizer())
    for (name, before), after in zip(untrained.named_parameters(), trained.parameters()):
        assert not torch.equal(before, after), name
    assert evaluate(model_folder, token_data, batch_size=3).loss == pytest.approx(records[-1]["validation_loss"])
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    assert tokenizer.model_max_length == trained.config.max_position_embeddings == LENGTH
    provenance = read_provenance(model_folder)
    assert provenance["step"] == 8 and provenance["recipe"]["variant"] == variant
    assert processes.leftovers(tmp_path) == []

    best = min((record for record in records if record["step"] in (3, 6, 8)), key=lambda r: r["validation_loss"])
    kept = {6, 8, best["step"]}
    assert {int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir()} == kept
    checkpoint = LRAttnResForCausalLM.from_pretrained(tmp_path / "checkpoints/step-00000008")
    assert torch.equal(checkpoint.lm_head.weight, trained.lm_head.weight)


@pytest.mark.compatibility("`lr-attnres train`", variants=[DEFAULT_VARIANT])
def test_killed_and_resumed_is_uninterrupted(token_data, tmp_path):
    """Bit for bit: losses, norms, validation, entropies and weights, with dropout, so that the random state counts."""
    whole, broken = (
        arguments(token_data, tmp_path / name, model={"attention_dropout": 0.2}) for name in ("whole", "broken")
    )
    assert processes.run(processes.train, whole) == [0]

    stops = {
        ("killed in a step", 2): (-9, 0, []),
        ("killed before a checkpoint has its name", 1): (-9, 0, [".step-00000003.partial"]),
        ("killed within a line of metrics", 5): (-9, 3, []),
        ("terminated", 1): (143, 4, []),
        ("killed in a step", 1): (-9, 4, []),
        ("killed before an old one is deleted", 1): (-9, 6, [".step-00000003.deleted"]),
        ("killed while the model is written", 1): (-9, 8, [".model.partial"]),
    }
    for stop, (code, last, leftovers) in stops.items():
        assert processes.run(processes.train, broken, stop) == [code], stop
        broken["resume"] = "last"
        steps = sorted(int(path.name[5:]) for path in (tmp_path / "broken/checkpoints").glob("step-*"))
        assert (steps[-1] if steps else 0) == last, stop
        assert processes.leftovers(tmp_path / "broken") == leftovers, stop
    assert processes.run(processes.train, broken) == [0]
    assert processes.leftovers(tmp_path / "broken") == []

    records = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "broken")]
    assert without_speed(records[0]) == without_speed(records[1]) and len(records[0]) == 8
    weights = [load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "broken")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_accumulation_does_not_matter(token_data, tmp_path):
    """Batch 8 = 1 x 8, though the micro-batches have different numbers of targets; checkpointing and flat rows too."""
    options = {"steps": 4, "model": {}}
    expected = losses(run_here(token_data, tmp_path / "8", micro_batch_size=8, **options))
    for name, changes in {
        "1": {"micro_batch_size": 1},
        "3": {"micro_batch_size": 3, "gradient_checkpointing": True},  # 2 is the largest that divides 8
        "eager": {"attn_implementation": "eager", "num_workers": 1},
    }.items():
        found = losses(run_here(token_data, tmp_path / name, **options, **changes))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_a_run_from_a_model_folder(token_data, tmp_path):
    """It starts with the weights of the folder, which must agree with the arguments."""
    first = train(TrainArguments(**arguments(token_data, tmp_path / "first", steps=4)))
    other_tokens = tmp_path / "other_tokens"
    words = byte_tokenizer().backend_tokenizer.to_str().replace("<|end|>", "<|stop|>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(words), eos_token="<|stop|>")
    text = token_data.parent / "text.jsonl"
    prepare_data(text, other_tokens, tokenizer, sequence_length=LENGTH, validation_fraction=0.2, progress_bar=False)
    options = {"init_from": str(first), "steps": 1, "warmup_steps": 0, "lr_muon": 0, "lr_adamw": 0, "lr_queries": 0}
    second = train(TrainArguments(**arguments(token_data, tmp_path / "second", seed=1, **options | {"model": {}})))
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert str(tmp_path) not in (second / "provenance.json").read_text()  # no paths of this machine
    for change, message in {
        "variant": ("sliced-n2-r4", "whose `depth_key_rank` is 8; .* set it to 4"),
        "variant ": ("sliced-n2-r8-h2", "whose `depth_heads` is 1; .* set it to 2"),
        "model": ({"qk_norm": False}, "whose `qk_norm` is True; .* set it to False"),
        "init_from": (str(tmp_path), f"`init_from`: {tmp_path} has no config.json"),
        "data": (str(other_tokens), f"{other_tokens} was prepared with another tokenizer than that of {first}"),
    }.items():
        values = arguments(token_data, tmp_path / "third", **options) | {change.strip(): message[0]}
        with pytest.raises(ValueError, match=message[1]):
            train(TrainArguments(**values))
    with pytest.raises(
        ValueError, match="`init_from` is owner/name, which is not a folder: download .* `hf download`"
    ):
        train(TrainArguments(**arguments(token_data, tmp_path / "third", **options) | {"init_from": "owner/name"}))
    (other_tokens / "tokenizer/tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="the tokenizer of .* cannot be loaded: .* Prepare the data again"):
        train(TrainArguments(**arguments(other_tokens, tmp_path / "third")))
    assert not (tmp_path / "third").exists()


def test_queries_alone_become_a_routing_adapter(token_data, tmp_path, capsys):
    """Nothing else changes, the start, each evaluation and the end are printed, and the adapter fits the start."""
    first = train(TrainArguments(**arguments(token_data, tmp_path / "first", steps=4)))
    options = {"init_from": str(first), "train": "queries", "lr_queries": 0.05}
    second = train(TrainArguments(**arguments(token_data, tmp_path / "second", **options)))
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["model.depth_queries.weight"]
    printed = re.findall(r"step (\d+): validation loss (\S+)", capsys.readouterr().out.split("from the start")[-1])
    assert [int(step) for step, _ in printed] == [0, 3, 4, 6, 8]
    assert float(printed[0][1]) == pytest.approx(evaluate(first, token_data).loss, abs=1e-4)
    assert float(printed[-1][1]) == pytest.approx(evaluate(second, token_data).loss, abs=1e-4)
    result = evaluate(first, token_data, adapter=tmp_path / "second/adapter")
    assert result.loss == pytest.approx(evaluate(second, token_data).loss, abs=1e-6)
    with pytest.raises(LRAttnResError, match="which has other weights"):
        load_routing_adapter(LRAttnResForCausalLM(LRAttnResConfig.from_pretrained(first)), tmp_path / "second/adapter")


def test_a_risen_validation_loss_is_told_once(token_data, tmp_path, capsys):
    first = train(TrainArguments(**arguments(token_data, tmp_path / "first", steps=8)))
    options = {"init_from": str(first), "lr_muon": 3.0, "lr_adamw": 1.0, "lr_queries": 0.5, "warmup_steps": 0}
    capsys.readouterr()
    train(TrainArguments(**arguments(token_data, tmp_path / "second", **options)))
    told = [line for line in capsys.readouterr().out.splitlines() if "has risen above the start" in line]
    assert len(told) == 1 and told[0].endswith(
        "lower the learning rate (lr_muon = 3, lr_adamw = 1, lr_queries = 0.5)."
    )


def test_rows_in_one_row_are_the_same(token_data):
    """The input of flash attention: a single row, in which positions alone separate the documents."""
    rows = PackedTokens(token_data)
    batch = torch.utils.data.default_collate([rows[i] for i in range(3)])
    model = build_model(TrainArguments(**arguments(token_data, Path())), rows, byte_tokenizer())
    flat = flatten_for_flash(batch, "flash_attention_2")
    assert flat["input_ids"].shape == (1, 3 * LENGTH) and flatten_for_flash(batch, "sdpa") is batch
    torch.testing.assert_close(model(**flat, use_cache=False).loss, model(**batch, use_cache=False).loss)


def test_compiled_and_uncompiled(token_data, tmp_path, monkeypatch):
    """The wrapper of torch.compile reaches neither checkpoints nor folders. (`aot_eager`: no code generation.)"""
    real, used = torch.compile, []

    def compile_without_codegen(model, **options):
        used.append(options["backend"])
        return real(model, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", compile_without_codegen)
    small = {"steps": 1, "warmup_steps": 0, "micro_batch_size": 8, "model": {"num_hidden_layers": 1}}
    expected = run_here(token_data, tmp_path / "eager", **small)
    AcceleratorState._reset_state(reset_partial_state=True)
    compiled = run_here(token_data, tmp_path / "compiled", compile=True, **small)
    assert used == ["inductor"]
    torch.testing.assert_close(losses(compiled), losses(expected), atol=1e-5, rtol=1e-5)
    names = [load_file(tmp_path / name / "model/model.safetensors").keys() for name in ("eager", "compiled")]
    assert names[0] == names[1]


def test_loss_that_is_not_finite(token_data, tmp_path):
    with pytest.raises(LRAttnResError, match=r"gradient nan at step 2: .*checkpoints/step-00000001"):
        run_here(token_data, tmp_path, lr_adamw=1e30, save_steps=1, warmup_steps=0)
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 1


def test_full_disk(token_data, tmp_path, monkeypatch):
    """No file may grow beyond 40 kB, as on a full disk; the previous checkpoint is still good."""
    limit, save = resource.getrlimit(resource.RLIMIT_FSIZE), Checkpoints.save

    def save_on_a_full_disk(checkpoints, step, **state):
        if step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limit[1]))
        return save(checkpoints, step, **state)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_on_a_full_disk)
        try:
            with pytest.raises(LRAttnResError, match=r"step 6 cannot be written: .* Last good one: .*step-00000003"):
                run_here(token_data, tmp_path, steps=6)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    AcceleratorState._reset_state(reset_partial_state=True)
    records = run_here(token_data, tmp_path, steps=6, resume="last")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]


def test_wrong_folder_to_resume_from(token_data, tmp_path):
    run_here(token_data, tmp_path, steps=3)
    checkpoint = tmp_path / "checkpoints/step-00000003"
    (tmp_path / "empty").mkdir()
    elsewhere = tmp_path / "elsewhere"

    def refused(message: str, output: Path = elsewhere, **overrides) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        with pytest.raises(ValueError, match=message):
            run_here(token_data, output, **{"steps": 3} | overrides)

    refused("already holds a run .*--resume", output=tmp_path)
    refused("step-00000003 belongs to another run: `seed` was 0, now it is 1", output=tmp_path, resume="last", seed=1)
    refused("does not exist", resume=str(tmp_path / "nothing"))
    refused("not a checkpoint of a training run", resume=str(tmp_path / "empty"))
    refused("`lr_muon` was 0.02, now it is 0.5", resume=str(checkpoint), lr_muon=0.5)
    refused("`steps` was 3, now it is 4", resume=str(checkpoint), steps=4)
    refused("`variant` was sliced-n2-r8", resume=str(checkpoint), variant="standard")
    refused("`model` was .*now it is", resume=str(checkpoint), model={"hidden_size": 64})
    state = read_state(checkpoint)
    state["settings"]["data"] = "0"
    (checkpoint / "training_state.json").write_text(json.dumps(state))
    refused("`data` was 0", resume=str(checkpoint))
    (checkpoint / "checksums.sha256").unlink()  # as written by an earlier version
    cut(checkpoint / "optimizer.bin")
    state["settings"]["data"] = PackedTokens(token_data).manifest.training_hash()
    (checkpoint / "training_state.json").write_text(json.dumps(state))
    refused("cannot be read", resume=str(checkpoint))
    cut(checkpoint / "random_states_0.pkl")
    refused("random_states_0.pkl cannot be read", resume=str(checkpoint))
    (checkpoint / "random_states_0.pkl").unlink()
    refused("random_states_0.pkl is missing: .* of 0 processes, the run has 1", resume=str(checkpoint))
    assert not (elsewhere / "metrics.jsonl").exists()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_one_flipped_byte_is_not_resumed_from(token_data, tmp_path, caplog):
    """Nor from a checkpoint without one of its files; other files are named, and one without checksums is accepted."""
    run_here(token_data, tmp_path, steps=3)
    checkpoint = tmp_path / "checkpoints/step-00000003"
    names = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl", "training_state.json"} < names
    lines = (checkpoint / "checksums.sha256").read_text().splitlines()
    assert {line.split("  ")[1] for line in lines} == names - {"checksums.sha256"}
    (checkpoint / "notes.txt").touch()
    checked = ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "config.json"]
    for name in [*checked, "checksums.sha256"]:
        content = (checkpoint / name).read_bytes()
        named = f"{name} is missing or damaged" if name in checked else "is missing or damaged"
        flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        for damaged in (flipped, None) if name in checked else (flipped,):
            (checkpoint / name).unlink() if damaged is None else (checkpoint / name).write_bytes(damaged)
            AcceleratorState._reset_state(reset_partial_state=True)
            with pytest.raises(LRAttnResError, match=f"{named} .*: copy the checkpoint again, or delete it"):
                run_here(token_data, tmp_path, steps=3, resume="last")
        (checkpoint / name).write_bytes(content)
    run_here(token_data, tmp_path, steps=3, resume="last")
    (checkpoint / "checksums.sha256").unlink()
    AcceleratorState._reset_state(reset_partial_state=True)
    run_here(token_data, tmp_path, steps=3, resume="last")
    assert "checksums.sha256 does not list notes.txt: not verified." in caplog.messages[0]
    assert "has no checksums.sha256: its files cannot be verified." in caplog.messages[1] and len(caplog.messages) == 2


def test_a_foreign_adapter_is_not_lost(token_data, tmp_path):
    run_here(token_data, tmp_path / "first", steps=1, warmup_steps=0)
    options = {"steps": 1, "warmup_steps": 0, "init_from": str(tmp_path / "first/model"), "train": "queries"}
    adapter = tmp_path / "second/adapter"
    adapter.mkdir(parents=True)
    (adapter / "weights").write_text("mine")
    for resume in (None, "last"):
        with pytest.raises(ValueError, match="adapter already exists and would be replaced"):
            run_here(token_data, tmp_path / "second", resume=resume, **options)
        assert [path.name for path in (tmp_path / "second").rglob("*")] == ["adapter", "weights"]


def test_damaged_provenance_is_found_before_the_run(token_data, tmp_path):
    run_here(token_data, tmp_path / "first", steps=1, warmup_steps=0)
    (tmp_path / "first/model/provenance.json").write_text("{")
    with pytest.raises(ValueError, match="`init_from`: .*provenance.json is not JSON"):
        run_here(token_data, tmp_path / "second", steps=1, warmup_steps=0, init_from=str(tmp_path / "first/model"))
    assert not (tmp_path / "second").exists()


def test_existing_files_in_the_run_folder_are_not_lost(token_data, tmp_path):
    """A run replaces neither another model nor the metrics of an earlier run; a finished run may be resumed."""
    options = {"steps": 1, "warmup_steps": 0}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").write_text("mine")
    for resume in (None, "last"):
        with pytest.raises(ValueError, match="model is not from this run"):
            run_here(token_data, tmp_path, resume=resume, **options)
    assert (tmp_path / "model/weights").read_text() == "mine"
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "model").touch()
    with pytest.raises(ValueError, match="model is not from this run"):
        run_here(token_data, tmp_path, **options)
    (tmp_path / "model").unlink()

    records = run_here(token_data, tmp_path, **options)
    weights = load_file(tmp_path / "model/model.safetensors")
    assert run_here(token_data, tmp_path, resume="last", **options) == records
    assert torch.equal(load_file(tmp_path / "model/model.safetensors")["lm_head.weight"], weights["lm_head.weight"])
    assert processes.leftovers(tmp_path) == []
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="metrics.jsonl belongs to an earlier run: resume with --resume"):
        run_here(token_data, tmp_path, **options)
    assert read_metrics(tmp_path / "metrics.jsonl") == records
    with pytest.raises(ValueError, match="model belongs to another run: `seed` was 0, now it is 1"):
        run_here(token_data, tmp_path, resume="last", seed=1, **options)


def test_trainer_finds_no_new_special_tokens(token_data, tmp_path, caplog):
    """The config has the begin-of-text, end-of-text and padding tokens of the tokenizer."""
    words = train_tokenizer((f"{letter}b" for letter in "abc"), 260)
    options = {"sequence_length": LENGTH, "validation_fraction": 0, "progress_bar": False}
    prepare_data(token_data.parent / "text.jsonl", tmp_path / "data", words, **options)
    folder = train(TrainArguments(**arguments(tmp_path / "data", tmp_path / "run", steps=1, warmup_steps=0)))
    model, tokenizer = LRAttnResForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.bos_token_id == model.generation_config.bos_token_id == tokenizer.bos_token_id == 0
    rows, settings = PackedTokens(tmp_path / "data"), {"max_steps": 1, "per_device_train_batch_size": 2}
    settings |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    logger = logging.get_logger("transformers.trainer_utils")
    logger.addHandler(caplog.handler)  # the loggers of Transformers do not propagate
    try:
        trainer = Trainer(
            model, TrainingArguments(tmp_path / "trainer", **settings), train_dataset=rows, processing_class=tokenizer
        )
        trainer.train()
    finally:
        logger.removeHandler(caplog.handler)
    assert not [message for message in caplog.messages if "PAD/BOS/EOS" in message]


def test_data_without_a_tokenizer(token_data, tmp_path):
    shutil.copytree(token_data, tmp_path / "data")
    shutil.rmtree(tmp_path / "data/tokenizer")
    with pytest.raises(ValueError, match="data/tokenizer does not exist: prepare the data again"):
        run_here(tmp_path / "data", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_written_leaves_nothing(token_data, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no")

    monkeypatch.setattr("lr_attnres.training.loop.write_provenance", fail)
    with pytest.raises(LRAttnResError, match="model cannot be written: no"):
        run_here(token_data, tmp_path, steps=1, warmup_steps=0)
    assert processes.leftovers(tmp_path) == [] and not (tmp_path / "model").exists()


def test_accumulation_in_the_environment_does_not_count(token_data, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert start_accelerator(TrainArguments(**arguments(token_data, tmp_path))).gradient_accumulation_steps == 1


def test_trackers_and_data_without_validation(token_data, tmp_path):
    """A tracker of Accelerate gets the values of metrics.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    text = token_data.parent / "text.jsonl"
    options = {"sequence_length": LENGTH, "validation_fraction": 0, "progress_bar": False}
    prepare_data(text, tmp_path / "data", tokenizer=byte_tokenizer(), **options)
    records = run_here(tmp_path / "data", tmp_path / "run", steps=3, trackers=["tensorboard"])
    assert not any("validation_loss" in record for record in records)
    events = EventAccumulator(str(tmp_path / "run/lr-attnres")).Reload()
    logged = [(event.step, event.value) for event in events.Scalars("loss")]
    assert logged == [(record["step"], pytest.approx(record["loss"])) for record in records]
    assert len(events.Scalars("depth_entropy/site_4")) == 1


@pytest.mark.compatibility("`lr-attnres train` on DeepSpeed and FSDP1", refused=RESIDUAL_TYPES)
@pytest.mark.parametrize("variant", ["standard", "attnres-full", "projected-n2-r8", "sliced-n2-r8"])
@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.FSDP])
def test_what_flattens_the_weights_is_refused(kind, variant, token_data, tmp_path, monkeypatch):
    launched = SimpleNamespace(distributed_type=kind, is_fsdp2=False)
    monkeypatch.setattr("lr_attnres.training.setup.Accelerator", lambda **options: launched)
    with pytest.raises(ValueError, match=f"{kind.value} flattens the weights.*launch with FSDP2"):
        start_accelerator(TrainArguments(**arguments(token_data, tmp_path, variant=variant)))


def test_batches_that_do_not_fit(token_data, tmp_path):
    with pytest.raises(ValueError, match="`batch_tokens` is 100; it must be a multiple of 32"):
        run_here(token_data, tmp_path, batch_tokens=100)
    with pytest.raises(ValueError, match="`vocab_size` is 100, but the data has 257"):
        run_here(token_data, tmp_path, model={"vocab_size": 100})
    with pytest.raises(ValueError, match="`model` or `variant`: .*vocab_size"):
        run_here(token_data, tmp_path, model={"vocab_size": "1e9"})
    with pytest.raises(ValueError, match="`model` needs .* GiB, this machine has"):
        run_here(token_data, tmp_path, model={"hidden_size": 10**5})
    with pytest.raises(ValueError, match="`trackers` has 'abacus'"):
        run_here(token_data, tmp_path, trackers=["abacus"])


def test_learning_rates_of_the_paper():
    args = load_arguments("paper-0.5b")
    assert args.steps * args.batch_tokens == pytest.approx(10e9, rel=1e-5)
    expected = {1: 1 / 2000, 1000: 0.5, 2000: 1.0, 30_000: 1.0, args.steps: 0.1}
    for step, factor in expected.items():
        assert learning_rate_factor(step, args) == pytest.approx(factor)
    assert learning_rate_factor(round(0.9 * args.steps), args) == pytest.approx(0.55, abs=1e-4)
