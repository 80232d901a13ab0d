"""Where the time of a training step, of prefill and of a token of decoding goes, eager, by kind of module.

What a module takes is without the modules inside it. In a training step only the forward has parts; the backward and
AdamW are in the rest. The clocks take time too: the ratios are those of the other benchmarks.
"""

import time
from collections import defaultdict
from functools import partial

from decode import decode_steps
from harness import QWEN, at_least_one, commit, interleave, keep_freed_memory, machine, parser, write_report
from prefill import prefill
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from train_step import train_step


STEPS = {"train_step": (train_step, 8, 512), "prefill": (prefill, 24, 512), "decode": (decode_steps, 24, 4)}
KINDS = {"Linear": "linear maps", "RMSNorm": "norms", "DepthRead": "reads", "Attention": "attention"}  # by class name
ROWS = ["standard", "sliced-n8-r64", "projected-n8-r32", "attnres-full", QWEN]


class Clocks:
    """Adds up the seconds of the modules of each kind."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.running: list[list[float]] = [[0.0, 0.0]]  # start, and the seconds of the modules inside
        self.hooks = [register_module_forward_pre_hook(self.enter), register_module_forward_hook(self.leave)]

    def enter(self, module: nn.Module, inputs: object) -> None:
        self.running.append([time.perf_counter(), 0.0])

    def leave(self, module: nn.Module, inputs: object, outputs: object) -> None:
        start, inside = self.running.pop()
        whole = time.perf_counter() - start
        self.running[-1][1] += whole
        kind = next((kind for ending, kind in KINDS.items() if type(module).__name__.endswith(ending)), None)
        if kind is not None:
            self.seconds[kind] += whole - inside

    def __enter__(self) -> "Clocks":
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self.hooks:
            hook.remove()


def parts_of(step) -> dict[str, float]:
    """Milliseconds of one step."""
    with Clocks() as clocks:
        start = time.perf_counter()
        step()
        whole = time.perf_counter() - start
    parts = {kind: clocks.seconds[kind] for kind in KINDS.values()}
    parts |= {"the rest": whole - sum(parts.values()), "all": whole}
    return {kind: 1000 * taken for kind, taken in parts.items()}


def fastest_parts(name: str, rows: list[str], repeats: int) -> dict[str, dict[str, float]]:
    """The parts of each row's fastest step; the rows run interleaved."""
    make, layers, tokens = STEPS[name]
    steps = {row: make(row, False, layers=layers, tokens=tokens, batch=1) for row in rows}
    measured: dict[str, list[dict[str, float]]] = {row: [] for row in rows}

    def run(row: str) -> float:
        measured[row].append(parts_of(steps[row]))
        return measured[row][-1]["all"]

    interleave({row: partial(run, row) for row in rows}, repeats)
    return {row: min(several[1:], key=lambda parts: parts["all"]) for row, several in measured.items()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.set_defaults(rows=ROWS)
    arguments.add_argument("--repeats", type=at_least_one, default=12)
    args = arguments.parse_args()
    keep_freed_memory()
    found = {}
    for name in STEPS:
        found[name] = fastest_parts(name, args.rows, args.repeats)
        print(f"\n{name}, ms\n{'':28s}" + "".join(f"{kind:>14s}" for kind in found[name][args.rows[0]]))
        for row, parts in found[name].items():
            print(f"{row:28s}" + "".join(f"{taken:14.2f}" for taken in parts.values()), flush=True)
    content = {"machine": machine(), "commit": commit(), "repeats": args.repeats, "milliseconds": found}
    write_report("parts", args.output, content)


if __name__ == "__main__":
    main()
