"""Draw docs/architecture.svg from the schedule of a small model: which site reads which source, in which phase.

python docs/make_architecture.py
"""

from pathlib import Path
from xml.sax.saxutils import escape

from lr_attnres.depth_routing import DepthSite


LAYERS, BLOCKS = 4, 3
LEFT, COLUMN, TOP, ROW = 200, 92, 128, 46  # position and cell size of the grid
INK, FAINT, LINE = "#1b1f24", "#57606a", "#8c959f"
EMBEDDING, COMPLETED, PARTIAL, SUBLAYER, STEP = "#f2c14e", "#56b4e9", "#d3ecfa", "#e6e9ed", "#e3f4ed"


def text(x: float, y: float, content: str, size: int = 14, anchor: str = "middle", fill: str = INK, bold=False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    content = escape(content)
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}>{content}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = LINE) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{stroke}" '
        'stroke-width="1.2"/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{FAINT}" stroke-width="1.6" '
        'marker-end="url(#head)"/>'
    )


def left_of(site: int) -> float:
    return LEFT + (site - 1) * COLUMN


def header(sites: list[DepthSite]) -> list[str]:
    """The sub-layers and their blocks."""
    parts, ends = [], [site.index for site in sites if site.closes_block]
    parts.append(text(LEFT - 16, TOP - 28, "sub-layer, writes", anchor="end"))
    for number, (start, end) in enumerate(zip([0, *ends], ends), start=1):
        x, width = left_of(start + 1) + 4, (end - start) * COLUMN - 8
        parts.append(text(x + width / 2, TOP - 64, f"block {number}", bold=True))
        parts.append(f'<path d="M{x:g} {TOP - 52} v-5 h{width:g} v5" fill="none" stroke="{INK}" stroke-width="1.4"/>')
    for site in sites:
        x = left_of(site.index)
        parts.append(box(x + 4, TOP - 48, COLUMN - 8, 30, SUBLAYER))
        parts.append(text(x + COLUMN / 2, TOP - 28, "feed-fwd" if site.index % 2 == 0 else "attention", size=13))
    return parts


def grid(sites: list[DepthSite]) -> list[str]:
    """A row per source. A bar is read once for all sites of a group, a single cell by its own site."""
    names = ["source 0: embedding", *(f"source {i}: block {i}" for i in range(1, BLOCKS + 1))]
    parts = [text(LEFT - 16, TOP + i * ROW + 28, name, anchor="end") for i, name in enumerate(names)]
    for site in sites:
        x = left_of(site.index)
        if site.index == 1 or site.opens_group:
            for source in range(site.num_mixed):
                fill = COMPLETED if source else EMBEDDING
                parts.append(box(x + 4, TOP + source * ROW + 6, site.sites_in_group * COLUMN - 8, ROW - 12, fill))
        if not site.closes_block:
            parts.append(box(x + 4, TOP + (site.num_sources - 1) * ROW + 6, COLUMN - 8, ROW - 12, PARTIAL))
            parts.append(text(x + COLUMN / 2, TOP + (site.num_sources - 1) * ROW + 28, "partial", size=13))
    return parts


def footer(sites: list[DepthSite]) -> list[str]:
    """The sites and their groups."""
    bottom, parts, group = TOP + (BLOCKS + 1) * ROW, [], 0
    parts.append(text(LEFT - 16, bottom + 27, "site, reads its column", anchor="end"))
    for site in sites:
        x = left_of(site.index)
        parts.append(text(x + COLUMN / 2, bottom + 27, f"site {site.index}", bold=True))
        if site.index == 1 or site.opens_group:
            group += 1
            width = site.sites_in_group * COLUMN - 8
            path = f"M{x + 4:g} {bottom + 37} v5 h{width:g} v-5"
            parts.append(f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.4"/>')
            parts.append(text(x + 4 + width / 2, bottom + 59, f"group {group}"))
    return parts


def legend(y: float) -> list[str]:
    entries = [
        (LEFT, COMPLETED, "bar: phase 1, read once for its whole group"),
        (LEFT + 400, PARTIAL, "cell: phase 2, merged by its site"),
    ]
    parts = []
    for x, fill, label in entries:
        parts += [box(x + 4, y - 14, 30, 18, fill), text(x + 42, y, label, anchor="start", fill=FAINT)]
    return parts


def one_read(y: float) -> list[str]:
    """The steps of a read, from the sources to the next sub-layer."""
    steps = [
        (24, 200, STEP, ["a source is written", "its logits for the queries", "of all later sites"]),
        (268, 206, COMPLETED, ["phase 1, once per group", "p = Σ softmax(logits)ᵢ vᵢ", "z = log Σ exp(logitsᵢ)"]),
        (518, 206, PARTIAL, ["phase 2, at every site", "b = sigmoid(logit − z)", "h = p + b (v − p)"]),
        (768, 178, SUBLAYER, ["next sub-layer", "RMSNorm(h), attention", "or feed-forward"]),
    ]
    parts = [text(24, y - 18, "One read", size=15, anchor="start", bold=True)]
    for (x, width, fill, lines), following in zip(steps, [*steps[1:], None]):
        parts.append(box(x, y, width, 84, fill))
        parts += [text(x + width / 2, y + 25 + 22 * i, line, bold=i == 0) for i, line in enumerate(lines)]
        if following:
            parts.append(arrow(x + width + 5, y + 42, following[0] - 9, y + 42))
    parts.append(
        f'<path d="M857 {y + 88} v26 H124 v-19" fill="none" stroke="{FAINT}" stroke-width="1.6" '
        'marker-end="url(#head)"/>'
    )
    parts.append(
        text(490, y + 134, "its output is added to the partial; at a block's end the sum becomes a source", fill=FAINT)
    )
    return parts


def drawing() -> str:
    sites = DepthSite.schedule(2 * LAYERS, BLOCKS)
    below = TOP + (BLOCKS + 1) * ROW + 92
    width, height = LEFT + 2 * LAYERS * COLUMN + 24, below + 222
    title = f"Which site reads which source: {LAYERS} layers, {2 * LAYERS} sub-layers, {BLOCKS} blocks"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif">',
        f"<title>{title}</title>",
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker></defs>',
        # a white background, legible on dark pages too
        box(1, 1, width - 2, height - 2, "#ffffff"),
        text(24, 32, title, size=15, anchor="start", bold=True),
        *header(sites),
        *grid(sites),
        *footer(sites),
        *legend(below),
        *one_read(below + 64),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("architecture.svg").write_text(drawing(), encoding="utf-8")
