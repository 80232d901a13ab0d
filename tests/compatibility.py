"""Which test tries which variant with which feature: what the cells of docs/compatibility.md are bound to.

`python tests/compatibility.py` rewrites the cells of that page; its rows and links are written by hand.

@pytest.mark.compatibility("Dynamic cache")                    # the variant is the test's parameter `variant`
@pytest.mark.compatibility("vLLM", parameter="served")         # ... or another parameter that stands for a variant
@pytest.mark.compatibility("DDP", variants=VARIANTS)           # the test loops over variants in its body
@pytest.mark.compatibility("ZeRO", refused=RESIDUAL_TYPES)     # it does not work; the test shows what happens
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lr_attnres.variants import RESIDUAL_TYPES


TESTS = Path(__file__).parent
MATRIX = TESTS.parent / "docs/compatibility.md"
# All but the first are not collected by default: test_depth_routing_triton.py runs the second in a process of its own,
# `make test-vllm` and `make test-backends` the others in environments of their own.
FILES = "test_*.py interpreted_depth_routing_triton.py served_by_vllm.py other_backends.py"
RELEASED_NAMES = {"baseline": "standard", "plr": "projected", "slr": "sliced"}


@dataclass(frozen=True)
class Trial:
    """One variant in one test of a feature."""

    feature: str
    test: str
    path: Path
    residual_type: str
    has_full_sources: bool
    is_refused: bool


def read_variant(value: object) -> tuple[str, bool]:
    """The residual type, and whether the source set is full. `value` is a name (`sliced_full`, `sliced-n2-r8`,
    `plr_block3_r8`), the fields of a config, or a tuple that starts with a name."""
    if isinstance(value, dict):
        return value["residual_type"], value.get("num_depth_blocks") is None
    name = value[0] if isinstance(value, tuple) else value
    residual_type, *rest = name.replace("-", "_").split("_")
    residual_type = RELEASED_NAMES.get(residual_type, residual_type)
    if residual_type not in RESIDUAL_TYPES:
        raise ValueError(f"{value!r} is not the name of a variant")
    return residual_type, "full" in rest


def trials_of(item: pytest.Function) -> Iterator[Trial]:
    for mark in item.iter_markers("compatibility"):
        yield from read_mark(item, *mark.args, **mark.kwargs)


def read_mark(
    item: pytest.Function,
    feature: str,
    parameter: str = "variant",
    variants: Iterable[object] | None = None,
    refused: Collection[str] = (),
) -> Iterator[Trial]:
    for variant in [item.callspec.params[parameter]] if variants is None else variants:
        residual_type, is_full = read_variant(variant)
        yield Trial(feature, item.originalname, item.path, residual_type, is_full, residual_type in refused)


class Recorder:
    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        self.trials = [trial for item in items for trial in trials_of(item)]


def collect_trials() -> list[Trial]:
    """Of all tests, whichever of them run now."""
    recorder = Recorder()
    options = ["--collect-only", "-o", f"python_files={FILES}", "-p", "no:cacheprovider", "-p", "no:xdist"]
    code = pytest.main([str(TESTS), *options], plugins=[recorder])
    assert code == pytest.ExitCode.OK, "the tests cannot be collected: see above"
    return recorder.trials


def mark_of(residual_type: str, trials: Iterable[Trial]) -> str:
    """The cell of a residual type in the row that `trials` belong to."""
    own = [trial for trial in trials if trial.residual_type == residual_type]
    if not own:
        return "n/a" if residual_type == "standard" else "not tried"
    if any(trial.is_refused for trial in own):
        return "no"
    if residual_type == "standard" or len({trial.has_full_sources for trial in own}) == 2:
        return "yes"
    return "full" if own[0].has_full_sources else "blocks"


def cells_of(line: str) -> list[str]:
    """The cells of a row of the page: the feature, one per residual type, and the links; empty for other lines."""
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    return cells if line.startswith("|") and len(cells) > 3 and cells[-1].startswith("[") else []


def main() -> None:
    trials = collect_trials()
    lines = MATRIX.read_text().splitlines()
    for i, line in enumerate(lines):
        if cells := cells_of(line):
            own = [trial for trial in trials if trial.feature == cells[0]]
            marks = [mark_of(residual_type, own) for residual_type in RESIDUAL_TYPES]
            lines[i] = f"| {' | '.join([cells[0], *marks, cells[-1]])} |"
    MATRIX.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
