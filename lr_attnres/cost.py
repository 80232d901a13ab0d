"""What depth routing costs beyond the ordinary decoder: exact counts per token, from the config alone."""

from dataclasses import dataclass

from .configuration_lr_attnres import LRAttnResConfig
from .depth_routing import depth_block_ends


@dataclass(frozen=True)
class DepthCost:
    """Counts per token; `macs` are multiply-adds.

    source_reads: sources read, summed over sites 1..2L.
    kernel_macs: logits and weighted sums of all reads.
    key_projection_macs: emitting the routing keys (`projected` alone).
    total_macs: both together, the residual side.
    core_macs: the projections of the ordinary decoder, embeddings and attention scores left out.
    added_flops_percent: total_macs in percent of core_macs.
    added_parameters: queries and key projections.
    source_cache_elements: numbers kept per token while the layers run.
    retained_sources: sources kept at once, the embedding and the partial included.
    """

    source_reads: int
    kernel_macs: int
    key_projection_macs: int
    total_macs: int
    core_macs: int
    added_flops_percent: float
    added_parameters: int
    source_cache_elements: int
    retained_sources: int


def depth_cost(config: LRAttnResConfig) -> DepthCost:
    """The cost of depth routing in a model of this config."""
    layers, hidden, inner, rank = (
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.depth_key_rank,
    )
    query_width = config.num_attention_heads * config.head_dim
    key_value_width = config.num_key_value_heads * config.head_dim
    core = layers * hidden * (2 * query_width + 2 * key_value_width + 3 * inner)
    if config.residual_type == "standard":
        return DepthCost(0, 0, 0, 0, core, 0.0, 0, 0, 0)

    sources = _sources_per_site(2 * layers, config.num_depth_blocks)
    projected = config.residual_type == "projected"
    kernel = (hidden + rank) * sum(sources)
    key_projection = rank * (layers * (query_width + inner) + hidden) if projected else 0
    return DepthCost(
        source_reads=sum(sources),
        kernel_macs=kernel,
        key_projection_macs=key_projection,
        total_macs=kernel + key_projection,
        core_macs=core,
        added_flops_percent=100 * (kernel + key_projection) / core,
        added_parameters=key_projection + 2 * layers * rank,
        source_cache_elements=max(sources) * (hidden + rank if projected else hidden),
        retained_sources=max(sources),
    )


def _sources_per_site(num_sites: int, num_blocks: int | None) -> list[int]:
    """For sites 1..2L: the embedding, the completed blocks and, inside a block, the partial."""
    ends = depth_block_ends(num_sites, num_blocks)
    return [1 + sum(end <= site for end in ends) + (site not in ends) for site in range(1, num_sites + 1)]
