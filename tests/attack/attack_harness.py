"""One case of the attack: it must succeed, or be refused in one line. Anything else is a bug.

Every case comes from a seed, so `attack("configs", 17)` is the same case everywhere.
"""

import contextlib
import io
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from lr_attnres.cli import main
from lr_attnres.errors import explain


SECONDS = 30  # a case that takes longer hangs
# Values that a field, a flag or a line of JSON does not expect.
WEIRD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 8, 16, 10**9, 10**18, 10**39, -(10**9)),
    *(0.0, -0.0, 0.5, 1.0, 1e-300, 1e-46, 1e300, 1e39, 5e-324, float("inf"), float("-inf"), float("nan")),
    *("", "1", "full", "none", "abc", "\u00e9", "float32", "int8", "silu", "../x", "/", "a" * 3000, "\x00"),
    *([], [1], [[]], {}, {"a": 1}, {"auto_map": "x.y"}),
]


class Bug(AssertionError):
    """The case neither succeeded nor was it refused in one line."""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def give_up(number: int, frame: object) -> None:
        raise Bug(f"still running after {seconds} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def outcome_of(case: Callable[[], str | None]) -> str:
    """`case` returns what it ended in, "success" if it returns nothing, or raises."""
    try:
        with time_limit(SECONDS), contextlib.redirect_stderr(io.StringIO()):
            return case() or "success"
    except Bug:
        raise
    except (StrictDataclassError, ValueError, OSError, ImportError, RuntimeError) as error:
        line = explain(error)
        if line is None or "\n" in line or not line.strip():
            raise Bug(f"{type(error).__name__}: {error}") from error
        return "refused"
    except Exception as error:
        raise Bug(f"{type(error).__name__}: {error}") from error


def run_command(arguments: list[str]) -> str:
    """A command line in this process: success, or one line on stderr and exit code 1 or 2."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code
    if code == 0:
        return "success"
    errors = [line for line in err.getvalue().splitlines() if line.startswith("Error: ")]
    if code not in (1, 2) or len(errors) != 1 or "Traceback" in err.getvalue():
        raise Bug(f"exit code {code} and {err.getvalue()[-500:]!r}")
    return "refused"


@dataclass
class Attack:
    """Runs cases `make_case(random, folder)` of one kind and counts how they end."""

    name: str
    make_case: Callable[[random.Random, Path], tuple[str, Callable[[], str | None]]]
    counts: Counter = field(default_factory=Counter)
    bugs: list[str] = field(default_factory=list)

    def run(self, seeds: range, folder: Path) -> None:
        for seed in seeds:
            description, case = self.make_case(random.Random(f"{self.name} {seed}"), folder / str(seed))
            try:
                self.counts[outcome_of(case)] += 1
            except Bug as bug:
                self.counts["bug"] += 1
                self.bugs.append(f"{self.name} {seed}: {description}: {bug}")
