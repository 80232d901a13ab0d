"""The paper in miniature: download text, train every run of `sweep.yaml` in order, write one JSON file per run.

You can stop it at any time and start it again: it skips finished runs and resumes an interrupted run from its last
checkpoint.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import corpus
import yaml
from measure import measure
from sweep import RESULTS, SWEEP, Run, Sweep, load_sweep, run_folder, start_folder

from lr_attnres import prepare_data, upgrade_model, variant_fields
from lr_attnres.folders.card import read_provenance


def result_file(results: Path, run: Run) -> Path:
    return results / f"{run.name}.json"


def is_finished(sweep: Sweep, run: Run, results: Path) -> bool:
    """Whether the result exists. Raises if it was made with another recipe, so that recipes are never mixed."""
    path = result_file(results, run)
    if not path.exists():
        return False
    recipe = json.loads(path.read_text())["recipe"]
    for name, value in sweep.arguments(run, Path(), Path()).bound().items():
        if recipe.get(name) != value:
            raise ValueError(
                f"{path} was made with `{name}` = {recipe.get(name)}, this sweep has {value}: choose another "
                "--results folder."
            )
    return True


def prepare_text(sweep: Sweep, work: Path, text: list[str] | None) -> Path:
    """The folder of packed tokens."""
    files = text or corpus.fetch(work / "text")
    prepare_data(files, work / "data", **sweep.data)
    return work / "data"


def train_row(sweep: Sweep, run: Run, data: Path, work: Path) -> Path:
    """Train in a separate process, which resumes from the last checkpoint if any; returns the model folder."""
    args, model = sweep.arguments(run, data, work), run_folder(work, run) / "model"
    if model.exists():
        if read_provenance(model)["recipe"] != args.bound():
            raise ValueError(
                f"{model} was trained by another recipe: delete {model.parent}, or choose another --work."
            )
        return model
    if run.is_continued:
        prepare_start(sweep, run, data, work)
    recipe = work / "recipes" / f"{run.name}.yaml"  # one file per run: another process may be training another run
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(yaml.safe_dump(sweep.recipe_of(run), sort_keys=False))
    flags = ["--data", args.data, "--output-dir", args.output_dir, "--variant", args.variant]
    flags += ["--seed", str(args.seed), "--steps", str(args.steps)]
    flags += ["--init-from", args.init_from] if args.init_from else []
    command = [sys.executable, "-m", "lr_attnres.cli", "train", str(recipe), *flags, "--resume"]
    code = call(command)
    if code in (130, 143):
        raise SystemExit(code)  # training was stopped and saved a checkpoint
    if code:
        raise ValueError(f"training ended with code {code}, see above.")
    return model


def prepare_start(sweep: Sweep, run: Run, data: Path, work: Path) -> None:
    """Make the start of a continued run: train the baseline of the same seed if it is missing in `work`, and upgrade
    it if the run has another variant."""
    baseline, start = train_row(sweep, run.baseline, data, work), start_folder(work, run)
    if not start.exists():
        upgrade_model(baseline, start, **variant_fields(run.variant), seed=run.seed)


def call(command: list[str]) -> int:
    """Run a command. Forward SIGTERM and SIGINT to it, wait until it has saved a checkpoint, then exit."""
    received: list[int] = []
    with subprocess.Popen(command, start_new_session=True) as child:  # a new session gets Ctrl-C only from `forward`

        def forward(number: int, frame: object) -> None:
            received.append(number)
            child.send_signal(number)

        previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            code = child.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    if received:
        raise SystemExit(128 + received[0])
    return code


def write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def run_sweep(sweep: Sweep, runs: list[Run], work: Path, results: Path, text: list[str] | None = None) -> list[str]:
    """Run all runs without a result; returns one line per failed run. A failed run does not stop the others."""
    left = [run for run in runs if not is_finished(sweep, run, results)]
    print(f"{len(runs) - len(left)} of {len(runs)} runs are finished, {len(left)} to go", flush=True)
    data = prepare_text(sweep, work, text) if left else None
    failed = []
    for number, run in enumerate(left, start=1):
        print(f"\n[{number}/{len(left)}] {run.name}", flush=True)
        if is_finished(sweep, run, results):
            print("another process has finished it", flush=True)
            continue
        try:
            model = train_row(sweep, run, data, work)
            result = measure(sweep, run, model, data)
        except ValueError as error:
            failed.append(f"{run.name}: {error}")
            print(f"Error: {failed[-1]}", file=sys.stderr, flush=True)
            continue
        write_json(result_file(results, run), result)
        shutil.rmtree(model.parent / "checkpoints", ignore_errors=True)
        print(f"{run.name}: validation loss {result['validation_loss']:.4f}", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="rows of the sweep (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="seeds of the sweep (default: all)")
    parser.add_argument(
        "--tokens", type=int, help="tokens per run (default: as in the sweep); use another --results with it"
    )
    parser.add_argument("--sweep", type=Path, default=SWEEP, help="default: %(default)s")
    parser.add_argument("--text", nargs="+", help="text or JSONL files (default: download)")
    parser.add_argument("--work", type=Path, default=Path("outputs/miniature"), help="default: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    options = parser.parse_args()
    try:
        sweep = load_sweep(options.sweep, options.tokens)
        runs = sweep.runs(options.rows, options.seeds)
        failed = run_sweep(sweep, runs, options.work, options.results, options.text)
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
    if failed:
        sys.exit("\n".join(["", f"{len(failed)} runs failed:", *failed]))


if __name__ == "__main__":
    main()
