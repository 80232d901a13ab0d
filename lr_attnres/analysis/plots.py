"""Figures of depth routing, saved as PNG and SVG. A residual type has the same colour in every figure."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from .cost import depth_cost
from .paper import PAPER_TABLE
from .routing import DepthAnalysis


# Okabe and Ito's palette, safe for colour-blind readers. Models of one residual type differ in line and marker.
COLOURS = {"standard": "#000000", "attnres": "#E69F00", "projected": "#0072B2", "sliced": "#009E73"}
SHARE_COLOURS = {"embedding": "#56B4E9", "completed": "#D55E00", "partial": "#F0E442"}
LINES = ["-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1))]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
Points = Iterable[tuple[float, float]]
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # keep text as text: small and searchable
    "svg.hashsalt": "lr-attnres",  # reproducible ids: the same figure gives the same file
}


def draw(analyses: list[DepthAnalysis], folder: Path) -> list[Path]:
    """Write every figure that has data for these models; returns the PNG files."""
    with matplotlib.rc_context(STYLE):
        figures = {name: make_figure(name, analyses) for name in FIGURES}
        return [save_figure(figure, folder / name) for name, figure in figures.items() if figure is not None]


def make_figure(name: str, analyses: list[DepthAnalysis]) -> Figure | None:
    """The figure of that name, of all models that have data for it; None if there is no such model."""
    if name == "gradient_norms":
        models = [analysis for analysis in analyses if analysis.gradient_norm is not None]
    else:  # most figures show the tensor of their name, which is empty if the model has no routing
        models = [analysis for analysis in analyses if name not in analysis.tensors or analysis.tensors[name].numel()]
    return FIGURES[name](models) if models else None


def draw_paper(path: str) -> Path:
    """Draw the paper's validation losses against the computed costs; returns the PNG file."""
    points = [
        (row.variant, row.residual_type, depth_cost(row.config).added_flops_percent, row.validation_loss)
        for row in PAPER_TABLE
    ]
    with matplotlib.rc_context(STYLE):
        return save_figure(loss_against_flops(points, "validation loss, as published"), Path(path))


def save_figure(figure: Figure, path: Path) -> Path:
    """Write `path` twice, with the suffixes `.png` and `.svg`; returns the PNG file."""
    for ending, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 130})):
        figure.savefig(path.with_suffix(ending), bbox_inches="tight", facecolor="white", **options)
    return path.with_suffix(".png")


def effective_sources_figure(analyses: list[DepthAnalysis]) -> Figure:
    """exp(H) by site, with the number of available sources as thin grey lines. Of a model with depth heads: the mean,
    in a band from the lowest to the highest head."""
    labels = ("Effective number of sources", "site", "exp(entropy of the depth weights)")
    figure, axes = _line_figure(analyses, lambda a: enumerate(a.tensors["effective_sources"].tolist(), 1), *labels)
    available = {}
    for analysis in analyses:
        heads = analysis.tensors.get("head_effective_sources", torch.zeros(0))
        if heads.numel():
            band = range(1, len(heads) + 1), heads.amin(1).tolist(), heads.amax(1).tolist()
            axes.fill_between(*band, color=COLOURS[analysis.residual_type], alpha=0.15, linewidth=0)
        num_blocks = len(analysis.block_ends)
        sources = "full" if num_blocks == 2 * analysis.num_layers else f"{num_blocks} blocks"
        available[tuple((~analysis.tensors["depth_weights"].isnan()).sum(-1).tolist())] = sources
    for num_sources, sources in available.items():  # one line per source set and number of layers
        last = (len(num_sources), num_sources[-1])
        axes.plot(range(1, len(num_sources) + 1), num_sources, color="0.65", linewidth=1, zorder=1)
        axes.annotate(f"available sources, {sources}", last, color="0.45", ha="right", va="bottom", fontsize=8)
    axes.set_ylim(bottom=0)
    return figure


def depth_weights_figure(analyses: list[DepthAnalysis]) -> Figure:
    """One heatmap (sites x sources) per model, clipped at the 99.5th percentile."""
    figure, panels = panel_grid(len(analyses), height=4.4)
    for axes, analysis in zip(panels, analyses):
        heatmap(axes, analysis.tensors["depth_weights"], analysis.block_ends, analysis.name)
    return figure


def clip_level(weights: torch.Tensor) -> float:
    """The 99.5th percentile of the weights, ignoring NaN."""
    return torch.quantile(weights[~weights.isnan()], 0.995).item()


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
        weights.numpy(), cmap="cividis", vmin=0, vmax=top, aspect="auto", interpolation="nearest", origin="upper"
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


def shares_figure(analyses: list[DepthAnalysis]) -> Figure:
    """The shares of embedding, completed sources and partial in the weight of each site, one panel per model."""
    figure, panels = panel_grid(len(analyses), height=3.2)
    for axes, analysis in zip(panels, analyses):
        shares = analysis.tensors["shares"].numpy()
        sites = range(1, len(shares) + 1)
        for i, (name, colour) in enumerate(SHARE_COLOURS.items()):
            axes.bar(sites, shares[:, i], bottom=shares[:, :i].sum(1), width=0.9, color=colour, label=name)
        axes.set(title=analysis.name, xlabel="site", ylabel="share of the weight")
        axes.set(xlim=(0.4, len(shares) + 0.6), ylim=(0, 1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def entropy_by_position_figure(analyses: list[DepthAnalysis]) -> Figure:
    """Entropy of the reads, averaged over sites, by the token's position in its document."""

    def curve(analysis: DepthAnalysis) -> Points:
        """The mean of each bin, at the middle of the bin. Two bins per power of 2."""
        entropy = analysis.tensors["entropy_by_position"].mean(0)
        edges = sorted({round(2 ** (i / 2)) for i in range(64) if 2 ** (i / 2) < len(entropy)} | {len(entropy)})
        for low, high in zip([0, *edges], edges):
            yield (low + high + 1) / 2, entropy[low:high].nanmean().item()

    labels = ("Entropy by token position", "position in the document, from 1", "mean entropy over sites (nats)")
    figure, axes = _line_figure(analyses, curve, *labels)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    return figure


def output_magnitude_figure(analyses: list[DepthAnalysis]) -> Figure:
    labels = ("Output magnitude", "sub-layer (0: embedding)", "root mean square of the output")
    figure, axes = _line_figure(analyses, lambda a: enumerate(a.tensors["output_magnitude"].tolist()), *labels)
    axes.set_yscale("log")
    return figure


def query_norms_figure(analyses: list[DepthAnalysis]) -> Figure:
    labels = ("Query norms", "site", "norm of the depth query")
    figure, axes = _line_figure(analyses, lambda a: enumerate(a.tensors["query_norms"].tolist(), 1), *labels)
    axes.set_ylim(bottom=0)
    return figure


def loss_against_flops_figure(analyses: list[DepthAnalysis]) -> Figure:
    """Held-out loss against the multiply-adds of depth routing, in percent of the core."""
    points = [(a.name, a.residual_type, a.added_flops_percent, a.loss) for a in analyses]
    return loss_against_flops(points, "Loss on held-out text")


def loss_against_flops(points: Sequence[tuple[str, str, float, float]], ylabel: str) -> Figure:
    """A labelled scatter plot of points (name, residual type, added FLOPs in percent, loss)."""
    figure, axes = one_panel("Loss against added FLOPs", "added FLOPs (% of the core)", ylabel, (8.5, 5.2))
    smallest = min((x for _, _, x, _ in points if x > 0), default=1.0)
    axes.set_xscale("symlog", linthresh=smallest / 2, linscale=0.3)
    for (kind, colour), marker in zip(COLOURS.items(), MARKERS):
        positions = [(x, y) for _, residual_type, x, y in points if residual_type == kind]
        if positions:
            flops, losses = zip(*positions)
            axes.scatter(flops, losses, color=colour, marker=marker, s=45, label=kind, zorder=3)
    largest = max(x for _, _, x, _ in points)
    axes.set_xlim(-smallest / 8, max(largest, smallest) * 2)
    ticks = [x for x in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if smallest / 2 <= x <= largest * 2]
    axes.set_xticks([0, *ticks], ["0", *map(str, ticks)])
    axes.minorticks_off()
    axes.margins(y=0.08)
    axes.legend()
    _label_points(figure, axes, [(name.removeprefix(kind).strip(" -") or name, x, y) for name, kind, x, y in points])
    return figure


def gradient_norms_figure(analyses: list[DepthAnalysis]) -> Figure:
    """One bar per model: the gradient norm, averaged over training."""
    size = (7.5, 0.4 * len(analyses) + 1.2)
    figure, axes = one_panel("Gradient norm", "average over training", "", size)
    norms = [analysis.gradient_norm or 0.0 for analysis in analyses]
    colours = [COLOURS[analysis.residual_type] for analysis in analyses]
    bars = axes.barh([analysis.name for analysis in analyses], norms, color=colours)
    axes.bar_label(bars, fmt="%.4f", padding=4)
    axes.margins(x=0.12)
    axes.invert_yaxis()  # the first model on top
    return figure


FIGURES: dict[str, Callable[[list[DepthAnalysis]], Figure]] = {
    "effective_sources": effective_sources_figure,
    "depth_weights": depth_weights_figure,
    "shares": shares_figure,
    "entropy_by_position": entropy_by_position_figure,
    "output_magnitude": output_magnitude_figure,
    "query_norms": query_norms_figure,
    "loss_against_flops": loss_against_flops_figure,
    "gradient_norms": gradient_norms_figure,
}


def one_panel(title: str, xlabel: str, ylabel: str, size: tuple[float, float] = (7.5, 4.4)) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def panel_grid(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, at most three side by side."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.6 * columns, height * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, list(panels[:count])


def _line_figure(
    analyses: list[DepthAnalysis], curve: Callable[[DepthAnalysis], Points], title: str, xlabel: str, ylabel: str
) -> tuple[Figure, Axes]:
    """One line per model through the points `curve(analysis)`, in the colour of its residual type. The n-th model of a
    type has the n-th line style and marker."""
    figure, axes = one_panel(title, xlabel, ylabel)
    drawn: Counter[str] = Counter()
    for analysis in analyses:
        n = drawn[analysis.residual_type]
        drawn[analysis.residual_type] += 1
        (line,) = axes.plot(*zip(*curve(analysis)), color=COLOURS[analysis.residual_type], label=analysis.name)
        line.set(linestyle=LINES[n % len(LINES)], linewidth=1.6, marker=MARKERS[n % len(MARKERS)], markersize=4)
    axes.legend()
    return figure, axes


def _label_points(figure: Figure, axes: Axes, points: list[tuple[str, float, float]], size: int = 8) -> None:
    """Write each label beside its point, where it covers the least of points and earlier labels."""
    figure.draw_without_rendering()  # fixes the layout, so that transData gives the final positions
    places = [axes.transData.transform((x, y)) * 72 / figure.dpi for _, x, y in points]
    taken = [Bbox.from_bounds(px - 4, py - 4, 8, 8) for px, py in places]
    for (label, x, y), (px, py) in zip(points, places):
        width, height = 0.64 * size * len(label), 1.1 * size
        around = [(8, 0), (6, 9), (6, -9), (-width - 8, 0), (-width / 2, 11), (-width / 2, -11)]
        around += [(-width - 6, 9), (-width - 6, -9), (8, 18), (8, -18)]
        boxes = [Bbox.from_bounds(px + dx, py + dy - height / 2, width, height) for dx, dy in around]
        overlaps = [[Bbox.intersection(box, other) for other in taken] for box in boxes]  # None where there is none
        covered = [sum(overlap.width * overlap.height for overlap in found if overlap) for found in overlaps]
        best = covered.index(min(covered))
        taken.append(boxes[best])
        axes.annotate(label, (x, y), xytext=around[best], textcoords="offset points", fontsize=size, va="center")
