"""The computed costs equal the published figures, written down here, and the counts of a real model."""

from pathlib import Path

import pytest
import torch
from common import ROUTED, VARIANTS, random_tokens, small_config, small_model
from torch.utils.flop_counter import FlopCounterMode

from lr_attnres import LRAttnResConfig, LRAttnResForCausalLM, cli, depth_cost
from lr_attnres.analysis.cost import attnres_macs, break_even_rank, num_parameters
from lr_attnres.analysis.paper import PAPER_TABLE


ROOT = Path(__file__).parents[2]
# The paper's model has 24 layers, hidden size 1,024, intermediate size 2,816 and a vocabulary of 100,277.
CORE_MACS = 308_281_344
STANDARD_PARAMETERS = 513_648_640
# residual type, blocks, rank, added FLOPs in percent, added parameters, validation loss
PUBLISHED = [
    ("standard", None, 64, 0.0, 0, 3.0009),
    ("attnres", None, 1024, 0.8131, 49_152, 2.9752),
    ("attnres", 4, 1024, 0.1116, 49_152, 2.9797),
    ("attnres", 8, 1024, 0.1754, 49_152, 2.9778),
    ("attnres", 16, 1024, 0.3029, 49_152, 2.9673),
    ("projected", None, 16, 0.8966, 1_491_712, 2.9606),
    ("projected", None, 32, 1.3865, 2_983_424, 2.9538),
    ("projected", None, 64, 2.3665, 5_966_848, 2.9501),
    ("projected", 4, 32, 1.0248, 2_983_424, 2.9488),
    ("projected", 8, 32, 1.0577, 2_983_424, 2.9477),
    ("projected", 16, 32, 1.1235, 2_983_424, 2.9543),
    ("sliced", None, 16, 0.4129, 768, 2.9762),
    ("sliced", None, 32, 0.4193, 1_536, 2.9682),
    ("sliced", None, 64, 0.4320, 3_072, 2.9638),
    ("sliced", None, 128, 0.4574, 6_144, 2.9630),
    ("sliced", None, 256, 0.5082, 12_288, 2.9626),
    ("sliced", None, 512, 0.6099, 24_576, 2.9617),
    ("sliced", 4, 64, 0.0593, 3_072, 2.9533),
    ("sliced", 8, 64, 0.0932, 3_072, 2.9480),
    ("sliced", 16, 64, 0.1609, 3_072, 2.9494),
]


def paper_config(residual_type: str, blocks: int | None, rank: int, *figures: float) -> LRAttnResConfig:
    return LRAttnResConfig(residual_type=residual_type, num_depth_blocks=blocks, depth_key_rank=rank)


def variant_of(residual_type: str, blocks: int | None, rank: int, *figures: float) -> str:
    if residual_type == "standard":
        return "standard"
    name = f"{residual_type}-full" if blocks is None else f"{residual_type}-n{blocks}"
    return name if residual_type == "attnres" else f"{name}-r{rank}"


def test_the_table_of_the_package_is_the_published_one():
    published = [(variant_of(*row), row[-1]) for row in PUBLISHED]
    assert [(row.variant, row.validation_loss) for row in PAPER_TABLE] == published


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: variant_of(*row))
def test_published_figures(row):
    _, _, _, percent, added_parameters, _ = row
    config = paper_config(*row)
    cost = depth_cost(config)
    assert cost.core_macs == CORE_MACS
    assert round(cost.added_flops_percent, 4) == percent
    assert cost.added_parameters == added_parameters
    with torch.device("meta"):
        model = LRAttnResForCausalLM(config)
    in_model = sum(parameter.numel() for parameter in model.parameters())
    assert (num_parameters(config), in_model) == (STANDARD_PARAMETERS + added_parameters,) * 2


@pytest.mark.parametrize(
    "residual_type, parameters", [("standard", 513_648_640), ("attnres", 513_697_792), ("projected", 516_632_064)]
)
def test_published_parameters(residual_type, parameters):
    assert num_parameters(paper_config(residual_type, None, 32)) == parameters


@pytest.mark.parametrize("blocks, reads, retained", [(None, 1224, 49), (4, 168, 5), (8, 264, 9), (16, 456, 17)])
def test_published_source_reads(blocks, reads, retained):
    cost = depth_cost(paper_config("sliced", blocks, 64))
    assert (cost.source_reads, cost.retained_sources) == (reads, retained)


def test_worked_example_of_rank_32():
    """48.44 % fewer multiply-adds in the reads, and a source cache that is 3.125 % larger (projected) or unchanged."""
    attnres, projected, sliced = (
        depth_cost(paper_config(kind, None, 32)) for kind in ("attnres", "projected", "sliced")
    )
    assert (attnres.kernel_macs, projected.kernel_macs, sliced.kernel_macs) == (2_506_752, 1_292_544, 1_292_544)
    assert round(100 * (1 - projected.kernel_macs / attnres.kernel_macs), 2) == 48.44
    assert (attnres.key_projection_macs, projected.key_projection_macs) == (0, 2_981_888)
    cache = (attnres.source_cache_elements, projected.source_cache_elements, sliced.source_cache_elements)
    assert cache == (50_176, 51_744, 50_176) and 51_744 / 50_176 == 1.03125
    assert (projected.added_parameters, sliced.added_parameters) == (2_983_424, 1_536)


# 4 layers, hidden size 32, 4 heads of 8 and 2 key-value heads, intermediate size 40, vocabulary 61, rank 8
SMALL = {
    "standard": (31_552, 0, 0, 0),
    "attnres_full": (31_808, 44, 2_816, 0),
    "attnres_block": (31_808, 23, 1_472, 0),
    "projected_full": (34_176, 44, 1_760, 2_560),
    "projected_block": (34_176, 23, 920, 2_560),
    "sliced_full": (31_616, 44, 1_760, 0),
    "sliced_block": (31_616, 23, 920, 0),
}


@pytest.mark.parametrize("variant", SMALL)
def test_figures_of_a_small_model(variant):
    config = small_config(variant)
    cost = depth_cost(config)
    figures = (cost.source_reads, cost.kernel_macs, cost.key_projection_macs)
    assert (num_parameters(config), *figures) == SMALL[variant]
    assert LRAttnResForCausalLM(config).num_parameters() == SMALL[variant][0]


@pytest.mark.parametrize("variant", ROUTED)
@pytest.mark.parametrize("blocks", [1, 3, 5, 99])
def test_counts_are_those_of_the_model(variant, blocks):
    """With odd numbers of blocks, grouped heads, and a head size that is not hidden size / heads."""
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
    """On the meta device, at the paper's size. torch counts matrix products only: it counts logits and projections in
    the model. The weighted sums are element-wise there, so this test repeats them as products of the depth weights."""
    tokens, cost = 80, depth_cost(row.config)  # fewer would be read from a bank, in other products
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
    attnres, rank = attnres_macs(config), break_even_rank(config)
    assert attnres == depth_cost(paper_config("attnres", blocks, 1024)).total_macs
    assert depth_cost(paper_config("projected", blocks, int(rank))).total_macs < attnres
    assert depth_cost(paper_config("projected", blocks, int(rank) + 1)).total_macs > attnres


def test_command_prints_every_published_figure(capsys):
    assert cli.main(["cost", "--paper"]) == 0
    out = capsys.readouterr().out
    lines = {line.split(" ")[0]: line.split() for line in out.splitlines()}
    for row in PUBLISHED:
        _, _, _, percent, added_parameters, loss = row
        assert {f"{percent:.4f}", f"{added_parameters:,}", f"{loss:.4f}"} <= set(lines[variant_of(*row)])
    norms = "0.9775 1.0030 0.8166 0.7737 0.7624 0.7930 0.7911 0.8123 0.8577 0.8757 0.9084"
    counts = "308,281,344 513,648,640 513,697,792 516,632,064 1,224 168 264 456"
    example = [
        "48.44 %",
        "2,981,888 multiply-adds",
        "+3.125 % (projected), +0 % (sliced)",
        "2,983,424 (projected), 1,536",
    ]
    figures = [*f"{norms} {counts}".split(), *example]
    assert [figure for figure in figures if figure not in out] == []


def test_the_table_of_the_readme():
    """The columns that are not measured; a second `standard`, which shows the noise, has none of them."""
    _, table = (ROOT / "README.md").read_text().split("| variant | loss (paper) |")
    heads, _, *lines = [line.strip("| ").split(" | ") for line in table.split("\n\n")[0].splitlines()]
    places = [0, 1, *(2 + heads.index(name) for name in ("added FLOPs, %", "added parameters"))]
    quoted = [[cells[place] for place in places] for cells in lines]
    published = {}
    for row in PUBLISHED:
        _, _, _, percent, added_parameters, loss = row
        published[variant_of(*row)] = [f"{loss:.4f}", f"{percent:.4f}", f"{added_parameters:,}"]
    published["standard (copy)"] = ["-", "-", "-"]
    assert len(quoted) >= 5 and quoted == [[variant, *published[variant]] for variant, *_ in quoted]


def test_command_for_one_model(tmp_path, capsys):
    assert cli.main(["cost"]) == 0
    assert "sliced-n8-r64" in (out := capsys.readouterr().out) and "0.0932 % of the core" in out
    options = ["--residual-type", "projected", "--num-depth-blocks", "full", "--depth-key-rank", "32"]
    assert cli.main(["cost", *options]) == 0
    assert "1.3865 % of the core" in (out := capsys.readouterr().out) and "ranks below 13.28" in out
    small_config("projected_block").save_pretrained(tmp_path)
    assert cli.main(["cost", str(tmp_path)]) == 0
    assert "3,480 " in capsys.readouterr().out  # 920 for the reads and 2,560 for the keys


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--paper", "--hidden-size", "64"],
            "MODEL, --paper and the options of a model exclude each other: give one of them.",
        ),
        ([""], "'' is not on this machine, nor a Hub repository"),
        (["--figure", ""], "--figure draws the paper's table: add --paper."),
        (["--figure", "paper.png"], "--figure draws the paper's table: add --paper."),
        (["--hidden-size", "100"], "`hidden_size` is 100, not a multiple of `num_attention_heads` = 16"),
        (["--depth-key-rank", "0"], "`depth_key_rank` is 0; it must lie in 1..hidden_size = 1024."),
    ],
    ids=str,
)
def test_command_refuses(arguments, message, capsys):
    assert cli.main(["cost", *arguments]) == 1
    assert f"Error: {message}" in capsys.readouterr().err
