"""A variant's name gives the config fields, and the config fields give the name."""

from typing import get_args

import pytest

from lr_attnres import LRAttnResConfig, depth_cost, variant_fields, variant_name
from lr_attnres.analysis.paper import PAPER_TABLE
from lr_attnres.analysis.plots import COLOURS
from lr_attnres.configuration_lr_attnres import ResidualType
from lr_attnres.folders.card import DESCRIPTIONS
from lr_attnres.variants import RESIDUAL_TYPES


def test_every_list_has_every_type():
    """A new type must be described, drawn and chosen by name."""
    assert get_args(ResidualType) == RESIDUAL_TYPES == tuple(DESCRIPTIONS)
    assert {*COLOURS} == {*RESIDUAL_TYPES}


def test_names_stand_for_fields_of_the_config():
    assert variant_fields("standard") == {"residual_type": "standard"}
    assert variant_fields("attnres-n16") == {"residual_type": "attnres", "num_depth_blocks": 16}
    assert variant_fields("projected-full-r32") == {
        "residual_type": "projected",
        "num_depth_blocks": None,
        "depth_key_rank": 32,
    }


def test_depth_heads_in_a_name():
    assert variant_fields("attnres-n8-h4") == {"residual_type": "attnres", "num_depth_blocks": 8, "depth_heads": 4}
    for name in ("sliced-n8-r64-h8", "projected-full-r32-h2", "attnres-full-h16"):
        assert variant_name(LRAttnResConfig(**variant_fields(name))) == name
    assert variant_name(LRAttnResConfig(**variant_fields("sliced-n8-r64-h1"))) == "sliced-n8-r64"


@pytest.mark.parametrize(
    "name",
    [
        "sliced-n8-h8",
        "standard-h2",
        "sliced-n8-r64-h0",
        "sliced",
        "sliced-8-r64",
        "sliced-none-r64",
        "attnres-n8-r64",
        "standard-n8",
        "n8",
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=f"`variant` is '{name}'; write .* full, which is None in the config"):
        variant_fields(name)


@pytest.mark.parametrize("row", PAPER_TABLE, ids=lambda row: row.variant)
def test_rows_of_the_paper_and_their_names(row):
    config = LRAttnResConfig(**variant_fields(row.variant))
    assert variant_name(config) == variant_name(row.config) == row.variant
    assert depth_cost(config) == depth_cost(row.config)


def test_as_many_blocks_as_sublayers_are_full():
    names = [variant_name(LRAttnResConfig(num_hidden_layers=2, num_depth_blocks=blocks)) for blocks in (3, 4, 99)]
    assert names == ["sliced-n3-r64", "sliced-full-r64", "sliced-full-r64"]
