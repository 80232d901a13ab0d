"""Writes the tables of docs/performance.md and README.md from the JSON files in results/, which the other benchmarks
wrote."""

import json
import re
from pathlib import Path
from typing import Any


RESULTS = Path(__file__).parent / "results"
MODES = ("eager", "compiled")
Columns = dict[str, dict[str, float]]  # title -> row -> measurement


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def columns_of(name: str) -> Columns:
    return load(name)["columns"]


def table(columns: Columns, digits: int = 3, head: str = "model") -> list[str]:
    rows = dict.fromkeys(row for column in columns.values() for row in column)
    lines = [[head, *columns], ["---"] * (1 + len(columns))]
    for row in rows:
        lines.append([row, *(f"{column[row]:,.{digits}f}" if row in column else "-" for column in columns.values())])
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def whole_steps(kind: str = "") -> Columns:
    steps = {"training": columns_of("train_step"), "prefill": columns_of("prefill"), "decoding": columns_of("decode")}
    return {
        f"{step}, {mode}": columns[mode + kind]
        for step, columns in steps.items()
        for mode in MODES
        if mode + kind in columns
    }


def times() -> list[str]:
    """Whole steps, as ratios to `standard`."""
    return table(whole_steps())


def as_timed() -> list[str]:
    """The same steps, before products and attention of the same shapes are made to count alike."""
    return table(whole_steps(", as timed"))


def parts() -> list[str]:
    """What a training step spends on each kind of operator, as a part of the step of `standard`."""
    titles = [f"{mode}, {kind}" for mode in MODES for kind in ("products", "attention", "other")]
    columns = columns_of("train_step")
    return table({title: columns[title] for title in titles})


def decoding() -> list[str]:
    """An eager step of decoding, in milliseconds per token."""
    return table(columns_of("decode_profile"), digits=2)


def other_runs() -> list[str]:
    """Every other run of these steps that was kept, as timed: one a line."""
    shown = ["standard, again", "sliced-n4-r64", "projected-n4-r32", "sliced-n8-r64", "sliced-full-r64"]
    shown += ["attnres-full", "Qwen3ForCausalLM"]
    lines = ["| run | repeats | " + " | ".join(shown) + " |", "| --- " * (2 + len(shown)) + "|"]
    for path in sorted((RESULTS / "other_runs").glob("*.json")):
        result = load(f"other_runs/{path.stem}")
        for mode in MODES:
            if column := result["columns"].get(f"{mode}, as timed", result["columns"].get(mode)):
                ratios = (f"{column[row]:.3f}" if row in column else "-" for row in shown)
                cells = [f"{result['benchmark']}, {mode}", str(result["settings"]["repeats"][mode]), *ratios]
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def pretrained_classes() -> list[str]:
    """A training step of `standard` beside the class of Transformers that computes the same."""
    columns = columns_of("upgrade_speed")
    return table(
        {
            name: {row: time / column["Transformers"] for row, time in column.items()}
            for name, column in columns.items()
        }
    )


def other_class_runs() -> list[str]:
    """`standard` as a ratio to Transformers' class in every other run that was kept, as timed."""
    columns: Columns = {"Llama": {}, "Qwen3": {}}
    for path in sorted((RESULTS / "other_runs").glob("upgrade_speed_*.json")):
        run = columns_of(f"other_runs/{path.stem}")
        for source, ratios in columns.items():
            seconds = run.get(f"{source}, as timed", run[source])
            ratios[path.stem] = seconds["standard"] / seconds["Transformers"]
    return table(columns, head="run")


def growth() -> list[str]:
    """Whole training steps against the number of layers, in seconds."""
    return table(columns_of("scaling"), digits=2)


def depth_growth() -> list[str]:
    """The depth part alone against the number of layers, in milliseconds."""
    return table(columns_of("depth_read"), digits=1)


def source_reads() -> list[str]:
    """Sources that the sites of a model read in all."""
    settings = load("depth_read")["settings"]
    layers = [f"L={layers}" for layers in settings["layers"]]
    by_layers = zip(layers, zip(*settings["source_reads"].values()))
    return table({title: dict(zip(settings["source_reads"], counts)) for title, counts in by_layers}, 0, "sources")


def memory() -> list[str]:
    saved = columns_of("memory")["saved"]
    return table({"MiB": saved, "ratio": {row: size / saved["standard"] for row, size in saved.items()}})


def kernels() -> list[str]:
    """Of each read: the largest need of its kernels over both GPUs, and the bytes moved per token."""
    lines = ["| sources | read | registers | spilled bytes | shared bytes | bytes per token | of the ideal |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name, results in load("triton_report")["source_sets"].items():
        for traffic in results["traffic"]:
            own = [row for row in results["resources"] if row["read"] == traffic["read"]]
            most = [max(row[need] for row in own) for need in ("registers", "spilled_bytes", "shared_bytes")]
            cells = [name, traffic["read"], *map(str, most), f"{traffic['bytes']:,}", f"{traffic['ratio']:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


TABLES = (times, as_timed, parts, decoding, other_runs, pretrained_classes, other_class_runs)
TABLES += (growth, depth_growth, source_reads, memory, kernels)


PAGES = [Path(__file__).parents[1] / name for name in ("docs/performance.md", "README.md")]


def fill(text: str) -> str:
    """A page, each of its tables under a mark like `<!-- table: times -->` made anew."""
    for make in TABLES:
        lines = "".join(f"{line}\n" for line in make())
        place = rf"(<!-- table: {make.__name__} -->\n\n)(?:\|.*\n)*\n?"
        text = re.sub(place, lambda mark, new=lines: f"{mark[1]}{new}\n", text)
    return text.rstrip() + "\n"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text()))
        print(page)
