"""The sweep file: the rows to train, their seeds, their recipe and their order."""

import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lr_attnres import TrainArguments, load_arguments, variant_fields
from lr_attnres.analysis.paper import PAPER_VARIANTS


HERE = Path(__file__).parent
SWEEP = HERE / "sweep.yaml"
RESULTS = HERE / "results"
BASELINE = "standard"
# Added to the seed of a continued run, so that it sees the text in another order than its baseline.
CONTINUED_SEED = 1000


@dataclass(frozen=True)
class Run:
    """One row with one seed."""

    row: str
    seed: int
    variant: str
    is_continued: bool

    @property
    def name(self) -> str:
        return f"{self.row}-seed{self.seed}"

    @property
    def baseline(self) -> "Run":
        """The `standard` run with the same seed, from which a continued run starts."""
        return Run(BASELINE, self.seed, BASELINE, False)


@dataclass(frozen=True)
class Sweep:
    tokens: int
    continued_fraction: float  # fraction of these tokens in continued runs
    data: dict[str, Any]
    recipe: dict[str, Any]
    continued_recipe: dict[str, Any]  # changes of the recipe in continued runs
    rows: dict[str, str]  # row -> row of the paper
    continued: dict[str, str]  # row -> variant of the continued run
    order: list[dict[str, list]]
    heads: list[str] = field(default_factory=list)  # rows with depth heads, and what they are compared with

    @property
    def trained(self) -> list[str]:
        """The rows that start from random weights."""
        return [*self.rows, *self.heads]

    def recipe_of(self, run: Run) -> dict[str, Any]:
        return self.recipe | (self.continued_recipe if run.is_continued else {})

    def steps(self, run: Run) -> int:
        tokens = self.tokens * (self.continued_fraction if run.is_continued else 1)
        return math.ceil(tokens / self.recipe["batch_tokens"])

    def run(self, row: str, seed: int) -> Run:
        return Run(row, seed, self.continued.get(row, row), row in self.continued)

    def runs(self, rows: Iterable[str] | None = None, seeds: Iterable[int] | None = None) -> list[Run]:
        """The runs in the order of the file, limited to `rows` and `seeds` if given."""
        for row in rows or ():
            if row not in (known := [*self.trained, *self.continued]):
                raise ValueError(f"--rows has {row!r}; the rows are {', '.join(known)}.")
        runs = [self.run(row, seed) for stage in self.order for seed in stage["seeds"] for row in stage["rows"]]
        runs = [run for run in runs if rows is None or run.row in rows]
        runs = [run for run in runs if seeds is None or run.seed in seeds]
        if not runs:
            raise ValueError(f"--rows {rows} --seeds {seeds}: the sweep has no such run.")
        return runs

    def arguments(self, run: Run, data: Path, work: Path) -> TrainArguments:
        """The training arguments of a run in `work`."""
        args = load_arguments(
            None,
            **self.recipe_of(run),
            variant=run.variant,
            seed=run.seed + CONTINUED_SEED if run.is_continued else run.seed,
            steps=self.steps(run),
            data=str(data),
            output_dir=str(run_folder(work, run)),
            init_from=str(start_folder(work, run)) if run.is_continued else None,
        )
        args.check()
        return args


def run_folder(work: Path, run: Run) -> Path:
    return work / "runs" / run.name


def start_folder(work: Path, run: Run) -> Path:
    """The folder of the model that a continued run starts from: the baseline, or the upgraded baseline."""
    if run.variant == BASELINE:
        return run_folder(work, run.baseline) / "model"
    return work / "upgraded" / run.name


def load_sweep(path: Path = SWEEP, tokens: int | None = None) -> Sweep:
    """Read and check a sweep file; `tokens` overrides its value."""
    values = yaml.safe_load(Path(path).read_text())
    fields = Sweep.__dataclass_fields__
    required = {name for name, entry in fields.items() if entry.default_factory is MISSING}
    if not isinstance(values, dict) or not required <= set(values) <= set(fields):
        raise ValueError(f"{path} must have the keys {', '.join(sorted(required))}, may have heads, and no others.")
    sweep = Sweep(**(values | ({} if tokens is None else {"tokens": tokens})))
    if sweep.tokens < 1:
        raise ValueError(f"`tokens` is {sweep.tokens}; it must be at least 1.")
    if not 0 < sweep.continued_fraction <= 1:
        raise ValueError(f"`continued_fraction` is {sweep.continued_fraction}; it must lie in (0, 1].")
    if BASELINE not in sweep.rows:
        raise ValueError(f"{path}: `rows` lacks {BASELINE}, which the others are compared with.")
    for row, paper_row in sweep.rows.items():
        variant_fields(row)
        if paper_row not in PAPER_VARIANTS:
            raise ValueError(f"{path}: {row} stands for {paper_row!r}, which is no row of the paper.")
    for row in sweep.heads:
        variant_fields(row)
    for stage in sweep.order:
        for row in stage["rows"]:
            if row not in (*sweep.trained, *sweep.continued):
                raise ValueError(f"{path}: `order` has {row!r}, which is not in `rows`, `heads` or `continued`.")
    runs = sweep.runs()
    if len(set(runs)) != len(runs):
        raise ValueError(f"{path}: `order` has a run twice.")
    for run in runs:
        sweep.arguments(run, Path("data"), Path("work"))
    return sweep
