"""The published figures come out exactly, and the counts are those of a real model."""

import pytest
from common import ROUTED, random_tokens, small_config, small_model

from lr_attnres import LRAttnResConfig
from lr_attnres.cost import depth_cost


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
