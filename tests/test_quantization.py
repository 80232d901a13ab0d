"""Quantised weights: the linear layers are quantised, the queries stay float32, and the predictions stay close."""

import pytest
import torch
from common import VARIANTS, random_tokens, small_config
from optimum.quanto import QLinear
from transformers import AutoModelForCausalLM, QuantoConfig

from lr_attnres import LRAttnResForCausalLM


@pytest.mark.compatibility("Quanto int8 weights, in float32 and bfloat16")
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_quanto_weights(variant, dtype, tmp_path):
    # torch's bfloat16 kernel takes 32 inputs at a time where the CPU has AVX-512, and reads beyond other sizes.
    config = small_config(variant, intermediate_size=64)
    model, input_ids = LRAttnResForCausalLM(config).eval(), random_tokens(2, 9)
    if variant != "standard":
        model.model.depth_queries.weight.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=QuantoConfig(weights="int8"), dtype=dtype
    )
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {name for name, module in quantized.named_modules() if isinstance(module, QLinear)} == linear - {"lm_head"}
    if variant != "standard":
        assert torch.equal(quantized.model.depth_queries.weight, model.model.depth_queries.weight)

    logits, expected = quantized(input_ids).logits.float(), model(input_ids).logits
    # int8 rounds a weight by at most 1/254 of its row's largest, bf16 by at most 1/256 of itself.
    error = (logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 18 * 2**-9  # see test_half_precision_is_finite_and_close
    tokens = quantized.generate(input_ids, max_new_tokens=5, do_sample=False, eos_token_id=-1)
    chosen = quantized(tokens[:, :-1], use_cache=False).logits[:, 8:].argmax(-1)
    # in bfloat16 two tokens may be equally likely, and the cached step choose the other one
    assert tokens.shape == (2, 14) and (dtype == torch.bfloat16 or torch.equal(tokens[:, 9:], chosen))
