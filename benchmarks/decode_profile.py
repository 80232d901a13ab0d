"""Where an eager step of decoding spends its time: linear maps, norms, reads and the rest, in milliseconds per token.

A read is all that a sub-layer's output goes through (in `standard`, one addition), but not the norm after it; `start`
is what the model does for its reads before the first layer. Each call counts with the smallest of its repeats.
"""

import time

import torch
from decode import new_cache
from harness import (
    CONTROL,
    PAPER_WIDTH,
    build,
    check_against_naive_read,
    interleave,
    parser,
    report,
    share_parameters,
    total,
)

from lr_attnres.depth_read import LRAttnResDepthRead


KINDS = {torch.nn.Linear: "linear maps", torch.nn.RMSNorm: "norms", LRAttnResDepthRead: "reads"}
calls: list[tuple[str, float]] = []  # of one step, innermost first


def timed(function, kind: str):
    """Its own time: what calls inside it took is theirs."""

    def call(*args, **kwargs):
        first, start = len(calls), time.perf_counter()
        result = function(*args, **kwargs)
        seconds = time.perf_counter() - start
        calls.append((kind, seconds - total(calls[first:])))
        return result

    return call


@torch.no_grad()
def decode_step(row: str, layers: int):
    model = share_parameters(build(row, vocab_size=8192, num_hidden_layers=layers, **PAPER_WIDTH)).eval()
    for module in model.modules():
        for kind, name in KINDS.items():
            if isinstance(module, kind):
                module.forward = timed(module.forward, name)
    model.model.start_depth_state = timed(model.model.start_depth_state, "start")
    cache = new_cache(model, tokens=1)
    forward = timed(model, "rest")

    @torch.no_grad()
    def step():
        cache.reset()
        forward(torch.tensor([[1]]), past_key_values=cache, use_cache=True, position_ids=torch.tensor([[0]]))

    return step


def take(step) -> list[tuple[str, float]]:
    calls.clear()
    step()
    return list(calls)


def main() -> None:
    arguments = parser(__doc__, repeats=60, rows=("standard", "sliced-n8-r64", "sliced-full-r64"))
    arguments.add_argument("--layers", type=int, default=24)
    args = arguments.parse_args()
    check_against_naive_read(args.rows)
    steps = {row: decode_step(row, args.layers) for row in dict.fromkeys(["standard", *args.rows])}
    steps[CONTROL] = decode_step("standard", args.layers)
    columns: dict[str, dict[str, float]] = {kind: {} for kind in (*KINDS.values(), "start", "rest")}
    for row, parts in interleave(steps, args.repeats, take).items():
        for kind, column in columns.items():
            column[row] = 1e3 * total([part for part in parts if part[0] == kind])
    settings = {"layers": args.layers, "repeats": args.repeats}
    report("decode_profile", settings, columns, "ms per token", args.output, baseline=None)


if __name__ == "__main__":
    main()
