"""The published figures come out exactly, and the counts are those of a real model."""

from pathlib import Path

import pytest
import torch
from common import ROUTED, VARIANTS, random_tokens, small_config, small_model
from torch.utils.flop_counter import FlopCounterMode

from lr_attnres import LRAttnResConfig, LRAttnResForCausalLM, cli
from lr_attnres.cost import attnres_macs, break_even_rank, depth_cost, num_parameters
from lr_attnres.paper import PAPER_TABLE


ROOT = Path(__file__).parents[1]
# residual type, blocks, rank, added FLOPs in percent as published
PUBLISHED = [
    ("standard", None, 64, 0.0),
    ("attnres", None, 1024, 0.8131),
    ("attnres", 4, 1024, 0.1116),
    ("attnres", 8, 1024, 0.1754),
    ("attnres", 16, 1024, 0.3029),
    ("projected", None, 16, 0.8966),
    ("projected", None, 32, 1.3865),
    ("projected", None, 64, 2.3665),
    ("projected", 4, 32, 1.0248),
    ("projected", 8, 32, 1.0577),
    ("projected", 16, 32, 1.1235),
    ("sliced", None, 16, 0.4129),
    ("sliced", None, 32, 0.4193),
    ("sliced", None, 64, 0.4320),
    ("sliced", None, 128, 0.4574),
    ("sliced", None, 256, 0.5082),
    ("sliced", None, 512, 0.6099),
    ("sliced", 4, 64, 0.0593),
    ("sliced", 8, 64, 0.0932),
    ("sliced", 16, 64, 0.1609),
]


def paper_config(residual_type: str, blocks: int | None, rank: int) -> LRAttnResConfig:
    return LRAttnResConfig(residual_type=residual_type, num_depth_blocks=blocks, depth_key_rank=rank)


@pytest.mark.parametrize("residual_type, blocks, rank, percent", PUBLISHED)
def test_published_added_flops(residual_type, blocks, rank, percent):
    cost = depth_cost(paper_config(residual_type, blocks, rank))
    assert round(cost.added_flops_percent, 4) == percent
    assert cost.core_macs == 308_281_344


@pytest.mark.parametrize("blocks, reads, retained", [(None, 1224, 49), (4, 168, 5), (8, 264, 9), (16, 456, 17)])
def test_published_source_reads(blocks, reads, retained):
    cost = depth_cost(paper_config("sliced", blocks, 64))
    assert (cost.source_reads, cost.retained_sources) == (reads, retained)


def test_worked_example_of_rank_32():
    attnres, projected, sliced = (
        depth_cost(paper_config(kind, None, 32)) for kind in ("attnres", "projected", "sliced")
    )
    assert round(100 * (1 - projected.kernel_macs / attnres.kernel_macs), 2) == 48.44
    assert projected.key_projection_macs == 2_981_888
    assert projected.source_cache_elements / attnres.source_cache_elements == 1.03125
    assert sliced.source_cache_elements == attnres.source_cache_elements
    assert (projected.added_parameters, sliced.added_parameters) == (2_983_424, 1_536)


@pytest.mark.parametrize("variant", ROUTED)
@pytest.mark.parametrize("blocks", [1, 3, 5, 99])
def test_counts_are_those_of_the_model(variant, blocks):
    """At an odd block count, with grouped heads and a head size of its own."""
    blocks = blocks if variant.endswith("block") else None
    overrides = {"num_depth_blocks": blocks, "head_dim": 6}
    cost = depth_cost(small_config(variant, **overrides))
    model = small_model(variant, **overrides)
    weights = model(random_tokens(1, 3), output_depth_weights=True).depth_weights
    assert cost.source_reads == sum(site.shape[-1] for site in weights)
    assert cost.retained_sources == max(site.shape[-1] for site in weights)
    plain = small_model("standard", head_dim=6, norm_weight=model.config.norm_weight)
    assert cost.added_parameters == model.num_parameters() - plain.num_parameters()
    assert cost.core_macs == sum(p.numel() for n, p in plain.model.layers.named_parameters() if "norm" not in n)


@pytest.mark.parametrize("row", PAPER_TABLE, ids=str)
def test_parameters_at_the_paper_size_are_those_of_the_model(row):
    with torch.device("meta"):
        model = LRAttnResForCausalLM(row.config)
    assert num_parameters(row.config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fields", [{}, {"head_dim": 6, "tie_word_embeddings": True}, {"qk_norm": False}], ids=str)
def test_parameters_are_those_of_the_model(variant, fields):
    config = small_config(variant, **fields)
    assert num_parameters(config) == LRAttnResForCausalLM(config).num_parameters()


def count_macs(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("row", [PAPER_TABLE[i] for i in (1, 9, 13)], ids=lambda row: row.residual_type)
def test_multiply_adds_are_those_that_torch_counts(row):
    """On the meta device, at the paper's size. Logits and projections are matrix products, which torch counts in the
    model; the weighted sums are element-wise there, so they are counted as products of the model's own weights."""
    tokens, cost = 5, depth_cost(row.config)
    plain = LRAttnResConfig(residual_type="standard")
    with torch.device("meta"), torch.no_grad():
        routed, standard = LRAttnResForCausalLM(row.config), LRAttnResForCausalLM(plain)
        input_ids = torch.zeros(1, tokens, dtype=torch.long)
        added = count_macs(lambda: routed(input_ids)) - count_macs(lambda: standard(input_ids))
        weights = routed(input_ids, output_depth_weights=True).depth_weights
        values = [torch.empty(1, tokens, site.shape[-1], plain.hidden_size) for site in weights]
        sums = count_macs(lambda: [site.unsqueeze(-2) @ value for site, value in zip(weights, values)])
        projections = count_macs(lambda: standard.model(input_ids))
        projections -= plain.num_hidden_layers * 2 * tokens * tokens * plain.hidden_size  # attention over tokens
    assert projections == tokens * cost.core_macs
    assert added == tokens * (cost.key_projection_macs + row.config.depth_key_rank * cost.source_reads)
    assert added + sums == tokens * cost.total_macs


@pytest.mark.parametrize("blocks", [None, 4, 8, 16])
def test_break_even_rank_is_where_projected_keys_stop_saving(blocks):
    config = paper_config("projected", blocks, 1)
    mark, bound = attnres_macs(config), break_even_rank(config)
    assert mark == depth_cost(paper_config("attnres", blocks, 1024)).total_macs
    assert depth_cost(paper_config("projected", blocks, int(bound))).total_macs < mark
    assert depth_cost(paper_config("projected", blocks, int(bound) + 1)).total_macs > mark


def test_command_prints_every_published_figure(capsys):
    assert cli.main(["cost", "--paper"]) == 0
    out = capsys.readouterr().out
    lines = {line.split(" ")[0]: line.split() for line in out.splitlines()}
    for kind, blocks, rank, percent in PUBLISHED:
        size = "" if kind == "standard" else "-full" if blocks is None else f"-n{blocks}"
        name = kind + size + (f"-r{rank}" if kind in ("projected", "sliced") else "")
        assert f"{percent:.4f}" in lines[name]
    losses = "3.0009 2.9752 2.9797 2.9778 2.9673 2.9606 2.9538 2.9501 2.9488 2.9477 2.9543 2.9762 2.9682 2.9638 2.9630"
    norms = "0.9775 1.0030 0.8166 0.7737 0.7624 0.7930 0.7911 0.8123 0.8577 0.8757 0.9084"
    counts = "308,281,344 513,648,640 513,697,792 516,632,064 1,224 168 264 456"
    example = [
        "48.44 %",
        "2,981,888 multiply-adds",
        "+3.125 % (projected), +0 % (sliced)",
        "2,983,424 (projected), 1,536",
    ]
    figures = [*f"{losses} 2.9626 2.9617 2.9533 2.9480 2.9494 {norms} {counts}".split(), *example]
    assert [figure for figure in figures if figure not in out] == []


def test_the_table_of_the_readme():
    table = (ROOT / "README.md").read_text().split("| variant | added FLOPs, % | added parameters | loss (paper) |")[1]
    quoted = [line.strip("| ").split(" | ") for line in table.split("\n\n")[0].splitlines()[2:]]
    computed = {}
    for row in PAPER_TABLE:
        cost = depth_cost(row.config)
        figures = f"{cost.added_flops_percent:.4f}", f"{cost.added_parameters:,}", f"{row.validation_loss:.4f}"
        computed[row.variant] = [row.variant, *figures]
    assert len(quoted) == 5 and quoted == [computed[row[0]] for row in quoted]


def test_command_for_one_model(tmp_path, capsys):
    assert cli.main(["cost"]) == 0
    assert "sliced-n8-r64" in (out := capsys.readouterr().out) and "0.0932 % of the core" in out
    options = ["--residual-type", "projected", "--num-depth-blocks", "full", "--depth-key-rank", "32"]
    assert cli.main(["cost", *options]) == 0
    assert "1.3865 % of the core" in (out := capsys.readouterr().out) and "ranks below 13.28" in out
    small_config("projected_block").save_pretrained(tmp_path)
    assert cli.main(["cost", str(tmp_path)]) == 0
    assert f"{depth_cost(small_config('projected_block')).total_macs:,} " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--paper", "--hidden-size", "64"], "give one of MODEL, --paper and the options of a model."),
        ([""], "'' is not on this machine, nor a Hub repository"),
        (["--figure", ""], "--figure draws the paper's table: give --paper too."),
        (["--figure", "paper.png"], "--figure draws the paper's table: give --paper too."),
        (["--hidden-size", "100"], "`hidden_size` is 100, not a multiple of `num_attention_heads` = 16"),
        (["--depth-key-rank", "0"], "`depth_key_rank` is 0; it must lie in 1..hidden_size = 1024."),
    ],
    ids=str,
)
def test_command_refuses(arguments, message, capsys):
    assert cli.main(["cost", *arguments]) == 1
    assert f"Error: {message}" in capsys.readouterr().err
