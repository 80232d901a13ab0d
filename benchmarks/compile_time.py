"""The first and the later steps of training: eager, compiled as a whole, and compiled layer by layer.

The first step compiles, with empty caches.
"""

from functools import partial

import torch
from harness import (
    PAPER_WIDTH,
    at_least_one,
    build,
    commit,
    interleave,
    machine,
    parser,
    seconds,
    training_step,
    write_report,
)


MODES = ("eager", "layers", "whole")
ROWS = ["standard", "sliced-n8-r64", "sliced-full-r64", "projected-n8-r32"]


def make_step(row: str, mode: str, layers: int, tokens: int):
    model = build(row, vocab_size=8192, num_hidden_layers=layers, **PAPER_WIDTH)
    if mode == "layers":
        model.compile_layers()
    return training_step(model, torch.randint(0, 8192, (1, tokens)), compiled=mode == "whole")


def main() -> None:
    arguments = parser(__doc__)
    arguments.set_defaults(rows=ROWS)
    arguments.add_argument("--layers", type=at_least_one, default=8)
    arguments.add_argument("--tokens", type=at_least_one, default=512)
    arguments.add_argument("--repeats", type=at_least_one, default=4)
    args = arguments.parse_args()
    torch._inductor.config.force_disable_caches = True
    print(f"{args.layers} layers, {args.tokens} tokens\n{'':28s}{'first step, s':>16s}{'later steps, s':>16s}")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in args.rows:
        first, steps = {}, {}
        for mode in MODES:
            torch.compiler.reset()
            steps[mode] = make_step(row, mode, args.layers, args.tokens)
            first[mode] = seconds(steps[mode])
        later = interleave({mode: partial(seconds, step) for mode, step in steps.items()}, args.repeats)
        found[row] = {mode: {"first": first[mode], "later": later[mode]} for mode in MODES}
        for mode in MODES:
            print(f"{row + ', ' + mode:28s}{first[mode]:16.2f}{later[mode]:16.3f}", flush=True)
    sizes = {"layers": args.layers, "tokens": args.tokens, "repeats": args.repeats}
    write_report("compile_time", args.output, {"machine": machine(), "commit": commit(), **sizes, "seconds": found})


if __name__ == "__main__":
    main()
