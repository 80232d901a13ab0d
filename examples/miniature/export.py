"""Export the best model of each residual type as a folder for `lr-attnres push`, with code, tokenizer and card.

Weights are not in this repository: a model that is missing in the work folder is trained again first.
"""

import argparse
import sys
from pathlib import Path

from report import Results
from run import prepare_text, train_row
from sweep import RESULTS, SWEEP, Sweep, load_sweep, run_folder
from transformers import AutoTokenizer

from lr_attnres import LRAttnResForCausalLM
from lr_attnres.folders.card import model_card, read_provenance, write_provenance
from lr_attnres.folders.staging import check_absent, staged_folder
from lr_attnres.hub_upload import check_folder


def best_runs(results: Results) -> dict[str, dict]:
    """residual type -> the result with the lowest validation loss among the rows trained from random weights."""
    best = {}
    for row in results.sweep.trained:
        for result in results.rows.get(row, {}).values():
            kind = row.split("-")[0]
            if kind not in best or result["validation_loss"] < best[kind]["validation_loss"]:
                best[kind] = result
    return best


def export(sweep: Sweep, result: dict, work: Path, output: Path, text: list[str] | None = None) -> Path:
    """Save the model again, with the installed version of the code, and check that it loads without this package."""
    run, target = sweep.run(result["row"], result["seed"]), output / f"lr-attnres-miniature-{result['row']}"
    check_absent(target)
    source = run_folder(work, run) / "model"
    if not source.is_dir():
        print(f"{source} does not exist: training {run.name}", flush=True)
        source = train_row(sweep, run, prepare_text(sweep, work, text), work)
    elif read_provenance(source)["recipe"] != result["recipe"]:
        raise ValueError(f"{source} is not the model of the result, but of another recipe: choose another --work.")
    with staged_folder(target) as folder:
        model = LRAttnResForCausalLM.from_pretrained(source)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        provenance = read_provenance(source)
        evaluation = [measured | {"dataset": "miniature"} for measured in provenance["evaluation"]]
        write_provenance(folder, **(provenance | {"evaluation": evaluation, "language": ["en"]}))
        model_card(folder, model.config, target.name).save(folder / "README.md")
        check_folder(folder)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", help="text or JSONL files instead of the fetched ones, as in run.py")
    parser.add_argument("--work", type=Path, default=Path("outputs/miniature"), help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("outputs/miniature/export"), help="default: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--sweep", type=Path, default=SWEEP, help="default: %(default)s")
    options = parser.parse_args()
    try:
        sweep = load_sweep(options.sweep)
        best = best_runs(Results(sweep, options.results))
        if not best:
            raise ValueError(f"{options.results} has no results: run `run.py` first.")
        for result in best.values():
            print(export(sweep, result, options.work, options.output, options.text), flush=True)
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
