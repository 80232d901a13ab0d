"""Arguments come from a preset or YAML file; flags override them; unknown names are refused."""

import argparse

import pytest

from lr_attnres import LRAttnResConfig, cli
from lr_attnres.analysis.cost import depth_cost
from lr_attnres.analysis.paper import PAPER_VARIANTS
from lr_attnres.training.arguments import TrainArguments, add_flags, load_arguments, presets


# Added FLOPs in percent, from the paper's table.
ADDED_FLOPS = {
    "standard": 0,
    "attnres-full": 0.8131,
    "attnres-n16": 0.3029,
    "projected-full-r32": 1.3865,
    "projected-n8-r32": 1.0577,
    "sliced-full-r512": 0.6099,
    "sliced-n4-r64": 0.0593,
    "sliced-n8-r64": 0.0932,
}


def parse(*flags: str) -> dict:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return vars(parser.parse_args(flags))


def test_the_recipe_of_the_paper():
    args = load_arguments("paper-0.5b")
    recipe = (args.lr_muon, args.momentum, args.weight_decay, args.lr_adamw, args.betas, args.lr_queries)
    assert recipe == (1e-3, 0.95, 0.1, 3e-4, (0.9, 0.95), None)
    assert (args.warmup_steps, args.warmdown_fraction, args.final_lr_fraction) == (2000, 0.2, 0.1)
    assert (args.clip, args.z_loss, args.batch_tokens) == (1.0, 1e-5, 262_144)
    assert presets() == ["paper-0.5b", "tiny"]
    # The defaults are the same recipe.
    assert TrainArguments(variant=args.variant, model=args.model, steps=args.steps) == args


@pytest.mark.parametrize("variant", PAPER_VARIANTS)
def test_one_flag_chooses_a_row_of_the_table(variant):
    args = load_arguments("paper-0.5b", **parse("--variant", variant))
    config = LRAttnResConfig(**args.model_fields())
    assert config.hidden_size == 1024 and len(PAPER_VARIANTS) == 20
    if variant in ADDED_FLOPS:
        assert depth_cost(config).added_flops_percent == pytest.approx(ADDED_FLOPS[variant], abs=5e-5)


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("lr_muon: 1e-2\nsteps: 7\ncompile: true\nmodel:\n  hidden_size: 64\n  qk_norm: true\n")
    assert load_arguments(None, **parse("--model", "rms_norm_eps=1e-6")).model == {"rms_norm_eps": 1e-6}
    flags = parse("--steps", "9", "--no-compile", "--model", "hidden_size=32", "tie_word_embeddings=true")
    args = load_arguments(str(file), **flags, **parse("--resume", "--betas", "0.8", "0.9"))
    assert (args.lr_muon, args.steps, args.compile, args.resume, args.betas) == (0.01, 9, False, "last", (0.8, 0.9))
    assert args.model == {"hidden_size": 32, "qk_norm": True, "tie_word_embeddings": True}
    assert load_arguments(str(file)).steps == 7 and load_arguments(str(file)).compile


@pytest.mark.parametrize(
    "content, message",
    [
        ("warmup_step: 3", "the key 'warmup_step' does not exist .did you mean warmup_steps"),
        ("steps: many", "`steps` is 'many'; expected a whole number"),
        ("compile: 1", "`compile` is 1; expected true or false"),
        ("betas: 0.9", "`betas` is 0.9; expected two numbers"),
        ("betas: '09'", "`betas` is '09'; expected two numbers"),
        ("trackers: wandb", "`trackers` is 'wandb'; expected a list of names"),
        ("model: 3", "`model` is 3; expected a mapping"),
        ("model: hidden", "`model` is 'hidden'; expected a mapping"),
        ("1: 2", "the key 1 does not exist"),
        ("- a", "must hold `key: value` lines"),
        ("a: [", "is not YAML"),
        (b"\xff\xfe\x00", "run.yaml is not YAML: it is not UTF-8 text"),
    ],
)
def test_files_that_are_refused(content, message, tmp_path):
    (tmp_path / "run.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        load_arguments(str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data": None}, "`data` is not set: give --data"),
        ({"output_dir": ""}, "`output_dir` is not set: give --output-dir"),
        ({"steps": 0}, "`steps` is 0"),
        ({"steps": 10**10}, "`steps` is 10000000000; it must be at most 1000000000"),
        ({"batch_tokens": 10**9}, "`batch_tokens` is 1000000000; it must be at most 268435456"),
        ({"micro_batch_size": 10**9}, "`micro_batch_size` is 1000000000; it must be at most 10000"),
        ({"train": "keys"}, "`train` is 'keys'; it must be queries, or not set"),
        ({"train": "queries"}, "`train` is 'queries', which needs a trained model"),
        ({"train": "queries", "variant": "standard"}, "`train` is 'queries'; `variant` is standard"),
        ({"warmup_steps": 11}, "`warmup_steps` is 11; it must be at most `steps` = 10"),
        ({"lr_muon": float("nan")}, "`lr_muon` is nan"),
        ({"momentum": 1.5}, "`momentum` is 1.5"),
        ({"betas": (2.0, 3.0)}, "`betas` is .2.0, 3.0.; it must be two numbers in"),
        ({"betas": (0.9,)}, "`betas` is .0.9,.; it must be two numbers in"),
        ({"betas": (float("nan"), 0.9)}, "`betas` is .nan, 0.9."),
        ({"seed": -1}, "`seed` is -1"),
        ({"num_workers": 100_000}, "`num_workers` is 100000; on this machine it must be at most"),
        ({"mixed_precision": "fp16"}, "`mixed_precision` is 'fp16'; it must be one of auto, bf16, no"),
        ({"model": {1: 2}}, "no field 1"),
        ({"clip": 0.0}, "`clip` is 0.0"),
        ({"variant": "sliced"}, "`variant` is 'sliced'; write standard"),
        ({"variant": "attnres-n8-r3"}, "`variant` is"),
        ({"model": {"hiden_size": 3}}, "no field 'hiden_size' .did you mean hidden_size"),
        ({"model": {"depth_key_rank": 3}}, "sets depth_key_rank, which `variant`"),
    ],
    ids=str,
)
def test_values_that_are_refused(changes, message):
    values = {"data": "data", "output_dir": "run", "steps": 10, "warmup_steps": 1}
    with pytest.raises(ValueError, match=message):
        TrainArguments(**values | changes).check()


def test_a_bare_no_of_yaml(tmp_path):
    (tmp_path / "run.yaml").write_text("mixed_precision: no\n")
    assert load_arguments(str(tmp_path / "run.yaml")).mixed_precision == "no"


def test_values_that_are_not_yaml(capsys):
    with pytest.raises(SystemExit):
        parse("--model", "hidden_size=[}")
    assert "the value of 'hidden_size=[}' is not YAML" in capsys.readouterr().err


def test_command_line(capsys, tmp_path):
    assert cli.main(["train", "huge", "--data", "d", "--output-dir", "o"]) == 1
    assert capsys.readouterr().err == "Error: huge is neither a file nor a preset; the presets are paper-0.5b, tiny.\n"
    assert cli.main(["train", "tiny", "--data", str(tmp_path), "--output-dir", str(tmp_path / "run")]) == 1
    assert "holds no prepared tokens" in capsys.readouterr().err
    assert cli.main(["evaluate", "model", str(tmp_path)]) == 1
    assert "holds no prepared tokens" in capsys.readouterr().err


def test_a_model_that_is_trained_further_gets_lower_rates():
    """Unless rates are given; the queries, which start at zero, get a higher one."""
    tuned = TrainArguments(data="data", output_dir="run", steps=200, init_from="upgraded")
    new = TrainArguments(data="data", output_dir="run", steps=200)
    assert tuned.lr_muon < new.lr_muon and tuned.lr_adamw < new.lr_adamw < tuned.lr_queries
    assert (tuned.warmup_steps, new.warmup_steps, new.lr_queries) == (20, 2000, None)
    given = load_arguments(None, init_from="upgraded", steps=200, lr_muon=1.0, lr_adamw=2.0, warmup_steps=0)
    assert (given.lr_muon, given.lr_adamw, given.lr_queries, given.warmup_steps) == (1.0, 2.0, None, 0)
