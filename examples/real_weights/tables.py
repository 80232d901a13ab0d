"""Write the table of docs/upgrade.md from the JSON files of `study.py`.

python examples/real_weights/tables.py
"""

import json
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any


HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "miniature"))
from report import student, table  # noqa: E402


PAGE = HERE.parents[1] / "docs/upgrade.md"
START, END = "<!-- study -->", "<!-- end of study -->"
HEADS = ["text", "trained", "parameters", "rate", "seeds", "its loss", "the other text", "chat answers"]


def load_results(folder: Path = HERE / "results") -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def change_text(values: list[float]) -> str:
    """The mean over seeds, and half of its 95 % interval if there are several."""
    mean = f"{statistics.fmean(values):+.4f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {student(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5:.4f}"


def rows_of(results: list[dict[str, Any]]) -> list[list[str]]:
    """One row per text, method and rate: the lowest losses first."""
    groups: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        settings = result["settings"]
        groups[settings["text"], settings["method"], result["trained_parameters"], settings["rate"]].append(result)

    def order(entry: tuple[tuple, list[dict[str, Any]]]) -> tuple[str, float]:
        (text, *_), group = entry
        return text, statistics.fmean(result["after"][text] - result["before"][text] for result in group)

    rows = []
    for (text, method, parameters, rate), group in sorted(groups.items(), key=order):
        (other,) = (name for name in group[0]["after"] if name not in (text, "chat"))
        changes = [
            change_text([r["after"][name] - r["before"][name] for r in group]) for name in (text, other, "chat")
        ]
        rows.append([text, f"`{method}`", f"{parameters:,}", f"{rate:g}", str(len(group)), *changes])
    return rows


def section(results: list[dict[str, Any]]) -> str:
    if not results:
        return "No run is finished."
    start = ", ".join(f"{name} {loss:.4f}" for name, loss in results[0]["before"].items())
    budget = f"{results[0]['tokens']:,} tokens in {results[0]['settings']['steps']} steps"
    # The best rate of a method has more runs than the one of the tuning.
    runs = Counter((result["settings"]["method"], result["settings"]["rate"]) for result in results)
    parts: list[list[dict[str, Any]]] = [[], []]
    for result in results:
        parts[runs[result["settings"]["method"], result["settings"]["rate"]] == 1].append(result)
    titles = ("With the best rate of each method:", "One seed: the tuning of the rates, and choices explored:")
    tables = [f"{title}\n\n{table(HEADS, rows_of(part))}" for title, part in zip(titles, parts) if part]
    return "\n\n".join([f"Loss before training: {start}. Each run: {budget}.", *tables])


def with_section(page: str, results: list[dict[str, Any]]) -> str:
    head, rest = page.split(START)
    return f"{head}{START}\n\n{section(results)}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_section(PAGE.read_text(), load_results()))
