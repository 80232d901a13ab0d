"""Writes the tables of docs/performance.md and README.md from the JSON reports in benchmarks/results.

    python benchmarks/tables.py

A table stands between `<!-- table: train_step -->` and `<!-- /table -->`. What has not been measured is a dash.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import COPY, QWEN, ROWS, VARIANTS

from lr_attnres.analysis.cost import depth_cost
from lr_attnres.analysis.paper import PAPER_TABLE
from lr_attnres.analysis.roofline import (
    PHASES,
    SHEETS,
    decoding_launches,
    depth_bytes,
    paper_config,
    predicted_ratio,
    rest_bytes,
)
from lr_attnres.depth_routing import DepthSite


ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples/miniature"))
from report import BASELINE, Results, difference_text  # noqa: E402
from sweep import load_sweep  # noqa: E402


RESULTS = ROOT / "benchmarks/results"
MINIATURE = ROOT / "examples/miniature/results"
PAGES = [ROOT / "docs/performance.md", ROOT / "docs/gpu.md", ROOT / "README.md"]
LAYERS = [4, 8, 16, 32]
SERVED = ["sliced-n8-r64", QWEN]
PREDICTED = [variant for variant in VARIANTS if not variant.startswith("attnres")]  # whose numbers are those of sliced
Columns = dict[str, dict[str, Any]]  # title -> row -> number or text


def load(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def table(columns: Columns, digits: dict[str, int] | int = 3, head: str = "model", rows: list[str] | None = None):
    """The lines of a table. `digits`: of all columns, or by title."""
    lines = [[head, *columns], ["---"] * (1 + len(columns))]
    for row in rows or dict.fromkeys(row for column in columns.values() for row in column):
        cells = [row]
        for title, column in columns.items():
            decimals = digits if isinstance(digits, int) else digits.get(title, 3)
            cell = column.get(row, "-")
            cells.append(cell if isinstance(cell, str) else f"{cell:,.{decimals}f}")
        lines.append(cells)
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def ratios(name: str, mode: str) -> dict[str, float]:
    """row -> ratio to `standard`, as timed."""
    rows = load(name).get("modes", {}).get(mode, {"rows": {}})["rows"]
    return {row: numbers["ratio"] for row, numbers in rows.items()}


def steps(name: str) -> list[str]:
    return table_of_ratios({mode: ratios(name, mode) for mode in ("eager", "compiled")})


def table_of_ratios(columns: Columns) -> list[str]:
    measured = {row for column in columns.values() for row in column}
    others = sorted(measured - {*ROWS})  # variants beyond `ROWS`
    rows = [row for row in dict.fromkeys(["standard", COPY, *ROWS, *others]) if row in measured]
    return table(columns, rows=rows)


def train_step() -> list[str]:
    return steps("train_step")


def prefill() -> list[str]:
    return steps("prefill")


def decode() -> list[str]:
    reports = {1: "decode", 8: "decode_batch8", 32: "decode_batch32"}  # sequences in a step
    modes = ("eager", "compiled")
    return table_of_ratios({f"{mode}, {n}": ratios(name, mode) for mode in modes for n, name in reports.items()})


def parts_train_step() -> list[str]:
    return parts("train_step")


def parts_prefill() -> list[str]:
    return parts("prefill")


def parts_decode() -> list[str]:
    return parts("decode", steps=4)


def parts(name: str, steps: int = 1) -> list[str]:
    """Milliseconds of a step, by kind of module."""
    rows = load("parts").get("milliseconds", {}).get(name, {})
    kinds = list(next(iter(rows.values()), {}))
    return table({kind: {row: rows[row][kind] / steps for row in rows} for kind in kinds}, digits=2)


def compile_time() -> list[str]:
    columns: Columns = {}
    for row, modes in load("compile_time").get("seconds", {}).items():
        for mode, numbers in modes.items():
            columns.setdefault(f"{mode}, first", {})[row] = numbers["first"]
            columns.setdefault(f"{mode}, later", {})[row] = numbers["later"]
    return table(columns, digits=2)


def serving() -> list[str]:
    """Many clients at once: tokens per second, and the 95th percentile of the time to the first token."""
    report = load("serving")
    columns: Columns = {}
    for title, name in (("tokens/s", "tokens_per_second"), ("first token, s", "seconds_to_first_token_p95")):
        for suffix, part in (("", "rows"), (", ratio", "ratios")):
            columns[title + suffix] = {row: numbers[name] for row, numbers in report.get(part, {}).items()}
    return table(columns, {"tokens/s": 0}, rows=SERVED)


def depth_read() -> list[str]:
    """Milliseconds of the depth part alone, by the number of layers."""
    columns = load("depth_read").get("columns", {})
    return table({f"L={n}": columns.get(f"L={n}", {}) for n in LAYERS}, 1, rows=[row for row in ROWS if row != QWEN])


def source_reads() -> list[str]:
    """Sources that all sites of a model read, by the number of layers."""
    columns: Columns = {}
    for layers in LAYERS:
        schedules = {name: DepthSite.schedule(2 * layers, blocks) for name, blocks in (("N=8", 8), ("full", None))}
        columns[f"L={layers}"] = {}
        for name, sites in schedules.items():
            columns[f"L={layers}"][f"{name}, two phases"] = two_phase_reads(sites)
            columns[f"L={layers}"][f"{name}, naive"] = sum(site.num_sources for site in sites)
    return table(columns, 0, "sources")


def two_phase_reads(sites: list[DepthSite]) -> int:
    """Phase 1 reads a source once per group; phase 2 reads each younger source once per site."""
    mixed = sum(site.num_mixed for site in sites if site.opens_group)
    return mixed + sum(site.num_sources - site.num_mixed + (site.num_mixed == 1) for site in sites)


def memory_ratios() -> dict[str, float]:
    saved = load("memory").get("columns", {}).get("saved", {})
    return {row: size / saved["standard"] for row, size in saved.items()}


def memory() -> list[str]:
    saved = load("memory").get("columns", {}).get("saved", {})
    return table({"MiB": saved, "ratio": memory_ratios()}, {"MiB": 1}, rows=ROWS)


def kernels() -> list[str]:
    """For each read: the largest need of its kernels over all GPUs, and the bytes moved per token."""
    lines = ["| sources | read | registers | spilled bytes | shared bytes | bytes per token | of the ideal |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name, results in load("triton_report").get("source_sets", {}).items():
        for traffic in results["traffic"]:
            own = [row for row in results["resources"] if row["read"] == traffic["read"]]
            most = [max(row[need] for row in own) for need in ("registers", "spilled_bytes", "shared_bytes")]
            cells = [name, traffic["read"], *map(str, most), f"{traffic['bytes']:,}", f"{traffic['ratio']:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def gpu_bytes() -> list[str]:
    """KB per token, of the residual side of each variant and of the rest of `standard`."""
    columns: Columns = {}
    for phase in PHASES:
        columns[phase] = {variant: depth_bytes(paper_config(variant), phase) / 1e3 for variant in PREDICTED}
        columns[phase]["the rest of the model"] = rest_bytes(paper_config("standard"), phase) / 1e3
    return table(columns, 0, "KB per token")


def gpu_launches() -> list[str]:
    backends = {"torch": "torch", "kernel": "triton"}
    columns = {title: {row: decoding_launches(row, name) for row in PREDICTED} for title, name in backends.items()}
    return table(columns, 0, "launches of a token")


def gpu_overhead() -> list[str]:
    """Predicted time over that of `standard`."""
    columns: Columns = {}
    for phase in PHASES:
        for gpu in SHEETS:
            ratios = {row: predicted_ratio(row, phase, gpu) for row in PREDICTED if row != "standard"}
            columns[f"{phase}, {gpu}"] = ratios
    for gpu in SHEETS:
        columns[f"decoding with torch, {gpu}"] = {
            row: predicted_ratio(row, "decoding", gpu, "torch") for row in PREDICTED if row != "standard"
        }
    return table(columns, 3)


def miniature_differences() -> dict[str, str]:
    """variant of the paper -> the loss of its row in miniature against `standard`, with its interval."""
    results = Results(load_sweep(), MINIATURE)
    rows = {variant: row for row, variant in results.sweep.rows.items() if row in results.rows and row != BASELINE}
    return {variant: difference_text(results, row, BASELINE) for variant, row in rows.items()}


def overhead() -> list[str]:
    """One row per variant: the paper's loss, the loss in miniature, exact costs, and what was measured here as ratios
    to `standard`."""
    names = {"training step": "train_step", "prefill": "prefill", "decoding": "decode"}
    measured = {title: ratios(name, "eager") for title, name in names.items()} | {"memory": memory_ratios()}
    paper = {row.variant: row for row in PAPER_TABLE if row.variant in VARIANTS}
    costs = {variant: depth_cost(row.config) for variant, row in paper.items()}
    columns: Columns = {
        "loss (paper)": {variant: row.validation_loss for variant, row in paper.items()},
        "loss in miniature, minus `standard`": miniature_differences(),
        "added FLOPs, %": {variant: cost.added_flops_percent for variant, cost in costs.items()},
        "added parameters": {variant: cost.added_parameters for variant, cost in costs.items()},
    }
    rows = ["standard", COPY, *(variant for variant in paper if variant != "standard")]
    digits = {"loss (paper)": 4, "added FLOPs, %": 4, "added parameters": 0}
    return table(columns | measured, digits, "variant", rows)


TABLES: dict[str, Callable[[], list[str]]] = {
    make.__name__: make
    for make in (
        *(train_step, prefill, decode, serving, depth_read, source_reads, memory, kernels, overhead),
        *(gpu_bytes, gpu_launches, gpu_overhead, compile_time, parts_train_step, parts_prefill, parts_decode),
    )
}


def fill(text: str) -> str:
    """A page with every table made anew."""

    def replace(found: re.Match) -> str:
        lines = "\n".join(TABLES[found[1]]())
        return f"<!-- table: {found[1]} -->\n\n{lines}\n\n<!-- /table -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- /table -->", replace, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text()))
        print(page)
