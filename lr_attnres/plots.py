"""Figures of depth routing, each as PNG and SVG. A variant has the same colour in all of them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .analysis import DepthAnalysis
from .cost import depth_cost
from .paper import PAPER_TABLE


# Okabe and Ito's palette, which colour-blind readers can tell apart; models of one variant differ in line and marker.
COLOURS = {"standard": "#000000", "attnres": "#E69F00", "projected": "#0072B2", "sliced": "#009E73"}
SHARE_COLOURS = {"embedding": "#56B4E9", "completed": "#D55E00", "partial": "#F0E442"}
LINES = ["-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1))]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
HEATMAP = "cividis"
CLIP_PERCENTILE = 0.995
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small and searchable
    "svg.hashsalt": "lr-attnres",  # the same figure is the same file
}


def draw(analyses: list[DepthAnalysis], folder: Path) -> list[Path]:
    """Write every figure that these models have data for; returns the PNG files."""
    written = []
    with matplotlib.rc_context(STYLE):
        for name, make in FIGURES.items():
            figure = make(analyses)
            if figure is not None:
                written.append(save_figure(figure, folder / name))
    return written


def draw_paper(path: str) -> Path:
    """The validation losses that the paper publishes against the costs of its models; returns the PNG file."""
    points = [
        (row.variant, row.residual_type, depth_cost(row.config).added_flops_percent, row.validation_loss)
        for row in PAPER_TABLE
    ]
    with matplotlib.rc_context(STYLE):
        return save_figure(loss_against_flops(points, "validation loss, as published"), Path(path))


def save_figure(figure: Figure, path: Path) -> Path:
    """`path` without its ending gets `.png` and `.svg`."""
    for ending, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 130})):
        figure.savefig(path.with_suffix(ending), bbox_inches="tight", facecolor="white", **options)
    return path.with_suffix(".png")


def effective_sources_figure(analyses: list[DepthAnalysis]) -> Figure | None:
    """exp(H) across sites, and as thin grey lines the number of sources that there are."""
    routed = _routed(analyses)
    if not routed:
        return None
    figure, axes = _one_panel("Effective number of sources", "site", "exp(entropy of the depth weights)")
    for available in {tuple((~a.tensors["depth_weights"].isnan()).sum(-1).tolist()) for a in routed}:
        sites = range(1, len(available) + 1)
        axes.plot(sites, available, color="0.65", linewidth=1, zorder=1)
        axes.annotate("sources", (sites[-1], available[-1]), color="0.45", ha="right", va="bottom", fontsize=8)
    _lines(axes, routed, lambda a: a.tensors["effective_sources"], start=1)
    axes.set_ylim(bottom=0)
    return figure


def depth_weights_figure(analyses: list[DepthAnalysis]) -> Figure | None:
    """One heatmap per model, sites x sources, clipped at the 99.5th percentile."""
    routed = _routed(analyses)
    if not routed:
        return None
    columns = min(len(routed), 3)
    rows = -(-len(routed) // columns)
    figure = Figure(figsize=(4.6 * columns, 4.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, analysis in zip(panels, routed):
        heatmap(axes, analysis.tensors["depth_weights"], analysis.block_ends, analysis.name)
    for axes in panels[len(routed) :]:
        axes.set_visible(False)
    return figure


def clip_level(weights: torch.Tensor) -> float:
    """The 99.5th percentile of the weights that there are."""
    return torch.quantile(weights[~weights.isnan()], CLIP_PERCENTILE).item()


def heatmap(
    axes: Axes,
    weights: torch.Tensor,
    block_ends: list[int],
    title: str,
    label: str = "mean depth weight",
    top: float | None = None,
) -> None:
    """Depth weights [M, S], NaN where a site has no such source, clipped at `top`. A dot marks a site's partial."""
    top = clip_level(weights) if top is None else top
    image = axes.imshow(
        weights.numpy(), cmap=HEATMAP, vmin=0, vmax=top, aspect="auto", interpolation="nearest", origin="upper"
    )
    axes.set_facecolor("0.92")
    axes.grid(False)
    num_sites = len(weights)
    inside = [site for site in range(1, num_sites + 1) if site not in block_ends]
    partials = [int((~weights[site - 1].isnan()).sum()) - 1 for site in inside]
    axes.scatter(partials, [site - 1 for site in inside], s=9, color="white", edgecolors="black", linewidths=0.6)
    source = "source (0: embedding, then " + ("blocks; dot: partial)" if inside else "sub-layers)")
    axes.set(title=title, xlabel=source, ylabel="site")
    step = max(1, num_sites // 12)
    axes.set_yticks(range(step - 1, num_sites, step), map(str, range(step, num_sites + 1, step)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    end = "max" if top < weights[~weights.isnan()].max().item() else "neither"
    axes.figure.colorbar(image, ax=axes, label=label, extend=end)


def shares_figure(analyses: list[DepthAnalysis]) -> Figure | None:
    """Per model and site, how the weight divides over embedding, completed sources and partial."""
    routed = _routed(analyses)
    if not routed:
        return None
    columns = min(len(routed), 3)
    rows = -(-len(routed) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.0 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axes, analysis in zip(panels, routed):
        shares = analysis.tensors["shares"].numpy()
        sites, bottom = range(1, len(shares) + 1), np.zeros(len(shares))
        for i, (name, colour) in enumerate(SHARE_COLOURS.items()):
            axes.bar(sites, shares[:, i], bottom=bottom, width=0.9, color=colour, label=name)
            bottom = bottom + shares[:, i]
        axes.set(title=analysis.name, xlabel="site", ylim=(0, 1), xlim=(0.4, len(shares) + 0.6))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in panels[::columns]:
        axes.set_ylabel("share of the weight")
    for axes in panels[len(routed) :]:
        axes.set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def entropy_by_position_figure(analyses: list[DepthAnalysis]) -> Figure | None:
    """The entropy of the reads, averaged over the sites, by the position of the token in its document."""
    routed = _routed(analyses)
    if not routed:
        return None
    figure, axes = _one_panel(
        "Entropy by token position", "position in the document, from 1", "mean entropy over sites (nats)"
    )
    for analysis, style in zip(routed, _styles(routed)):
        entropy = analysis.tensors["entropy_by_position"].mean(0)
        edges = sorted({round(2 ** (i / 2)) for i in range(64) if 2 ** (i / 2) < len(entropy)} | {len(entropy)})
        bins = [(low, high) for low, high in zip([0, *edges], edges)]
        means = [entropy[low:high].nanmean().item() for low, high in bins]
        axes.plot([(low + high + 1) / 2 for low, high in bins], means, label=analysis.name, **style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.legend()
    return figure


def output_magnitude_figure(analyses: list[DepthAnalysis]) -> Figure:
    """Root mean square of what each sub-layer writes."""
    figure, axes = _one_panel("Output magnitude", "sub-layer (0: embedding)", "root mean square of the output")
    _lines(axes, analyses, lambda a: a.tensors["output_magnitude"], start=0)
    axes.set_yscale("log")
    return figure


def query_norms_figure(analyses: list[DepthAnalysis]) -> Figure | None:
    routed = _routed(analyses)
    if not routed:
        return None
    figure, axes = _one_panel("Query norms", "site", "norm of the depth query")
    _lines(axes, routed, lambda a: a.tensors["query_norms"], start=1)
    axes.set_ylim(bottom=0)
    return figure


def loss_against_flops_figure(analyses: list[DepthAnalysis]) -> Figure:
    """Held-out loss against what depth routing adds to the multiply-adds of the core."""
    points = [(a.name, a.residual_type, a.added_flops_percent, a.loss) for a in analyses]
    return loss_against_flops(points, "Loss on held-out text")


def loss_against_flops(points: Sequence[tuple[str, str, float, float]], ylabel: str) -> Figure:
    """Points (name, residual type, added FLOPs in percent, loss), each labelled."""
    figure, axes = _one_panel("Loss against added FLOPs", "added FLOPs (% of the core)", ylabel, (8.5, 5.2))
    smallest = min((x for _, _, x, _ in points if x > 0), default=1.0)
    axes.set_xscale("symlog", linthresh=smallest / 2, linscale=0.3)
    for kind, colour in COLOURS.items():
        chosen = [(x, y) for _, of_kind, x, y in points if of_kind == kind]
        if chosen:
            marker = MARKERS[list(COLOURS).index(kind)]
            xs, ys = zip(*chosen)
            axes.scatter(xs, ys, color=colour, marker=marker, s=45, label=kind, zorder=3)
    largest = max(x for _, _, x, _ in points)
    axes.set_xlim(-smallest / 8, max(largest, smallest) * 2)
    ticks = [x for x in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if smallest / 2 <= x <= largest * 2]
    axes.set_xticks([0, *ticks], ["0", *map(str, ticks)])
    axes.minorticks_off()
    axes.margins(y=0.08)
    axes.legend()
    _label_points(figure, axes, [(name.removeprefix(kind).strip(" -") or name, x, y) for name, kind, x, y in points])
    return figure


def gradient_norms_figure(analyses: list[DepthAnalysis]) -> Figure | None:
    """The table of gradient norms, averaged over the training."""
    known = [analysis for analysis in analyses if analysis.gradient_norm is not None]
    if not known:
        return None
    figure = Figure(figsize=(5.5, 0.32 * len(known) + 0.7), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    cells = [["■", analysis.name, f"{analysis.gradient_norm:.4f}"] for analysis in known]
    heads = ["", "model", "average gradient norm"]
    table = axes.table(cells, colLabels=heads, colWidths=[0.07, 0.5, 0.43], loc="center", cellLoc="left")
    table.auto_set_font_size(False)
    table.set_fontsize(10)
    table.scale(1, 1.4)
    for (row, column), cell in table.get_celld().items():
        cell.set_linewidth(0.5)
        if row == 0:
            cell.set_text_props(weight="bold")
        elif column == 0:
            cell.set_text_props(color=COLOURS[known[row - 1].residual_type], ha="center")
    return figure


FIGURES: dict[str, Callable[[list[DepthAnalysis]], Figure | None]] = {
    "effective_sources": effective_sources_figure,
    "depth_weights": depth_weights_figure,
    "shares": shares_figure,
    "entropy_by_position": entropy_by_position_figure,
    "output_magnitude": output_magnitude_figure,
    "query_norms": query_norms_figure,
    "loss_against_flops": loss_against_flops_figure,
    "gradient_norms": gradient_norms_figure,
}


def _routed(analyses: list[DepthAnalysis]) -> list[DepthAnalysis]:
    return [analysis for analysis in analyses if analysis.residual_type != "standard"]


def _one_panel(title: str, xlabel: str, ylabel: str, size: tuple[float, float] = (7.5, 4.4)) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _styles(analyses: list[DepthAnalysis]) -> list[dict]:
    """The colour of the variant; the n-th model of a variant has the n-th line and marker."""
    seen: dict[str, int] = {}
    styles = []
    for analysis in analyses:
        n = seen[analysis.residual_type] = seen.get(analysis.residual_type, -1) + 1
        styles.append(
            {
                "color": COLOURS[analysis.residual_type],
                "linestyle": LINES[n % len(LINES)],
                "marker": MARKERS[n % len(MARKERS)],
                "markersize": 4,
                "linewidth": 1.6,
            }
        )
    return styles


def _lines(
    axes: Axes, analyses: list[DepthAnalysis], values: Callable[[DepthAnalysis], torch.Tensor], start: int
) -> None:
    for analysis, style in zip(analyses, _styles(analyses)):
        heights = values(analysis).tolist()
        axes.plot(range(start, start + len(heights)), heights, label=analysis.name, **style)
    axes.legend()


def _label_points(figure: Figure, axes: Axes, points: list[tuple[str, float, float]], size: int = 8) -> None:
    """Write each label beside its point, at the first place around it that is still free."""
    figure.draw_without_rendering()  # settles where the points are
    to_points = 72 / figure.dpi
    places = [axes.transData.transform((x, y)) * to_points for _, x, y in points]
    taken = [(px - 4, py - 4, px + 4, py + 4) for px, py in places]
    for (label, x, y), (px, py) in zip(points, places):
        width, height = 0.64 * size * len(label), 1.1 * size
        around = [(8, 0), (6, 9), (6, -9), (-width - 8, 0), (-width / 2, 11), (-width / 2, -11)]
        around += [(-width - 6, 9), (-width - 6, -9), (8, 18), (8, -18)]
        boxes = [(px + dx, py + dy - height / 2, px + dx + width, py + dy + height / 2) for dx, dy in around]
        covered = [sum(_overlap(box, other) for other in taken) for box in boxes]
        best = covered.index(min(covered))
        taken.append(boxes[best])
        axes.annotate(label, (x, y), xytext=around[best], textcoords="offset points", fontsize=size, va="center")


def _overlap(box: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The area that two boxes (left, bottom, right, top) share."""
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    return max(width, 0) * max(height, 0)
