"""Plan a pretraining run: compute, tokens per second, memory and traffic per GPU, from the config alone.

python examples/plan_run.py                  all tables of docs/training_at_scale.md (about a minute)
python examples/plan_run.py --only compute   one table: compute, speed, memory, growth or pipeline

All figures are computed (in `run_needs.py`). Nothing is measured on a GPU.
"""

import argparse
from collections.abc import Iterator

from run_needs import ROW, activation_bytes, loss_bytes, parameters, state_bytes, training_flops

from lr_attnres import LRAttnResConfig, depth_cost, variant_fields
from lr_attnres.training import boundary_elements


VARIANTS = ["standard", "sliced-n8-r64", "projected-n8-r32", "sliced-full-r64", "attnres-full"]
TOKENS, MICRO_BATCH = 10e9, 8
PEAK = {"A100": 312e12, "H100": 989e12}  # dense bf16 operations per second, from the vendor's data sheets
LINK = 50e9  # bytes per second and direction between a GPU and other nodes: 400 Gbit/s
SIZES = {
    "0.5B": {},
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}
GIB = 2**30


def config_of(variant: str, size: str = "0.5B") -> LRAttnResConfig:
    return LRAttnResConfig(**SIZES[size], **variant_fields(variant))


def table(header: str, rows: Iterator[str]) -> list[str]:
    return [f"| {header} |", "|" + "---|" * (header.count("|") + 1), *(f"| {row} |" for row in rows)]


def compute() -> list[str]:
    base = training_flops(config_of("standard"))
    rows = []
    for variant in VARIANTS:
        config = config_of(variant)
        flops = training_flops(config)
        rows.append(
            f"{variant} | {parameters(config)[0]:,} | {flops / 1e9:.3f} | {100 * (flops / base - 1):.2f} % | "
            f"{flops * TOKENS / 1e18:.2f}"
        )
    return table("variant | parameters | GFLOP per token | over standard | EFLOP for 10B tokens", rows)


def speed() -> list[str]:
    flops, rows = training_flops(config_of("sliced-n8-r64")), []
    for gpus in (1, 8, 16, 64):
        rate = TOKENS / 86400 / gpus
        shares = [f"{100 * rate * flops / peak:.1f} %" for peak in PEAK.values()]
        rows.append(f"{gpus} | {rate:,.0f} | " + " | ".join(shares))
    return table("GPUs | tokens per second and GPU | " + " | ".join(f"of an {name}'s peak" for name in PEAK), rows)


def memory_row(variant: str) -> str:
    config, tokens = config_of(variant), ROW * MICRO_BATCH
    states, copies = state_bytes(config), 2 * depth_cost(config).core_macs + loss_bytes(config, tokens)
    kept, checkpointed = activation_bytes(config, tokens)
    figures = (states, copies, kept, checkpointed, states + copies + kept, states + copies + checkpointed)
    return f"{variant} | " + " | ".join(f"{figure / GIB:.1f}" for figure in figures)


def memory() -> list[str]:
    header = "variant | weights, gradients, optimizers | bf16 copies and loss | activations | with checkpointing | "
    return table(header + "sum | sum with checkpointing", (memory_row(variant) for variant in VARIANTS))


def growth_row(size: str, gpus: int, tokens: float, batch: int) -> str:
    """FSDP2 with gradient checkpointing, on H100s at 40 % of their peak."""
    config = config_of("sliced-n8-r64", size)
    cost, total, embedding = depth_cost(config), parameters(config)[0], config.vocab_size * config.hidden_size
    micro = min(batch // gpus, ROW * MICRO_BATCH)
    # unsharded at one time: two layers, embedding and head in bf16, and the gradient of the head in fp32
    whole = 4 * cost.core_macs / config.num_hidden_layers + 4 * embedding + 4 * embedding
    memory = state_bytes(config) / gpus + whole + activation_bytes(config, micro)[1] + loss_bytes(config, micro)
    rate = 0.4 * PEAK["H100"] / (training_flops(config) * 4 / 3)  # checkpointing runs the forward twice
    traffic = 2 * 2 * total + 4 * total  # bf16 weights are gathered twice, fp32 gradients scattered once
    return (
        f"{size} | {gpus} | {tokens / 1e9:.0f}B | {batch:,} | {batch // gpus // ROW} | {memory / GIB:.1f} | "
        f"{rate:,.0f} | {tokens / rate / gpus / 3600:.1f} | {micro / rate:.2f} | {traffic / LINK:.2f}"
    )


def growth() -> list[str]:
    chinchilla = 20 * parameters(config_of("sliced-n8-r64", "7B"))[0]
    runs = [("0.5B", 8, TOKENS, 2**18), ("0.5B", 64, TOKENS, 2**18)]
    runs += [("7B", gpus, chinchilla, 2**22) for gpus in (64, 128, 256)]
    header = (
        "model | GPUs | tokens | tokens per step | rows per GPU and step | GiB per GPU | tokens per second and GPU"
    )
    header += " | hours | s to compute a micro-step | s to communicate it"
    return table(header, (growth_row(*run) for run in runs))


def boundary_bytes(variant: str, stage: int, stages: int) -> tuple[int, int]:
    """From a stage to the next one, in bf16: bytes per token, and bytes per micro-batch."""
    values, logits, queries = boundary_elements(config_of(variant), stage, stages)
    return 2 * values + 4 * logits, 4 * queries


def pipeline(stages: int = 4) -> list[str]:
    standard, rows = boundary_bytes("standard", 0, stages)[0], []
    for variant in VARIANTS:
        cuts = [boundary_bytes(variant, stage, stages) for stage in range(stages - 1)]
        shares = [f"{per_token:,} ({per_token / standard:.1f})" for per_token, _ in cuts]
        rows.append(f"{variant} | " + " | ".join(shares) + f" | {cuts[0][1]:,}")
    header = " | ".join(f"after stage {stage} (of standard)" for stage in range(1, stages))
    return table(f"variant | {header} | bytes per micro-batch", iter(rows))


PARTS = {"compute": compute, "speed": speed, "memory": memory, "growth": growth, "pipeline": pipeline}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="print only this table")
    only = parser.parse_args().only
    for name in [only] if only else PARTS:
        print("\n".join([f"{name}:", *PARTS[name](), ""]), flush=True)


if __name__ == "__main__":
    main()
