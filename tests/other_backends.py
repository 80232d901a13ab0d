"""Quantised weights, exported programs and DeepSpeed. `make test-backends` runs this file.

Not run by default: the packages need an environment of their own. They are imported inside the functions, so that
tests/compatibility.py can collect this file without them.
"""

from pathlib import Path

import processes
import pytest
import torch
from common import VARIANTS, random_tokens, small_config, small_model
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from lr_attnres import LRAttnResForCausalLM, TrainArguments
from lr_attnres.training.setup import start_accelerator


FLOAT32 = {"atol": 1e-4, "rtol": 1e-4}
DYNAMIC = torch.export.Dim.DYNAMIC


def saved_model(variant: str, folder: Path) -> LRAttnResForCausalLM:
    """Widths that the kernels can divide."""
    model = LRAttnResForCausalLM(small_config(variant, hidden_size=64, intermediate_size=128)).eval()
    if variant != "standard":
        nn.init.normal_(model.model.depth_queries.weight, std=model.config.depth_key_rank**-0.5)  # logits of size one
    model.save_pretrained(folder)
    return model


def check_queries(quantized: nn.Module, model: LRAttnResForCausalLM) -> None:
    if model.config.residual_type != "standard":
        assert torch.equal(quantized.model.depth_queries.weight, model.model.depth_queries.weight)


def torchao_config(bits: int):
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
    from transformers import TorchAoConfig

    if bits == 8:
        return TorchAoConfig(Int8WeightOnlyConfig())
    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


@pytest.mark.compatibility("torchao: int8 and int4 weights")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_torchao(variant, bits, tmp_path):
    """All linear layers but the head are quantised, and the logits are those of the rounded weights."""
    model, input_ids = saved_model(variant, tmp_path), random_tokens(2, 9)
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=torchao_config(bits), dtype=torch.float32
    )
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    rounded = {name for name, parameter in quantized.named_parameters() if type(parameter) is not nn.Parameter}
    assert rounded == linear - {"lm_head.weight"}
    check_queries(quantized, model)
    for name in rounded:
        weight = model.get_parameter(name)
        dequantized = quantized.get_parameter(name).dequantize()
        assert not torch.equal(weight, dequantized)
        # half a step of the rounding, whose step is a fraction of the largest weight of a row
        assert (weight - dequantized).abs().max() <= weight.abs().max() / (2 ** (bits - 1) - 1)
        weight.copy_(dequantized)
    torch.testing.assert_close(quantized(input_ids).logits, model(input_ids).logits, **FLOAT32)


@pytest.mark.compatibility("bitsandbytes: 8-bit weights, on a CPU")
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_bitsandbytes(variant, tmp_path):
    from bitsandbytes.nn import Linear8bitLt
    from transformers import BitsAndBytesConfig

    model, input_ids = saved_model(variant, tmp_path), random_tokens(2, 9)
    config = BitsAndBytesConfig(load_in_8bit=True)
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = {name for name, module in quantized.named_modules() if isinstance(module, Linear8bitLt)}
    assert found == linear - {"lm_head"}
    check_queries(quantized, model)
    logits, expected = quantized(input_ids).logits.float(), model(input_ids).logits
    error = (logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 18 * 2**-9  # as in test_quanto_weights; here activations are rounded to 8 bits too


class Logits(nn.Module):
    def __init__(self, model: LRAttnResForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, use_cache=False).logits


@pytest.mark.compatibility("ONNX, any number of rows and tokens")
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_onnx(variant, tmp_path):
    import onnxruntime

    model, other = small_model(variant, num_hidden_layers=2), random_tokens(3, 6)
    shapes = {"input_ids": {0: DYNAMIC, 1: DYNAMIC}}
    program = torch.onnx.export(Logits(model), (random_tokens(2, 9),), dynamo=True, dynamic_shapes=shapes)
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (logits,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(other).logits, **FLOAT32)


@pytest.mark.compatibility("ExecuTorch, portable kernels")
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_executorch(variant):
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    model, input_ids = small_model(variant, num_hidden_layers=2), random_tokens(2, 9)
    exported = torch.export.export(Logits(model), (input_ids,), strict=False)
    program = Runtime.get().load_program(to_edge_transform_and_lower(exported).to_executorch().buffer)
    (logits,) = program.load_method("forward").execute([input_ids])
    torch.testing.assert_close(logits, model(input_ids).logits, **FLOAT32)


def launch_deepspeed(function, *arguments, stage: int = 2) -> None:
    """On two processes, with the environment that `accelerate launch --use_deepspeed` sets."""
    settings = {"USE_CPU": "false", "USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": str(stage)}
    settings |= {"DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"}
    environment = {f"ACCELERATE_{name}": value for name, value in settings.items()} | {"DS_ACCELERATOR": "cpu"}
    assert processes.run(function, *arguments, processes=2, **environment) == [0, 0]


def train(folder: Path, output: Path, rows_per_process: int, resume: str | None = None, **arguments) -> Trainer:
    """Four steps of four rows. The model is loaded after the arguments, so that ZeRO 3 splits it while it loads."""
    values = {"learning_rate": 1e-3, "logging_steps": 1, "save_steps": 2, "report_to": [], "disable_tqdm": True}
    values |= {"max_steps": 4, "per_device_train_batch_size": rows_per_process}
    args = TrainingArguments(str(output), **values, **arguments)
    rows = torch.randint(3, 61, (16, 9), generator=torch.Generator().manual_seed(0))
    model = LRAttnResForCausalLM.from_pretrained(folder)
    assert (model.lm_head.weight.numel() == 0) == is_deepspeed_zero3_enabled()
    trainer = Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    torch.save(trainer.state.log_history, output / "log.pt")
    return trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder per variant: a small model, and in `alone` what one process makes of it."""
    folder = tmp_path_factory.mktemp("trained")
    for variant in VARIANTS:
        model = small_model(variant, num_hidden_layers=2, tie_word_embeddings="block" in variant)
        model.save_pretrained(folder / variant)
        train(folder / variant, folder / variant / "alone", 4, use_cpu=True)
    return folder


@pytest.mark.compatibility("DeepSpeed with Trainer: ZeRO 1, 2 and 3", variants=VARIANTS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(stage, trained):
    """Two processes, resumed from a checkpoint, end where one ends."""
    launch_deepspeed(train_with_deepspeed, trained, stage, stage=stage)
    for variant in VARIANTS:
        folders = [trained / variant / name for name in (f"zero{stage}", "alone")]
        for record, expected in zip(*(torch.load(folder / "log.pt")[:4] for folder in folders), strict=True):
            for name in ("loss", "grad_norm"):
                assert record[name] == pytest.approx(expected[name], rel=1e-5)
        start, *models = (LRAttnResForCausalLM.from_pretrained(folder) for folder in (trained / variant, *folders))
        for before, parameter, expected in zip(*(model.parameters() for model in (start, *models)), strict=True):
            assert not torch.equal(before, expected)
            torch.testing.assert_close(parameter, expected, atol=1e-5, rtol=0)  # the first step of Adam is 1e-3


def train_with_deepspeed(folder: Path, stage: int) -> None:
    for variant in VARIANTS:
        output = folder / variant / f"zero{stage}"
        for options in ({}, {"resume": str(output / "checkpoint-2"), "gradient_checkpointing": True}):
            # `ddp_backend`: without it and without an accelerator, Accelerate takes each process for the only one.
            trainer = train(folder / variant, output, 2, ddp_backend="gloo", **options)
            assert trainer.accelerator.num_processes == 2
            assert trainer.model_wrapped.zero_optimization_stage() == stage


def test_deepspeed_without_trainer():
    launch_deepspeed(half_precision)


def half_precision() -> None:
    """`bf16` of DeepSpeed casts the depth queries too; autocast keeps them. `lr-attnres train` refuses DeepSpeed."""
    import deepspeed

    with pytest.raises(ValueError, match="DEEPSPEED flattens the weights.*launch with FSDP2"):
        start_accelerator(TrainArguments(data="", output_dir=""))
    autocast, input_ids = {"enabled": True, "dtype": "bfloat16"}, random_tokens(2, 9)
    cases = [({"bf16": {"enabled": True}}, torch.bfloat16), ({"torch_autocast": autocast}, torch.float32)]
    for precision, dtype in cases:
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}} | precision
        model = small_model(num_hidden_layers=2).train()
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        loss = engine(input_ids, labels=input_ids).loss
        engine.backward(loss)
        engine.step()
        assert engine(input_ids, labels=input_ids).loss < loss
        assert model.model.depth_queries.weight.dtype == dtype
