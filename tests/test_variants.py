"""A variant has one name, which gives the config's fields and is got back from them."""

import pytest

from lr_attnres import LRAttnResConfig
from lr_attnres.cost import depth_cost
from lr_attnres.paper import PAPER_TABLE
from lr_attnres.variants import variant_fields, variant_name


def test_names_stand_for_fields_of_the_config():
    assert variant_fields("standard") == {"residual_type": "standard"}
    assert variant_fields("attnres-n16") == {"residual_type": "attnres", "num_depth_blocks": 16}
    assert variant_fields("projected-full-r32") == {
        "residual_type": "projected",
        "num_depth_blocks": None,
        "depth_key_rank": 32,
    }


@pytest.mark.parametrize("row", PAPER_TABLE, ids=lambda row: row.variant)
def test_rows_of_the_paper_and_their_names(row):
    config = LRAttnResConfig(**variant_fields(row.variant))
    assert variant_name(config) == variant_name(row.config) == row.variant
    assert depth_cost(config) == depth_cost(row.config)


def test_as_many_blocks_as_sublayers_are_full():
    names = [variant_name(LRAttnResConfig(num_hidden_layers=2, num_depth_blocks=blocks)) for blocks in (3, 4, 99)]
    assert names == ["sliced-n3-r64", "sliced-full-r64", "sliced-full-r64"]
