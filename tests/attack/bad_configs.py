"""Random configs: accepted ones make a model that runs, the others are refused by name."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attack_harness import WEIRD, Bug
from common import SIZES

from lr_attnres import LRAttnResConfig, LRAttnResForCausalLM
from lr_attnres.variants import RESIDUAL_TYPES


FIELDS = [
    *LRAttnResConfig.__dataclass_fields__,
    *("num_labels", "torch_dtype", "attn_implementation", "output_attentions", "per_layer_config", "rope_theta"),
    *("rope_scaling", "partial_rotary_factor", "sliding_window", "is_causal", "layer_types", "num_kv_shared_layers"),
    *("attention_chunk_size", "use_sliding_window", "classifier_dropout", "experts_implementation"),
    *("tie_last_hidden_states", "quantization_config", "is_decoder", "use_return_dict", "output_depth_weights"),
    *("auto_map", "model_type", "max_length", "temperature", "base_model_tp_plan", "attribute_map", "mtp_layer_types"),
    *("attention_bias", "mlp_bias", "depth_rank", "hiden_size", "sub_configs", "validate", "to_dict"),
]
ROPE_TYPES = ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional", "spiral", None, 3]
ROPE_FIELDS = [
    *("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("attention_factor", "mscale", "mscale_all_dim", "short_factor", "long_factor", "truncate", "type"),
    "partial_rotary_factor",
]
PLAUSIBLE = [1.0, 2.0, 4.0, 8, 16, 32, [1.0] * 4, [2.0] * 4]
TINY = SIZES | {"num_hidden_layers": 2, "num_depth_blocks": 2, "depth_key_rank": 4, "max_position_embeddings": 32}


def random_rope(chance: random.Random) -> dict[str, Any]:
    parameters = {"rope_type": chance.choice(ROPE_TYPES), "rope_theta": chance.choice([1e4, 1e4, 5e5, *WEIRD])}
    for name in ROPE_FIELDS:
        if chance.random() < 0.45:
            parameters[name] = chance.choice(PLAUSIBLE if chance.random() < 0.8 else WEIRD)
    return parameters


def make_case(chance: random.Random, folder: Path) -> tuple[str, Callable[[], str | None]]:
    fields: dict[str, Any] = {}
    if chance.random() < 0.4:
        fields["rope_parameters"] = random_rope(chance)
    for _ in range(chance.randint(0 if fields else 1, 2)):
        fields[chance.choice(FIELDS)] = chance.choice(WEIRD)
    if chance.random() < 0.5:
        fields["residual_type"] = chance.choice(RESIDUAL_TYPES)
    return str(fields)[:300], lambda: try_config(TINY | fields)


@torch.no_grad()
def try_config(fields: dict[str, Any]) -> str | None:
    config = LRAttnResConfig(**fields)
    widths = (config.hidden_size, config.intermediate_size, config.vocab_size, 16 * config.num_hidden_layers)
    if max(*widths, config.num_attention_heads * config.attention_sizes()[1]) > 4000:
        return "success"  # valid, and too large to build here
    model = LRAttnResForCausalLM(config).eval()
    tokens = torch.arange(6)[None] % config.vocab_size
    if not model(tokens, return_dict=True).logits.isfinite().all():
        raise Bug("the logits are not finite")
    model.generate(tokens, max_new_tokens=2, do_sample=False)
    return None
