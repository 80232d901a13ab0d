import json
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from common import small_config, small_model
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from lr_attnres import LRAttnResConfig, LRAttnResForCausalLM, configuration_lr_attnres


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


ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64},
    **{"low_freq_factor": 4.0, "high_freq_factor": 4.0},
}
BAD_FIELDS = [
    ({"depth_key_rank": 0}, "depth_key_rank", "0", "1..hidden_size = 1024"),
    ({"depth_key_rank": 1025}, "depth_key_rank", "1025", "1..hidden_size = 1024"),
    ({"depth_key_rank": 8.0}, "depth_key_rank", "8.0", "expected int"),
    ({"depth_heads": 0}, "depth_heads", "0", "at least 1"),
    ({"depth_heads": 2.0}, "depth_heads", "2.0", "expected int"),
    ({"depth_heads": 3, "depth_key_rank": 63}, "depth_heads", "3", "it must divide `hidden_size` = 1024"),
    ({"depth_heads": 16, "depth_key_rank": 24}, "depth_heads", "16", "it must divide `depth_key_rank` = 24"),
    ({"num_depth_blocks": 0}, "num_depth_blocks", "0", "at least 1"),
    ({"num_depth_blocks": -2}, "num_depth_blocks", "-2", "at least 1"),
    ({"num_depth_blocks": True}, "num_depth_blocks", "True", "expected int"),
    ({"residual_type": "lowrank"}, "residual_type", "lowrank", "'sliced'"),
    ({"num_attention_heads": 7}, "num_attention_heads", "7", "multiple"),
    ({"num_attention_heads": 0}, "num_attention_heads", "0", "at least 1"),
    ({"num_key_value_heads": 0}, "num_key_value_heads", "0", "at least 1"),
    ({"num_key_value_heads": 3}, "num_key_value_heads", "3", "divide"),
    ({"head_dim": 63}, "head_dim", "63", "even"),
    ({"head_dim": 0}, "head_dim", "0", "at least 2"),
    ({"depth_block_exponent": -0.5}, "depth_block_exponent", "-0.5", "at least 0"),
    ({"depth_count_prior": -1.0}, "depth_count_prior", "-1.0", "at least 0"),
    ({"depth_logit_scale": float("nan")}, "depth_logit_scale", "nan", "at least"),
    ({"depth_key_norm": 1}, "depth_key_norm", "1", "expected bool"),
    ({"hidden_size": "1024"}, "hidden_size", "1024", "expected int"),
    ({"hidden_size": 0}, "hidden_size", "0", "at least 1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers", "0", "at least 1"),
    ({"vocab_size": -1}, "vocab_size", "-1", "at least 1"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps", "0.0", "at least"),
    ({"attention_dropout": 1.5}, "attention_dropout", "1.5", "[0, 1)"),
    ({"pad_token_id": 100_277}, "pad_token_id", "100277", "vocab_size"),
    ({"hidden_act": "sulu"}, "hidden_act", "sulu", "silu"),
    ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_parameters", "spiral", "yarn"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta", "0", "at least 0.001"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": "abc"}}, "rope_theta", "abc", "a number"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -3.0}}, "factor", "-3.0", "at least 1"),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        *("partial_rotary_factor", "0.5", "whole heads"),
    ),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters", "yarn", "factor"),
    ({"initializer_range": float("nan")}, "initializer_range", "nan", "at least"),
    ({"sliding_window": 4}, "sliding_window", "4", "leave it out"),
    ({"is_causal": False}, "is_causal", "False", "leave it out"),
    ({"num_kv_shared_layers": 1}, "num_kv_shared_layers", "1", "leave it out"),
    ({"layer_types": ["sliding_attention"] * 24}, "layer_types", "sliding_attention", "full_attention"),
    ({"is_causal": 1}, "is_causal", "1", "leave it out"),
    ({"attn_implementation": "../x"}, "attn_implementation", "../x", "such as 'sdpa'"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder", "True", "leave it out"),
    ({"experts_implementation": "eager"}, "experts_implementation", "eager", "leave it out"),
    ({"layer_types": 5}, "layer_types", "5", "list"),
    ({"rms_norm_eps": 1e300}, "rms_norm_eps", "1e+300", "at most 1"),
    ({"initializer_range": 1e39}, "initializer_range", "1e+39", "at most 100"),
    ({"depth_count_prior": 1e39}, "depth_count_prior", "1e+39", "at most"),
    ({"depth_logit_scale": 1e39}, "depth_logit_scale", "1e+39", "at most"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers", "1000000000", "at most 10000"),
    ({"hidden_size": 10**18}, "hidden_size", "1000000000000000000", "at most"),
    ({"num_labels": 10**9}, "num_labels", "1000000000", "at most"),
    ({"id2label": {"a": "b"}}, "id2label", "'a'", "whole numbers"),
    ({"attn_implementation": 3}, "attn_implementation", "3", "str"),
    ({"quantization_config": 3}, "quantization_config", "3", "dict"),
    ({"base_model_tp_plan": {}}, "base_model_tp_plan", "attribute", "remove it"),
    ({"dtype": "int8"}, "dtype", "int8", "floating"),
    ({"eos_token_id": [5, 10**9]}, "eos_token_id", "1000000000", "vocab_size"),
    ({"rope_parameters": ROPE | {"rope_type": "llama3"}}, "low_freq_factor", "4.0", "below high_freq_factor"),
    ({"rope_parameters": ROPE | {"original_max_position_embeddings": 0}}, "original_max", "0", "at least 2"),
    ({"rope_parameters": ROPE | {"rope_theta": 1.0}}, "rope_theta", "1.0", "more than 1"),
    ({"rope_parameters": ROPE | {"beta_fast": 0}}, "beta_fast", "0", "at least"),
    (
        {"rope_parameters": ROPE | {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [0.0] * 32}},
        *("short_factor", "[1.0]", "list of 32"),
    ),
    ({"rope_parameters": ROPE | {"rope_type": "dynamic"}, "head_dim": 2}, "head_dim", "2", "at least 4"),
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


@pytest.mark.parametrize(
    ("name", "meant"),
    [("depth_rank", "depth_key_rank"), ("num_depth_block", "num_depth_blocks"), ("qk_norms", "qk_norm")],
)
def test_a_misspelt_field_is_refused_with_the_nearest_name(name, meant):
    with pytest.raises(StrictDataclassError, match=f"no field `{name}` .did you mean {meant}"):
        small_config(**{name: 3})


def test_an_unknown_depth_field_is_refused():
    """It may change the maths, for instance in a folder saved by a later version."""
    with pytest.raises(StrictDataclassError, match="no field `depth_warp`"):
        small_config(depth_warp=3)


def test_full_is_another_word_for_no_blocks():
    assert small_config(num_depth_blocks="full").num_depth_blocks is None


@pytest.mark.parametrize("version", ["4.57.6", "5.3.0"])
def test_an_older_transformers_is_refused(version, monkeypatch):
    """At the first import of the code that travels, before any name that older versions lack."""
    # Importing a model replaces the module of this name: take the one that an import finds now.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    spec = spec_from_file_location("configuration_of_a_folder", configuration_lr_attnres.__file__)
    with pytest.raises(ImportError, match=f"needs transformers 5.4 or newer; {version} is installed"):
        spec.loader.exec_module(module_from_spec(spec))
