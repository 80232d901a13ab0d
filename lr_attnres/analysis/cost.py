"""The exact cost of depth routing per token, computed from the config alone."""

from dataclasses import dataclass

from ..configuration_lr_attnres import LRAttnResConfig
from ..depth_routing import DepthSite
from ..variants import variant_name
from .paper import PAPER_TABLE


@dataclass(frozen=True)
class DepthCost:
    """Counts per token; `macs` are multiply-adds."""

    source_reads: int  # sources read, summed over sites 1..2L
    kernel_macs: int  # logits and weighted sums of all reads
    key_projection_macs: int  # projections that emit the routing keys; 0 unless `projected`
    total_macs: int  # kernel_macs + key_projection_macs
    core_macs: int  # all projections of the ordinary decoder layers, without embeddings and attention scores
    added_flops_percent: float  # total_macs in percent of core_macs
    added_parameters: int  # queries and key projections
    source_cache_elements: int  # numbers kept while the layers run
    retained_sources: int  # the largest number of sources kept at once, including the embedding and the partial


def depth_cost(config: LRAttnResConfig) -> DepthCost:
    layers, hidden, rank = config.num_hidden_layers, config.hidden_size, config.depth_key_rank
    key_value_heads, head_dim = config.attention_sizes()
    attention_width = 2 * (config.num_attention_heads + key_value_heads) * head_dim
    core = layers * hidden * (attention_width + 3 * config.intermediate_size)
    if config.residual_type == "standard":
        return DepthCost(0, 0, 0, 0, core, 0.0, 0, 0, 0)

    sources = _sources_per_site(config)
    projected = config.residual_type == "projected"
    kernel = (hidden + rank) * sum(sources)
    key_projection = rank * _key_projection_inputs(config) if projected else 0
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


def attnres_macs(config: LRAttnResConfig) -> int:
    """The total_macs of `attnres` with the same blocks, to compare other variants with."""
    return 2 * config.hidden_size * sum(_sources_per_site(config))


def break_even_rank(config: LRAttnResConfig) -> float:
    """The rank below which `projected` costs less than `attnres` with the same blocks.

    Solves `(D + R) S + R P = 2 D S` for R, with S source reads and P inputs of key projections.
    """
    reads = sum(_sources_per_site(config))
    return config.hidden_size * reads / (reads + _key_projection_inputs(config))


def num_parameters(config: LRAttnResConfig) -> int:
    """All parameters of the causal language model."""
    cost = depth_cost(config)
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    norms = 0
    if config.norm_weight:
        norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
        norms += 2 * config.num_hidden_layers * config.attention_sizes()[1] if config.qk_norm else 0
    return embeddings + cost.core_macs + norms + cost.added_parameters


def cost_report(config: LRAttnResConfig) -> str:
    cost = depth_cost(config)
    lines = [
        f"{variant_name(config)}: {config.num_hidden_layers} layers, hidden size {config.hidden_size:,}, "
        f"intermediate size {config.intermediate_size:,}. Per token:",
        f"  multiply-adds of the core      {cost.core_macs:>15,}",
        f"  source reads                   {cost.source_reads:>15,}",
        f"  multiply-adds of the reads     {cost.kernel_macs:>15,}",
        f"  multiply-adds of the keys      {cost.key_projection_macs:>15,}",
        f"  added multiply-adds            {cost.total_macs:>15,}  {cost.added_flops_percent:.4f} % of the core",
        f"  source cache, elements         {cost.source_cache_elements:>15,}  in {cost.retained_sources} sources",
        f"  added parameters               {cost.added_parameters:>15,}  of {num_parameters(config):,}",
    ]
    if config.residual_type != "standard":
        attnres = attnres_macs(config)
        change, rank = cost.total_macs - attnres, break_even_rank(config)
        lines.insert(6, f"  net change against attnres     {change:>+15,}  {100 * change / attnres:+.2f} %")
        lines.append(f"Projected keys with these blocks cost less than attnres at ranks below {rank:.2f}.")
    return "\n".join(lines)


def paper_report() -> str:
    """The paper's table with computed costs and published results, and its worked example, as text."""
    head = ("variant", "reads", "read macs", "key macs", "added %", "vs attnres", "parameters", "added", "cache")
    rows: list[tuple[str, ...]] = [(*head, "loss*", "grad norm*")]
    for row in PAPER_TABLE:
        config, cost = row.config, depth_cost(row.config)
        change = "" if row.residual_type == "standard" else f"{cost.total_macs - attnres_macs(config):+,}"
        rows.append(
            (
                row.variant,
                f"{cost.source_reads:,}",
                f"{cost.kernel_macs:,}",
                f"{cost.key_projection_macs:,}",
                f"{cost.added_flops_percent:.4f}",
                change,
                f"{num_parameters(config):,}",
                f"{cost.added_parameters:,}",
                f"{cost.source_cache_elements:,}",
                f"{row.validation_loss:.4f}",
                "" if row.gradient_norm is None else f"{row.gradient_norm:.4f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in rows
    ]
    size = PAPER_TABLE[0].config
    title = (
        f"{size.num_hidden_layers} layers, hidden size {size.hidden_size:,}, intermediate size "
        f"{size.intermediate_size:,}: a core of {depth_cost(size).core_macs:,} multiply-adds (macs) per token."
    )
    note = "* as published: validation loss, and gradient norm averaged over training."
    return "\n".join([title, "", *table, "", note, "", *_worked_example()])


def _worked_example() -> list[str]:
    """The paper's example: full source set, rank 32."""
    configs = {row.variant: row.config for row in PAPER_TABLE}
    variants = ("attnres-full", "projected-full-r32", "sliced-full-r32")
    attnres, projected, sliced = (depth_cost(configs[variant]) for variant in variants)
    saving = 100 * (1 - projected.kernel_macs / attnres.kernel_macs)
    cache = [100 * (cost.source_cache_elements / attnres.source_cache_elements - 1) for cost in (projected, sliced)]
    rank = break_even_rank(configs["projected-full-r32"])
    return [
        "Worked example, full source set, rank 32:",
        f"  multiply-adds of the reads     {-saving:.2f} % against attnres",
        f"  key projections (projected)    {projected.key_projection_macs:,} multiply-adds",
        f"  source cache                   {cache[0]:+.3f} % (projected), {cache[1]:+.0f} % (sliced)",
        f"  added parameters               {projected.added_parameters:,} (projected), "
        f"{sliced.added_parameters:,} (sliced)",
        f"  break-even                     projected keys cost less than attnres at ranks below {rank:.2f}",
    ]


def _key_projection_inputs(config: LRAttnResConfig) -> int:
    """The input widths of all key projections, summed: attention and feed-forward of each layer, and the embedding."""
    query_width = config.num_attention_heads * config.attention_sizes()[1]
    return config.num_hidden_layers * (query_width + config.intermediate_size) + config.hidden_size


def _sources_per_site(config: LRAttnResConfig) -> list[int]:
    """For sites 1..2L: the embedding, the completed blocks and, inside a block, the partial."""
    sites = DepthSite.schedule(2 * config.num_hidden_layers, config.num_depth_blocks)
    return [site.num_sources for site in sites]
