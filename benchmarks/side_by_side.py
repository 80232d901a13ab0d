"""Times the steps of all rows side by side, optionally those of two checkouts of the package.

Each checkout has a worker, a process that holds its models, waits for the name of a row and runs one step of it. One
process runs at a time.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from harness import (
    COPY,
    ROOT,
    VARIANTS,
    at_least_one,
    check_against_naive_read,
    commit,
    interleave,
    keep_freed_memory,
    known_row,
    machine,
    parser,
    seconds,
    write_report,
)

import lr_attnres


MakeStep = Callable[..., Callable[[], None]]  # row, compiled, layers=, tokens=, batch= -> step
Rows = dict[str, dict[str, float]]  # row -> seconds and ratios


def timing_parser(description: str, repeats: int, layers: int, tokens: int) -> argparse.ArgumentParser:
    result = parser(description)
    result.add_argument("--repeats", type=at_least_one, default=repeats)
    result.add_argument("--layers", type=int, default=layers)
    result.add_argument("--tokens", type=int, default=tokens)
    result.add_argument("--batch", type=at_least_one, default=1, help="sequences")
    result.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    result.add_argument("--compiled-rows", nargs="+", type=known_row, metavar="ROW", help="default: those of --rows")
    result.add_argument(
        "--against", type=Path, metavar="PATH", help="time this checkout of another version too, in the same rounds"
    )
    result.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return result


def time_rows(name: str, make_step: MakeStep, args: argparse.Namespace) -> None:
    """Prints the times and writes `<name>.json`, or `<name>_batch8.json` for a batch of 8."""
    if args.worker:
        serve(make_step, args)
        return
    report = name if args.batch == 1 else f"{name}_batch{args.batch}"
    modes = earlier_modes(report, args)
    for mode in args.modes:
        chosen = args.compiled_rows if mode == "compiled" and args.compiled_rows else args.rows
        rows = list(dict.fromkeys(["standard", COPY, *chosen]))
        print(f"{mode}: {', '.join(rows)}", file=sys.stderr, flush=True)
        times = time_checkouts(name, rows, mode == "compiled", args)
        modes[mode] = {"commit": commit(), "repeats": args.repeats, "rows": with_ratios(rows, times)}
        if args.against:
            modes[mode]["before"] = commit(args.against)
        print_rows(f"{report}, {mode}", modes[mode]["rows"])
    write_report(report, args.output, {"settings": sizes(args), "machine": machine(), "modes": modes})


def sizes(args: argparse.Namespace) -> dict[str, int]:
    return {"layers": args.layers, "tokens": args.tokens, "batch": args.batch}


def earlier_modes(name: str, args: argparse.Namespace) -> dict[str, dict]:
    """The modes that are not timed now, from a report on this machine with the same sizes."""
    path = args.output / f"{name}.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    if content.get("settings") != sizes(args) or content.get("machine") != machine():
        return {}
    return {mode: rows for mode, rows in content["modes"].items() if mode not in args.modes}


def time_checkouts(name: str, rows: list[str], compiled: bool, args: argparse.Namespace) -> dict[str, float]:
    """The seconds of each row and, under `<row>, before`, of the same row in the checkout `args.against`."""
    options = [text for size, value in sizes(args).items() for text in (f"--{size}", str(value))]
    with ExitStack() as stack:
        worker = stack.enter_context(Worker(name, ROOT, options))
        worker.ask(check=rows)
        timers = {row: worker.timer(row, compiled) for row in rows}
        if args.against:
            before = stack.enter_context(Worker(name, args.against, options))
            for row in rows:
                if row in VARIANTS or row == COPY:
                    timers[f"{row}, before"] = before.timer(row, compiled)
        return interleave(timers, args.repeats)


def with_ratios(rows: list[str], times: dict[str, float]) -> Rows:
    result = {}
    for row in rows:
        result[row] = {"seconds": times[row], "ratio": times[row] / times["standard"]}
        if (before := times.get(f"{row}, before")) is not None:
            result[row] |= {"seconds_before": before, "ratio_to_before": times[row] / before}
    return result


def print_rows(title: str, rows: Rows) -> None:
    print(f"\n{title}\n{'':28s}{'seconds':>10s}{'of standard':>14s}{'of before':>12s}")
    for row, numbers in rows.items():
        before = f"{numbers['ratio_to_before']:12.3f}" if "ratio_to_before" in numbers else ""
        print(f"{row:28s}{numbers['seconds']:10.4f}{numbers['ratio']:14.3f}{before}", flush=True)


class Worker:
    """A process of the benchmark `name` that imports the package of a checkout."""

    def __init__(self, name: str, checkout: Path, options: list[str]):
        self.checkout = checkout.resolve()
        command = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), "--worker", *options]
        # Pages of 2 MiB: with small ones, where a model's tensors lie moves whole rows by a per cent or two.
        pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        environment = os.environ | pages | {"PYTHONPATH": str(self.checkout)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def __enter__(self) -> "Worker":
        package = Path(self.answer())
        if not package.is_relative_to(self.checkout):
            self.__exit__()
            raise SystemExit(f"{self.checkout} has no package lr_attnres: {package} was imported instead.")
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.stdin.close()
        self.process.wait()

    def timer(self, row: str, compiled: bool) -> Callable[[], float]:
        return lambda: self.ask(row=row, compiled=compiled)

    def ask(self, **question: object):
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"The worker of {self.checkout} stopped with exit code {self.process.wait()}: see above.")
        return json.loads(line)


def serve(make_step: MakeStep, args: argparse.Namespace) -> None:
    """What a worker does: answer lines of JSON until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    keep_freed_memory()
    print(json.dumps(lr_attnres.__file__), file=answers, flush=True)
    steps: dict[str, Callable[[], None]] = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "check" in question:
            answer = check_against_naive_read(question["check"])
        else:
            row = question["row"]
            if row not in steps:
                steps[row] = make_step(row, question["compiled"], **sizes(args))
            answer = seconds(steps[row])
        print(json.dumps(answer), file=answers, flush=True)
