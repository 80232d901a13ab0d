"""The best model of each residual type as a folder ready for `lr-attnres push`: code, tokenizer and card."""

import argparse
import sys
from pathlib import Path

from report import Results
from sweep import RESULTS, SWEEP, Sweep, load_sweep, run_folder
from transformers import AutoTokenizer

from lr_attnres import LRAttnResForCausalLM
from lr_attnres.clean_process import CleanProcessError
from lr_attnres.hub_upload import check_folder
from lr_attnres.model_card import model_card, read_provenance, write_provenance
from lr_attnres.model_folder import staged_folder


def best_runs(results: Results) -> dict[str, dict]:
    """residual type -> the result with the lowest validation loss, of the rows trained from the start."""
    best = {}
    for row in results.sweep.rows:
        for result in results.rows.get(row, {}).values():
            kind = row.split("-")[0]
            if kind not in best or result["validation_loss"] < best[kind]["validation_loss"]:
                best[kind] = result
    return best


def export(sweep: Sweep, result: dict, work: Path, output: Path) -> Path:
    """Save the model anew, so that it carries the installed code, and load it as a stranger would."""
    source = run_folder(work, sweep.run(result["row"], result["seed"])) / "model"
    if not source.is_dir():
        raise ValueError(f"{source} does not exist: run `run.py --rows {result['row']} --seeds {result['seed']}`.")
    target = output / f"lr-attnres-miniature-{result['row']}"
    if target.exists():
        raise ValueError(f"{target} exists already: delete it, or choose another --output.")
    with staged_folder(target) as folder:
        model = LRAttnResForCausalLM.from_pretrained(source)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        evaluation = [{"dataset": "miniature", "metric": "validation loss", "value": result["validation_loss"]}]
        write_provenance(folder, **(read_provenance(source) | {"evaluation": evaluation, "language": ["en"]}))
        model_card(folder, model.config, target.name).save(folder / "README.md")
        check_folder(folder)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
            print(export(sweep, result, options.work, options.output), flush=True)
    except (OSError, ValueError, CleanProcessError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
