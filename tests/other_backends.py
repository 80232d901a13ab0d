"""Quantised weights and exported programs. `make test-backends` runs this file.

Not run by default: the packages need an environment of their own. They are imported inside the functions, so that
tests/compatibility.py can collect this file without them.
"""

from pathlib import Path

import pytest
import torch
from common import VARIANTS, random_tokens, small_config, small_model
from torch import nn
from transformers import AutoModelForCausalLM

from lr_attnres import LRAttnResForCausalLM


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
