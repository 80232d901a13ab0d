import json

import pytest
from common import small_model
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from lr_attnres import LRAttnResConfig, LRAttnResForCausalLM


def test_defaults_are_the_paper_pareto_model():
    config = LRAttnResConfig()
    assert (config.residual_type, config.num_depth_blocks, config.depth_key_rank) == ("sliced", 8, 64)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (1024, 2816, 24)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (16, 16, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (100_277, 2048)
    assert config.rope_parameters == {"rope_theta": 500_000.0, "rope_type": "default"}
    assert config.rms_norm_eps == 2**-23
    assert config.qk_norm and not config.norm_weight and not config.tie_word_embeddings
    assert config.depth_key_norm and not config.depth_query_norm
    assert (config.depth_logit_scale, config.depth_block_exponent, config.depth_count_prior) == (1.0, 0.0, 0.0)


BAD_FIELDS = [
    ({"depth_key_rank": 0}, "depth_key_rank", "0", "1..hidden_size = 1024"),
    ({"depth_key_rank": 1025}, "depth_key_rank", "1025", "1..hidden_size = 1024"),
    ({"depth_key_rank": 8.0}, "depth_key_rank", "8.0", "expected int"),
    ({"num_depth_blocks": 0}, "num_depth_blocks", "0", "at least 1"),
    ({"num_depth_blocks": -2}, "num_depth_blocks", "-2", "at least 1"),
    ({"num_depth_blocks": True}, "num_depth_blocks", "True", "expected int"),
    ({"residual_type": "lowrank"}, "residual_type", "lowrank", "'sliced'"),
    ({"num_attention_heads": 7}, "num_attention_heads", "7", "multiple"),
    ({"num_attention_heads": 0}, "num_attention_heads", "0", "at least 1"),
    ({"num_key_value_heads": 0}, "num_key_value_heads", "0", "at least 1"),
    ({"num_key_value_heads": 3}, "num_key_value_heads", "3", "divide"),
    ({"head_dim": 63}, "head_dim", "63", "even"),
    ({"head_dim": 0}, "head_dim", "0", "even"),
    ({"depth_block_exponent": -0.5}, "depth_block_exponent", "-0.5", "not negative"),
    ({"depth_count_prior": -1.0}, "depth_count_prior", "-1.0", "not negative"),
    ({"depth_logit_scale": float("nan")}, "depth_logit_scale", "nan", "finite"),
    ({"depth_key_norm": 1}, "depth_key_norm", "1", "expected bool"),
    ({"hidden_size": "1024"}, "hidden_size", "1024", "expected int"),
    ({"hidden_size": 0}, "hidden_size", "0", "at least 1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers", "0", "at least 1"),
    ({"vocab_size": -1}, "vocab_size", "-1", "at least 1"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps", "0.0", "positive"),
    ({"attention_dropout": 1.5}, "attention_dropout", "1.5", "[0, 1)"),
    ({"pad_token_id": 100_277}, "pad_token_id", "100277", "vocab_size"),
    ({"hidden_act": "sulu"}, "hidden_act", "sulu", "silu"),
    ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_parameters", "spiral", "yarn"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta", "0", "above 0"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": "abc"}}, "rope_theta", "abc", "finite number"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -3.0}}, "factor", "-3.0", "at least 1"),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        *("partial_rotary_factor", "0.5", "whole heads"),
    ),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters", "yarn", "factor"),
    ({"initializer_range": float("nan")}, "initializer_range", "nan", "finite"),
    ({"sliding_window": 4}, "sliding_window", "4", "leave it out"),
    ({"is_causal": False}, "is_causal", "False", "leave it out"),
    ({"num_kv_shared_layers": 1}, "num_kv_shared_layers", "1", "leave it out"),
    ({"layer_types": ["sliding_attention"] * 24}, "layer_types", "sliding_attention", "full_attention"),
    ({"depth_scaled_eps": True, "depth_block_exponent": 0.5}, "depth_block_exponent", "0.5", "depth_scaled_eps"),
]


@pytest.mark.parametrize("fields, name, value, rule", BAD_FIELDS, ids=[str(row[0]) for row in BAD_FIELDS])
def test_bad_field_is_named_with_value_and_rule(fields, name, value, rule):
    with pytest.raises(StrictDataclassError) as error:
        LRAttnResConfig(**fields)
    for part in (name, value, rule):
        assert part in str(error.value)


def test_bad_field_is_refused_at_load(tmp_path):
    LRAttnResConfig().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"depth_key_rank": 4096}))
    with pytest.raises(StrictDataclassError, match="depth_key_rank.*4096"):
        AutoConfig.from_pretrained(tmp_path)


def test_bad_field_is_refused_at_save(tmp_path):
    config = LRAttnResConfig()
    config.num_depth_blocks = 0
    with pytest.raises(StrictDataclassError, match="num_depth_blocks"):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("override", [{"num_depth_blocks": 0}, {"residual_type": "attnres"}, {"depth_key_rank": 999}])
def test_bad_override_is_refused_when_the_model_is_built(override, tmp_path):
    small_model().save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassError, match="num_depth_blocks|depth_key_rank"):
        LRAttnResForCausalLM.from_pretrained(tmp_path, **override)


def test_fields_that_a_variant_ignores():
    assert LRAttnResConfig(residual_type="attnres").depth_key_rank == 1024
    LRAttnResConfig(residual_type="standard", hidden_size=32, num_attention_heads=4)  # the default rank is larger


def test_explicit_head_dim_need_not_divide():
    assert LRAttnResConfig(hidden_size=100, num_attention_heads=3, head_dim=16).head_dim == 16


def test_round_trip(tmp_path):
    config = LRAttnResConfig(residual_type="projected", num_depth_blocks=None, depth_key_rank=5, rope_theta=1e4)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, LRAttnResConfig)
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}
    assert loaded.rope_parameters["rope_theta"] == 1e4
