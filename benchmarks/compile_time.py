"""The first and the later steps of training: eager, compiled as a whole, and compiled layer by layer.

The first step compiles, with empty caches. The table is printed, not written: it is of the machine that it runs on.
"""

import torch
from harness import PAPER_WIDTH, VARIANTS, at_least_one, build, interleave, parser, seconds, training_step


MODES = ("eager", "layers", "whole")


def make_step(row: str, mode: str, layers: int, tokens: int):
    model = build(row, vocab_size=8192, num_hidden_layers=layers, **PAPER_WIDTH)
    if mode == "layers":
        model.compile_layers()
    return training_step(model, torch.randint(0, 8192, (1, tokens)), compiled=mode == "whole")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=at_least_one, default=8)
    arguments.add_argument("--tokens", type=at_least_one, default=512)
    arguments.add_argument("--repeats", type=at_least_one, default=4)
    args = arguments.parse_args()
    torch._inductor.config.force_disable_caches = True
    print(f"{args.layers} layers, {args.tokens} tokens\n{'':28s}{'first step, s':>16s}{'later steps, s':>16s}")
    for row in [row for row in VARIANTS if row in args.rows]:
        first, timers = {}, {}
        for mode in MODES:
            torch.compiler.reset()
            step = make_step(row, mode, args.layers, args.tokens)
            first[mode] = seconds(step)
            later = interleave({mode: lambda step=step: seconds(step)}, args.repeats)
            timers[mode] = later[mode]
        for mode in MODES:
            print(f"{row + ', ' + mode:28s}{first[mode]:16.2f}{timers[mode]:16.3f}", flush=True)


if __name__ == "__main__":
    main()
