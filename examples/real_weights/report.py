"""Write the tables of docs/upgrade.md from the JSON files of `study.py`.

python examples/real_weights/report.py
"""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from scipy.stats import t


HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/upgrade.md"
START, END = "<!-- study -->", "<!-- end of study -->"


def load_results(folder: Path = HERE / "results") -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def with_interval(values: list[float]) -> str:
    """The mean; from two seeds on with half of its 95 % interval."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:+.4f}"
    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:+.4f} ± {half:.4f}"


def table(results: list[dict[str, Any]]) -> str:
    """One row per text, method and rate; changes of the loss against the model before training, mean over seeds."""
    groups: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        settings = result["settings"]
        groups[settings["text"], result["trained_parameters"], settings["method"], settings["rate"]].append(result)
    lines = ["| text | trained | parameters | rate | seeds | its loss | the other text | chat answers |", "|---" * 8 + "|"]
    for (text, parameters, method, rate), group in sorted(groups.items()):
        (other,) = (name for name in group[0]["after"] if name not in (text, "chat"))
        changes = [with_interval([r["after"][name] - r["before"][name] for r in group]) for name in (text, other, "chat")]
        cells = [text, f"`{method}`", f"{parameters:,}", f"{rate:g}", str(len(group)), *changes]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def section(results: list[dict[str, Any]]) -> str:
    if not results:
        return "No run is finished."
    before, settings, tokens = results[0]["before"], results[0]["settings"], {result["tokens"] for result in results}
    start = ", ".join(f"{name} {loss:.4f}" for name, loss in before.items())
    budget = f"{' or '.join(f'{count:,}' for count in sorted(tokens))} tokens in {settings['steps']} steps"
    return f"Loss of the original: {start}. Every run: {budget}.\n\n{table(results)}"


def write_page(page: Path = PAGE, results: list[dict[str, Any]] | None = None) -> None:
    text = page.read_text()
    head, rest = text.split(START)
    page.write_text(f"{head}{START}\n\n{section(load_results() if results is None else results)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    write_page()
