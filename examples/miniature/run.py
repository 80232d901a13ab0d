"""The paper in miniature: fetches text, trains every row of `sweep.yaml` one after the other, writes a JSON per row.

Stop it at any time and start it again: finished rows are not run again, an interrupted one goes on from its last
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

from lr_attnres.data import prepare
from lr_attnres.model_card import read_provenance
from lr_attnres.upgrade import upgrade_model
from lr_attnres.variants import variant_fields


def result_file(results: Path, run: Run) -> Path:
    return results / f"{run.name}.json"


def is_finished(sweep: Sweep, run: Run, results: Path) -> bool:
    """Whether the result is there; one of another recipe is refused, so that no two are mixed."""
    path = result_file(results, run)
    if not path.exists():
        return False
    recipe = json.loads(path.read_text())["recipe"]
    asked = sweep.arguments(run, Path(), Path()).bound()
    for name in asked:
        if recipe.get(name) != asked[name]:
            raise ValueError(
                f"{path} was made with `{name}` = {recipe.get(name)}, this sweep has {asked[name]}: choose another "
                "--results folder."
            )
    return True


def prepare_text(sweep: Sweep, work: Path, text: list[str] | None) -> Path:
    """The folder of packed tokens."""
    files = text or corpus.fetch(work / "text")
    prepare(files, work / "data", **sweep.data)
    return work / "data"


def train_row(sweep: Sweep, run: Run, data: Path, work: Path) -> Path:
    """Train in a process of its own, from the last checkpoint on if there is one; returns the model's folder."""
    args, model = sweep.arguments(run, data, work), run_folder(work, run) / "model"
    if model.exists():
        if read_provenance(model)["recipe"] != args.bound():
            raise ValueError(
                f"{model} was trained by another recipe: delete {model.parent}, or choose another --work."
            )
        return model
    if run.is_continued:
        prepare_start(sweep, run, data, work)
    recipe = work / "recipes" / f"{run.name}.yaml"  # one each: another process may be training another row
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(yaml.safe_dump(sweep.recipe_of(run), sort_keys=False))
    flags = ["--data", args.data, "--output-dir", args.output_dir, "--variant", args.variant]
    flags += ["--seed", str(args.seed), "--steps", str(args.steps)]
    flags += ["--init-from", args.init_from] if args.init_from else []
    command = [sys.executable, "-m", "lr_attnres.cli", "train", str(recipe), *flags, "--resume"]
    code = call(command)
    if code in (130, 143):
        raise SystemExit(code)  # it was stopped, with a checkpoint
    if code:
        raise ValueError(f"training ended with code {code}, see above.")
    return model


def prepare_start(sweep: Sweep, run: Run, data: Path, work: Path) -> None:
    """What a continued run starts from: the baseline of the same seed, trained if it is not in `work`, and upgraded if
    the run is another variant."""
    baseline, start = train_row(sweep, run.baseline, data, work), start_folder(work, run)
    if not start.exists():
        upgrade_model(baseline, start, **variant_fields(run.variant), seed=run.seed)


def call(command: list[str]) -> int:
    """Run a command; being told to stop means telling it, waiting until it has saved, and stopping too."""
    told: list[int] = []
    with subprocess.Popen(command, start_new_session=True) as child:  # so that Ctrl-C reaches it once, through us

        def tell(number: int, frame: object) -> None:
            told.append(number)
            child.send_signal(number)

        before = {number: signal.signal(number, tell) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            code = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if told:
        raise SystemExit(128 + told[0])
    return code


def write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def run_sweep(sweep: Sweep, runs: list[Run], work: Path, results: Path, text: list[str] | None = None) -> list[str]:
    """Run what has no result yet; returns what failed, a line each. A row that fails does not stop the others."""
    left = [run for run in runs if not is_finished(sweep, run, results)]
    print(f"{len(runs) - len(left)} of {len(runs)} runs are finished, {len(left)} to go", flush=True)
    data = prepare_text(sweep, work, text) if left else None
    failed = []
    for number, run in enumerate(left, start=1):
        print(f"\n[{number}/{len(left)}] {run.name}", flush=True)
        if is_finished(sweep, run, results):
            print("has been finished by another process", flush=True)
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
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="of the sweep; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="default: all of the sweep")
    parser.add_argument("--tokens", type=int, help="of each run; default: the sweep's. Needs a --results of its own")
    parser.add_argument("--sweep", type=Path, default=SWEEP, help="default: %(default)s")
    parser.add_argument("--text", nargs="+", help="text or JSONL files instead of the fetched ones")
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
