"""Bad command lines: one line on stderr and exit code 1 or 2, or a command that works."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from attack_harness import run_command

from lr_attnres.cli import COMMANDS


VALUES = [
    *("0", "1", "-1", "3", "16", "1000000000", "1e9", "1e-9", "nan", "inf", "", " ", "abc", "\u00e9", "full", "none"),
    *("float32", "int8", "cpu", "cuda:99", "meta", "/", "..", "/dev/null", "gone", "owner/name", "a/b/c", "\x01", "-"),
    *("hidden_size=7", "x=y", "rms_norm_eps=1e300", "{", "--", "--resume", "sliced-n2-r4", "sliced-n0-r4", "9" * 40),
]
# Enough to reach the work of a command: MODEL, DATA, OUT are replaced by real folders.
STARTS = {
    "prepare": [
        "prepare",
        "sotu",
        "OUT",
        "--train-tokenizer",
        "300",
        "--max-tokens",
        "2000",
        "--sequence-length",
        "16",
    ],
    "train": ["train", "tiny", "--data", "DATA", "--output-dir", "OUT", "--steps", "1", "--batch-tokens", "32"],
    "evaluate": ["evaluate", "MODEL", "DATA"],
    "convert": ["convert", "MODEL", "OUT"],
    "upgrade": ["upgrade", "MODEL", "OUT"],
    "push": ["push", "owner/name", "GONE", "--dry-run"],
    "generate": ["generate", "MODEL", "--prompt", "a", "--max-new-tokens", "2"],
    "serve": ["serve", "GONE"],
    "analyze": ["analyze", "MODEL", "--data", "DATA", "--output", "OUT", "--max-tokens", "64"],
    "explore": ["explore", "GONE"],
    "cost": ["cost"],
}


def flags_of(command: str) -> list[str]:
    import argparse

    parser = argparse.ArgumentParser()
    COMMANDS[command].add_arguments(parser)
    return sorted(flag for action in parser._actions for flag in action.option_strings if flag.startswith("--"))


def make_maker(model: Path, data: Path) -> Callable:
    def make_case(chance: random.Random, folder: Path) -> tuple[str, Callable[[], str | None]]:
        command = chance.choice(sorted(STARTS))
        words = [*STARTS[command]]
        for _ in range(chance.randint(1, 3)):
            kind = chance.random()
            if kind < 0.6:  # a flag of the command, with a value that it may not expect
                words += [chance.choice(flags_of(command)), chance.choice(VALUES)]
            elif kind < 0.8:
                words[chance.randrange(1, len(words)) if len(words) > 1 else 0] = chance.choice(VALUES)
            elif kind < 0.9:
                del words[chance.randrange(len(words))]
            else:
                words.insert(chance.randrange(len(words) + 1), chance.choice(VALUES))
            words = words or [""]
        folders = {"MODEL": str(model), "DATA": str(data), "OUT": str(folder), "GONE": str(folder / "gone")}
        arguments = [folders.get(word, word) for word in words]

        def try_command() -> str:
            try:
                return run_command(arguments)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        return " ".join(words)[:300], try_command

    return make_case
