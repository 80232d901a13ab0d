"""What depth routing costs beyond the ordinary decoder: exact counts per token, from the config alone."""

from dataclasses import dataclass

from .configuration_lr_attnres import LRAttnResConfig, ResidualType
from .depth_routing import depth_block_ends
from .paper import PAPER_TABLE
from .variants import variant_name


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
    key_value_heads, head_dim = config.attention_sizes()
    query_width, key_value_width = config.num_attention_heads * head_dim, key_value_heads * head_dim
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


def attnres_macs(config: LRAttnResConfig) -> int:
    """What the residual side would cost with whole values as keys and the same blocks: the mark to beat."""
    return 2 * config.hidden_size * sum(_sources_per_site(2 * config.num_hidden_layers, config.num_depth_blocks))


def break_even_rank(config: LRAttnResConfig) -> float:
    """Projected keys cost less than `attnres` with the same blocks if and only if their rank is below this.

    `(D + R) S + R P < 2 D S` with S source reads and P inputs of key projections, solved for R.
    """
    reads = sum(_sources_per_site(2 * config.num_hidden_layers, config.num_depth_blocks))
    query_width = config.num_attention_heads * config.attention_sizes()[1]
    inputs = config.num_hidden_layers * (query_width + config.intermediate_size) + config.hidden_size
    return config.hidden_size * reads / (reads + inputs)


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
    """The cost of one config, for people."""
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
        mark, bound = attnres_macs(config), break_even_rank(config)
        net = cost.total_macs - mark
        lines.insert(6, f"  net change against attnres     {net:>+15,}  {100 * net / mark:+.2f} %")
        lines.append(f"Projected keys with these blocks cost less than attnres at ranks below {bound:.2f}.")
    return "\n".join(lines)


def paper_report() -> str:
    """The paper's table, costs computed and results as published, and its worked example."""
    head = ("variant", "reads", "read macs", "key macs", "added %", "vs attnres", "parameters", "added", "cache")
    rows: list[tuple[str, ...]] = [(*head, "loss*", "grad norm*")]
    for row in PAPER_TABLE:
        config, cost = row.config, depth_cost(row.config)
        net = "" if row.residual_type == "standard" else f"{cost.total_macs - attnres_macs(config):+,}"
        counts = (cost.source_reads, cost.kernel_macs, cost.key_projection_macs)
        rows.append(
            (
                row.variant,
                *(f"{count:,}" for count in counts),
                f"{cost.added_flops_percent:.4f}",
                net,
                *(f"{count:,}" for count in (num_parameters(config), cost.added_parameters)),
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
    return "\n".join(
        [
            f"{size.num_hidden_layers} layers, hidden size {size.hidden_size:,}, intermediate size "
            f"{size.intermediate_size:,}: a core of {depth_cost(size).core_macs:,} multiply-adds (macs) per token.",
            "",
            *table,
            "",
            "* as published: validation loss, and gradient norm averaged over the training.",
            "",
            *_worked_example(),
        ]
    )


def _worked_example() -> list[str]:
    """The full source set at rank 32."""
    kinds: tuple[ResidualType, ...] = ("attnres", "projected", "sliced")
    configs = {kind: LRAttnResConfig(residual_type=kind, num_depth_blocks=None, depth_key_rank=32) for kind in kinds}
    attnres, projected, sliced = map(depth_cost, configs.values())
    saving = 100 * (1 - projected.kernel_macs / attnres.kernel_macs)
    cache = [100 * (cost.source_cache_elements / attnres.source_cache_elements - 1) for cost in (projected, sliced)]
    bound = break_even_rank(configs["projected"])
    return [
        "Worked example, full source set, rank 32:",
        f"  multiply-adds of the reads     {-saving:.2f} % against attnres",
        f"  key projections (projected)    {projected.key_projection_macs:,} multiply-adds",
        f"  source cache                   {cache[0]:+.3f} % (projected), {cache[1]:+.0f} % (sliced)",
        f"  added parameters               {projected.added_parameters:,} (projected), "
        f"{sliced.added_parameters:,} (sliced)",
        f"  break-even                     projected keys cost less than attnres at ranks below {bound:.2f}",
    ]


def _sources_per_site(num_sites: int, num_blocks: int | None) -> list[int]:
    """For sites 1..2L: the embedding, the completed blocks and, inside a block, the partial."""
    ends = depth_block_ends(num_sites, num_blocks)
    return [1 + sum(end <= site for end in ends) + (site not in ends) for site in range(1, num_sites + 1)]
