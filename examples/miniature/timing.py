"""Time a whole training step of each row relative to the baseline: forward, backward, clipping and optimizer.

Groups of four rows and the baseline alternate in one process; the smallest of the repeats counts. Run it on an idle
machine. It writes `timing.json` into the results folder; rows that are not timed keep their previous ratios.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from run import write_json
from sweep import BASELINE, RESULTS, SWEEP, Sweep, load_sweep

from lr_attnres import LRAttnResConfig, LRAttnResForCausalLM, muon_adamw, use_chunked_loss


def training_step(sweep: Sweep, row: str) -> Callable[[], None]:
    """One step of the recipe on random tokens."""
    torch.manual_seed(0)
    args = sweep.arguments(sweep.run(row, 0), Path(), Path())
    length, vocab_size = sweep.data["sequence_length"], sweep.data["train_tokenizer"]
    config = LRAttnResConfig(vocab_size=vocab_size, max_position_embeddings=length, **args.model_fields())
    model = LRAttnResForCausalLM(config).train()
    use_chunked_loss(model, args.z_loss)
    optimizer = muon_adamw(model, args.lr_muon, args.lr_adamw, args.lr_queries)
    forward = torch.compile(model) if args.compile else model
    rows = args.batch_tokens // length
    input_ids = torch.randint(0, vocab_size, (rows, length))
    positions = torch.arange(length).expand(rows, length).contiguous()
    inputs = [
        {"input_ids": ids, "labels": ids, "position_ids": position_ids}
        for ids, position_ids in zip(input_ids.split(args.micro_batch_size), positions.split(args.micro_batch_size))
    ]

    def step() -> None:
        for batch in inputs:
            (forward(**batch, use_cache=False).loss / len(inputs)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def interleave(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """The smallest time of each row in seconds. Two untimed rounds compile and create the optimizer states."""
    best = dict.fromkeys(steps, float("inf"))
    for repeat in range(-2, repeats):
        for row, step in steps.items():
            start = time.perf_counter()
            step()
            if repeat >= 0:
                best[row] = min(best[row], time.perf_counter() - start)
    return best


def measure_ratios(sweep: Sweep, rows: list[str], repeats: int) -> dict[str, float]:
    ratios, others = {BASELINE: 1.0}, [row for row in rows if row != BASELINE]
    for start in range(0, len(others), 4):
        batch = others[start : start + 4]
        seconds = interleave({row: training_step(sweep, row) for row in (BASELINE, *batch)}, repeats)
        for row in batch:
            ratios[row] = round(seconds[row] / seconds[BASELINE], 4)
            print(f"{row:24s}{seconds[row]:9.4f} s{ratios[row]:8.3f} of {seconds[BASELINE]:.4f} s", flush=True)
        torch.compiler.reset()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="default: all rows trained from random weights")
    parser.add_argument("--repeats", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--sweep", type=Path, default=SWEEP, help="default: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    options = parser.parse_args()
    try:
        sweep = load_sweep(options.sweep)
        rows = [*dict.fromkeys(run.row for run in sweep.runs(options.rows or sweep.trained))]
        if options.repeats < 1:
            raise ValueError(f"--repeats is {options.repeats}; it must be at least 1.")
        if not set(rows) <= set(sweep.trained):
            raise ValueError(f"a continued row costs what its variant costs: time one of {', '.join(sweep.trained)}.")
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
    machine = {"device": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    settings = {"machine": machine | {"torch": torch.__version__}, "repeats": options.repeats}
    path = options.results / "timing.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    ratios = before["ratios"] if {name: before.get(name) for name in settings} == settings else {}
    write_json(path, settings | {"ratios": ratios | measure_ratios(sweep, rows, options.repeats)})


if __name__ == "__main__":
    main()
