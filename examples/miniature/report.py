"""Write the results into docs/miniature.md and README.md: tables, the paper's claims with verdicts, and figures.

All text between the two marks of a page comes from the JSON files. Rows without results are listed as missing.
"""

import argparse
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import as_analysis, read_result
from sweep import BASELINE, HERE, RESULTS, SWEEP, Sweep, load_sweep

from lr_attnres.analysis.paper import PAPER_TABLE, PaperRow
from lr_attnres.variants import variant_fields


PAGE = HERE.parents[1] / "docs/miniature.md"
README = HERE.parents[1] / "README.md"
FIGURES = "miniature"  # folder beside the page
BEGIN, END = "<!-- results: python examples/miniature/report.py -->", "<!-- end of results -->"
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom, for two-sided intervals of 95 %
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131]
KEY = {"attnres": "attnres-n8", "sliced": "sliced-n8-r6", "projected": "projected-n8-r3"}
FULL = {"attnres": "attnres-full", "sliced": "sliced-full-r6", "projected": "projected-full-r3"}
RANKS = [("sliced-full-r2", "sliced-full-r48"), ("projected-full-r2", "projected-full-r6")]


class Results:
    """The results in a folder by row and seed, and the differences between rows."""

    def __init__(self, sweep: Sweep, folder: Path):
        self.sweep, self.rows = sweep, {}
        for path in sorted(folder.glob("*-seed*.json")):
            result = read_result(path)
            self.rows.setdefault(result["row"], {})[result["seed"]] = result
        if len({result["data"] for seeds in self.rows.values() for result in seeds.values()}) > 1:
            raise ValueError(f"the results in {folder} are of different texts (see `data`): keep one text per folder.")
        timing = folder / "timing.json"
        self.timing = read_result(timing) if timing.exists() else None

    def values(self, row: str, name: str) -> list[float]:
        return [result[name] for _, result in sorted(self.rows.get(row, {}).items())]

    def differences(self, row: str, other: str, name: str = "validation_loss") -> list[float]:
        """`row` minus `other` for each common seed. Runs with the same seed saw the same text in the same order."""
        ours, theirs = self.rows.get(row, {}), self.rows.get(other, {})
        return [ours[seed][name] - theirs[seed][name] for seed in sorted(ours.keys() & theirs.keys())]

    def noise(self, row: str, name: str = "validation_loss") -> tuple[float, int] | None:
        """Standard deviation of a value around the sum of a row effect and a seed effect, and its degrees of freedom.

        The fit uses all rows trained like `row`: from random weights, or continued from a baseline. The seed decides
        the order of the text, which shifts all rows alike. A row with one seed adds no degree of freedom."""
        family = self.sweep.continued if row in self.sweep.continued else self.sweep.trained
        cells = {(member, seed): r[name] for member in family for seed, r in self.rows.get(member, {}).items()}
        effects = sorted({effect for cell in cells for effect in cell}, key=str)
        design = np.array([[effect in cell for effect in effects] for cell in cells], dtype=float)
        freedom = len(cells) - int(np.linalg.matrix_rank(design)) if cells else 0
        if freedom == 0:
            return None
        values = np.array([*cells.values()])
        residuals = values - design @ np.linalg.lstsq(design, values)[0]
        return float(np.sqrt((residuals**2).sum() / freedom)), freedom

    def interval(self, row: str, other: str, name: str = "validation_loss") -> tuple[float, float | None]:
        """Mean of the differences and half the width of its 95 % interval."""
        differences, noise = self.differences(row, other, name), self.noise(row, name)
        return statistics.fmean(differences), None if noise is None else half_width(*noise, len(differences))


def half_width(deviation: float, freedom: int, count: int) -> float:
    """Of the interval of a mean of `count` differences between two values."""
    return student(freedom) * deviation * (2 / count) ** 0.5


def student(freedom: int) -> float:
    return STUDENT[min(freedom, len(STUDENT)) - 1]


def paper_row(variant: str) -> PaperRow:
    (found,) = [row for row in PAPER_TABLE if row.variant == variant]
    return found


def mean_text(values: list[float]) -> str:
    if not values:
        return "-"
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.4f}"
    return f"{mean:.4f} ± {student(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5:.4f}"


def difference_text(results: Results, row: str, other: str, name: str = "validation_loss") -> str:
    if row == other or not results.differences(row, other, name):
        return "-"
    mean, half = results.interval(row, other, name)
    return f"{mean:+.4f}" + ("" if half is None else f" ± {half:.4f}")


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heads, ["---"] * len(heads), *rows])


def main_table(results: Results) -> str:
    """One line per row that has a result."""
    heads = ["row", "seeds", "added FLOPs", "validation loss", "against `standard`", "the paper's row"]
    heads += ["its difference", "step time", "effective sources"]
    baseline, rows = paper_row(BASELINE).validation_loss, []
    for row, variant in results.sweep.rows.items():
        if row not in results.rows:
            continue
        found = results.rows[row]
        first = found[min(found)]
        effective = first["depth"]["effective_sources"]
        ratio = (results.timing or {}).get("ratios", {}).get(row)
        rows.append(
            [
                f"`{row}`",
                str(len(found)),
                f"{first['added_flops_percent']:.2f} %",
                mean_text(results.values(row, "validation_loss")),
                difference_text(results, row, BASELINE),
                f"`{variant}`",
                "-" if row == BASELINE else f"{paper_row(variant).validation_loss - baseline:+.4f}",
                "-" if ratio is None else f"{ratio:.3f}",
                f"{statistics.fmean(effective):.2f}" if effective else "-",
            ]
        )
    return table(heads, rows)


def gradient_table(results: Results) -> str:
    """The rows whose gradient norm the paper reports."""
    baseline, rows = paper_row(BASELINE).gradient_norm, []
    for row, variant in results.sweep.rows.items():
        paper = paper_row(variant).gradient_norm
        if paper is None or row not in results.rows:
            continue
        norm, difference = (
            mean_text(results.values(row, "gradient_norm")),
            difference_text(results, row, BASELINE, "gradient_norm"),
        )
        paper_difference = "-" if row == BASELINE else f"{paper - baseline:+.4f}"
        rows.append([f"`{row}`", str(len(results.rows[row])), norm, difference, f"{paper:.4f}", paper_difference])
    return table(["row", "seeds", "gradient norm", "against `standard`", "the paper's", "its difference"], rows)


@dataclass(frozen=True)
class Claim:
    """A finding of the paper: the sign of `row` minus `other` in the quantity `name`."""

    words: str
    row: str
    other: str
    name: str = "validation_loss"

    def paper(self, sweep: Sweep) -> float:
        row, other = (getattr(paper_row(sweep.rows[row]), self.name) for row in (self.row, self.other))
        return row - other

    def verdict(self, results: Results) -> str:
        if not results.differences(self.row, self.other, self.name):
            return "not run"
        mean, half = results.interval(self.row, self.other, self.name)
        same_sign = (mean < 0) == (self.paper(results.sweep) < 0)
        if half is None:
            return "same sign (one seed)" if same_sign else "other sign (one seed)"
        if abs(mean) <= half:
            return "not resolved"
        return "reproduced" if same_sign else "not reproduced"

    def seeds_needed(self, results: Results) -> str:
        """Seeds of both rows with which an interval would exclude zero if the difference were the paper's."""
        noise = results.noise(self.row, self.name)
        if noise is None:
            return "-"
        return f"{math.ceil(2 * (student(noise[1]) * noise[0] / self.paper(results.sweep)) ** 2):,}"


def claims(sweep: Sweep) -> list[Claim]:
    """The claims whose rows are in the sweep."""
    found = [Claim(f"{kind} in blocks beats the baseline", row, BASELINE) for kind, row in KEY.items()]
    found += [Claim(f"{kind}, full, beats the baseline", row, BASELINE) for kind, row in FULL.items()]
    for sources, rows in {"full": FULL, "in blocks": KEY}.items():
        found.append(Claim(f"sliced beats attnres, {sources}", rows["sliced"], rows["attnres"]))
        found.append(Claim(f"projected beats sliced, {sources}", rows["projected"], rows["sliced"]))
    found += [Claim(f"{kind}: blocks beat full", KEY[kind], FULL[kind]) for kind in ("sliced", "projected")]
    found.append(Claim("attnres: full beats 8 blocks", FULL["attnres"], KEY["attnres"]))
    found += [Claim(f"{low.split('-')[0]}, full: a higher rank beats a lower one", high, low) for low, high in RANKS]
    for kind in ("sliced", "projected"):
        found.append(Claim(f"{kind} keys, full, lower the gradient norm", FULL[kind], BASELINE, "gradient_norm"))
    found.append(Claim("attnres, full, raises the gradient norm", FULL["attnres"], BASELINE, "gradient_norm"))
    return [claim for claim in found if claim.row in sweep.rows and claim.other in sweep.rows]


def claims_table(results: Results) -> str:
    rows = []
    for claim in claims(results.sweep):
        difference = difference_text(results, claim.row, claim.other, claim.name)
        seeds = str(len(results.differences(claim.row, claim.other, claim.name)))
        compared = f"`{claim.row}`, `{claim.other}`"
        paper = f"{claim.paper(results.sweep):+.4f}"
        verdict, needed = claim.verdict(results), claim.seeds_needed(results)
        rows.append([claim.words, compared, paper, difference, seeds, needed, verdict])
    heads = ["what the paper finds", "compared here", "paper", "here", "seeds", "seeds needed", "verdict"]
    return table(heads, rows)


def summary(results: Results) -> str:
    """The verdicts in one sentence, also shown in the README."""
    verdicts = Counter(claim.verdict(results) for claim in claims(results.sweep))
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    return f"Of {sum(verdicts.values())} findings of the paper: {counts}."


def one_head_rows(row: str) -> list[str]:
    """The variants of one head with the rank, and with the rank per head, of a row with depth heads."""
    fields = variant_fields(row)
    heads, rank = fields.get("depth_heads", 1), fields["depth_key_rank"]
    return [] if heads == 1 else [row.replace(f"-r{rank}-h{heads}", f"-r{size}") for size in (rank, rank // heads)]


def heads_table(results: Results) -> str:
    rows = []
    for row in results.sweep.heads:
        if row not in results.rows:
            continue
        found = results.rows[row]
        comparisons = [compare_heads(results, row, other) for other in one_head_rows(row)] or ["-", "-"]
        flops = f"{found[min(found)]['added_flops_percent']:.2f} %"
        loss = mean_text(results.values(row, "validation_loss"))
        rows.append([f"`{row}`", str(len(found)), flops, loss, *comparisons])
    heads = ["row", "seeds", "added FLOPs", "validation loss", "one head, equal rank", "one head, equal rank per head"]
    return table(heads, rows) if rows else ""


def compare_heads(results: Results, row: str, other: str) -> str:
    """The difference from a row of one head, and whether its interval excludes zero; "-" without such a row."""
    if other not in results.sweep.trained:
        return "-"
    if not results.differences(row, other):
        return "not run"
    mean, half = results.interval(row, other)
    if half is None:
        verdict = "no interval"
    else:
        verdict = "not resolved" if abs(mean) <= half else "heads are better" if mean < 0 else "heads are worse"
    return f"{difference_text(results, row, other)} to `{other}`: {verdict}"


def heads_text(results: Results) -> str:
    """How many comparisons speak for heads, and how many against."""
    cells = [compare_heads(results, row, other) for row in results.sweep.heads for other in one_head_rows(row)]
    verdicts = Counter(cell.rpartition(": ")[2] for cell in cells if cell != "-")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    return f"Of {verdicts.total()} comparisons with one head: {counts}."


def continued_table(results: Results) -> str:
    first, *_ = results.sweep.continued
    rows = []
    for row in results.sweep.continued:
        found = results.rows.get(row, {})
        effective = [statistics.fmean(r["depth"]["effective_sources"]) for r in found.values() if r["depth"]["shares"]]
        rows.append(
            [
                f"`{row}`",
                str(len(found)) if found else "not run",
                mean_text(results.values(row, "validation_loss")),
                difference_text(results, row, first),
                f"{statistics.fmean(effective):.2f}" if effective else "-",
            ]
        )
    return table(["row", "seeds", "validation loss", f"against `{first}`", "effective sources"], rows)


def continued_text(results: Results) -> str:
    """The gain from the additional tokens, and the additional gain from the upgrade."""
    first, *others = results.sweep.continued
    gains = results.differences(first, BASELINE)
    if not gains:
        return ""
    gain = statistics.fmean(gains)
    text = f"The further tokens change the loss of the baseline by {gain:+.4f} on average."
    for row in others:
        if differences := results.differences(row, first):
            share = statistics.fmean(differences) / gain
            text += f" `{row}` differs from the continued baseline by {100 * share:.0f} % of that."
    return text


def noise_text(results: Results) -> str:
    noise = results.noise(BASELINE)
    if noise is None:
        nothing = "No two rows have two seeds yet: nothing here can be told from chance."
        return nothing if results.rows else ""
    one, three = (f"{half_width(*noise, count):.4f}" for count in (1, 3))
    return (
        "Beyond what its seed does to all rows alike, a loss varies with a standard deviation of "
        f"{noise[0]:.4f} ({noise[1]} degrees of freedom). So the difference of two rows counts above {one} where both "
        f"have one seed in common, and above {three} with three. Seeds needed: so many of both rows, at this spread, "
        "for a difference as large as the paper's to be resolved."
    )


def missing_text(results: Results) -> str:
    finished = {(row, seed) for row, seeds in results.rows.items() for seed in seeds}
    missing = [run for run in results.sweep.runs() if (run.row, run.seed) not in finished]
    total = len(results.sweep.runs())
    if not missing:
        return f"All {total} runs of the sweep are here."
    rows = ", ".join(f"`{row}`" for row in dict.fromkeys(run.row for run in missing))
    return f"{total - len(missing)} of {total} runs of the sweep are here. Seeds are missing of {rows}."


def timing_text(results: Results) -> str:
    if results.timing is None:
        return "Step times have not been measured yet (`python examples/miniature/timing.py`)."
    machine = ", ".join(f"{name} {value}" for name, value in results.timing["machine"].items())
    return (
        f"Step time: whole training steps relative to `standard`, interleaved in one process, smallest of "
        f"{results.timing['repeats']} ({machine})."
    )


def figures(results: Results) -> dict[str, tuple[str, Callable[[], Any]]]:
    """name -> caption and drawing function, for each figure that has results."""
    from lr_attnres.analysis import plots

    firsts = {row: as_analysis(seeds[min(seeds)]) for row, seeds in results.rows.items() if row in results.sweep.rows}
    compared = [row for row in (*FULL.values(), *KEY.values()) if row in firsts]
    routed = [firsts[row] for row in compared]
    found: dict[str, tuple[str, Callable[[], Any]]] = {}
    if firsts:
        points = [
            (a.name, a.residual_type, a.added_flops_percent, statistics.fmean(results.values(row, "validation_loss")))
            for row, a in firsts.items()
        ]
        draw = lambda: plots.loss_against_flops(points, "validation loss, mean over seeds")  # noqa: E731
        found["loss_against_flops"] = ("Loss against added FLOPs", draw)
        found["gradient_norms"] = ("Gradient norm over the training, first seed", lambda: gradient_norms(results))
    if routed:
        found["effective_sources"] = ("Effective sources", lambda: plots.effective_sources_figure(routed))
        found["depth_weights"] = ("Depth weights", lambda: plots.depth_weights_figure(routed))
    return found


def gradient_norms(results: Results) -> Any:
    from matplotlib.figure import Figure

    from lr_attnres.analysis import plots

    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in (BASELINE, *FULL.values(), *KEY.values()) if row in results.rows]
    for row in rows:
        first = results.rows[row][min(results.rows[row])]
        style = {"color": plots.COLOURS[row.split("-")[0]], "linestyle": "--" if row in KEY.values() else "-"}
        axes.plot(first["curve"]["tokens"], first["curve"]["grad_norm"], label=row, **style)
    axes.set(title="Gradient norm before clipping", xlabel="tokens", ylabel="mean over a part of the run")
    axes.legend()
    return figure


def render(results: Results) -> str:
    """The text between the marks of the page."""
    sections = [missing_text(results), main_table(results)]
    sections.append(
        "± is half the width of a 95 % interval (Student's t): of a mean over seeds, by their spread; of a difference "
        "between rows, by what is left of all losses when each row and each seed has its mean (a randomised block "
        "design), divided among the seeds that both have. Effective sources: the mean over sites, first seed. "
        + timing_text(results)
    )
    sections += ["### Claim by claim", summary(results), claims_table(results), noise_text(results)]
    sections += ["### Gradient norms", gradient_table(results)]
    if results.sweep.heads:
        sections += ["### Depth heads", heads_text(results), heads_table(results)]
    sections += ["### A trained baseline, continued", continued_table(results), continued_text(results)]
    drawn = figures(results)
    if drawn:
        images = [f"![{caption}]({FIGURES}/{name}.png)" for name, (caption, _) in drawn.items()]
        sections += ["### Figures", *images]
    return "\n\n".join(filter(None, sections))


def render_briefly(results: Results) -> str:
    """The sentence for the README. Its table is made by benchmarks/tables.py."""
    finished, total = sum(map(len, results.rows.values())), len(results.sweep.runs())
    return f"{finished} of {total} runs of the miniature are done. {summary(results)}"


def fill(page: Path, begin: str, end: str, content: str) -> None:
    """Replace the text between two marks of a page."""
    text = page.read_text()
    if not re.search(f"{re.escape(begin)}.*{re.escape(end)}", text, flags=re.DOTALL):
        raise ValueError(f"{page} lacks the marks {begin} and {end}.")
    before, after = text.split(begin)[0], text.split(end)[1]
    page.write_text(f"{before}{begin}\n\n{content}\n\n{end}{after}")


def draw(results: Results, folder: Path) -> None:
    import matplotlib

    from lr_attnres.analysis.plots import STYLE

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, (_, make) in figures(results).items():
            make().savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight", facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--sweep", type=Path, default=SWEEP, help="default: %(default)s")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: %(default)s")
    parser.add_argument("--readme", type=Path, help="default: README.md, if --page is not given")
    options = parser.parse_args()
    if options.page == PAGE:
        options.readme = options.readme or README
    try:
        results = Results(load_sweep(options.sweep), options.results)
        fill(options.page, BEGIN, END, render(results))
        if options.readme is not None:
            fill(options.readme, "<!-- miniature -->", "<!-- end of miniature -->", render_briefly(results))
        draw(results, options.page.parent / FIGURES)
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
    print(f"{options.page}: {sum(map(len, results.rows.values()))} results")


if __name__ == "__main__":
    main()
