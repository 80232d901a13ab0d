"""Time of a training step against the number of layers, as a table and a plot: linear for blocks; for full sources the
depth part follows the grouped law, not the square of the layers."""

import json
from pathlib import Path

import torch
from harness import (
    PAPER_WIDTH,
    build,
    check_against_naive_read,
    interleave,
    parser,
    report,
    settle,
    share_parameters,
    total,
    training_step,
)


COLOURS = {"standard": "#000000", "sliced-n8-r64": "#0072B2", "sliced-full-r64": "#D55E00"}
NAIVE = "sliced-full-r64, naive read"


def step_of(row: str, layers: int, tokens: int):
    model = share_parameters(build(row, vocab_size=512, num_hidden_layers=layers, **PAPER_WIDTH))
    return training_step(model, torch.randint(0, 512, (1, tokens)))


def plot(seconds: dict[str, dict[str, float]], depth: dict[str, dict[str, float]] | None, path: Path) -> None:
    """Whole steps on the left; on the right, if depth_read.py has been run, the depth part alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2 if depth else 1, figsize=(10 if depth else 5.5, 4), layout="constrained")
    axes = axes if depth else [axes]
    panels = [(axes[0], seconds, "training step, seconds")]
    panels += [(axes[1], depth, "depth part alone, forward and backward, ms")] if depth else []
    for axis, columns, label in panels:
        layers = [int(title.removeprefix("L=")) for title in columns]
        for row, colour in (COLOURS | {NAIVE: "#999999"}).items():
            if all(row in column for column in columns.values()):
                axis.plot(layers, [column[row] for column in columns.values()], "o-", color=colour, label=row)
        if columns is depth:  # the naive read is far above the others
            axis.set(xscale="log", yscale="log")
            axis.minorticks_off()
        else:
            axis.set(xlim=(0, None), ylim=(0, None))
        axis.set(xlabel="layers L", ylabel=label)
        axis.set_xticks(layers, map(str, layers))
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    arguments = parser(__doc__, repeats=3)
    arguments.set_defaults(rows=[*COLOURS])  # the naive read of 64 sites takes minutes: depth_read.py has it
    arguments.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 32])
    arguments.add_argument("--tokens", type=int, default=256)
    arguments.add_argument("--figure", type=Path, help="default: scaling.png in the output folder")
    args = arguments.parse_args()
    check_against_naive_read(args.rows)
    rows = ["standard", *(row for row in args.rows if row != "standard")]
    columns = {}
    for layers in args.layers:
        parts = settle(interleave({row: step_of(row, layers, args.tokens) for row in rows}, args.repeats))
        columns[f"L={layers}"] = {row: total(parts[row]) for row in rows}
    report("scaling", {"tokens": args.tokens, "repeats": args.repeats}, columns, "s", args.output)
    depth = args.output / "depth_read.json"
    depth_columns = json.loads(depth.read_text())["columns"] if depth.exists() else None
    path = args.figure or args.output / "scaling.png"
    plot(columns, depth_columns, path)
    print(path)


if __name__ == "__main__":
    main()
