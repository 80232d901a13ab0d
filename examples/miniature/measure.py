"""The result of a run as JSON: loss, gradient norms, cost and depth statistics."""

import json
import statistics
from pathlib import Path
from typing import Any

import torch
from sweep import Run, Sweep

from lr_attnres import LRAttnResForCausalLM, PackedTokens, analyze_model
from lr_attnres.analysis.cost import num_parameters
from lr_attnres.analysis.routing import DepthAnalysis
from lr_attnres.data.held_out import make_batches
from lr_attnres.folders.card import read_provenance
from lr_attnres.training.metrics import METRICS_FILE, read_metrics


DIGITS = 5
CURVE_POINTS = 40
DEPTH = ("effective_sources", "depth_weights", "shares", "query_norms", "output_magnitude")


def measure(sweep: Sweep, run: Run, model_folder: Path, data: Path) -> dict[str, Any]:
    """The result of a finished run. The validation loss covers all held-out tokens."""
    records = read_metrics(model_folder.parent / METRICS_FILE)
    validation = PackedTokens(data, "validation")
    model = LRAttnResForCausalLM.from_pretrained(model_folder).eval()
    rows = (validation[i] for i in range(len(validation)))
    batches = make_batches(rows, sweep.recipe["micro_batch_size"])
    analysis = analyze_model(model, batches, loaded_from=str(model_folder))
    batch_tokens = sweep.recipe["batch_tokens"]
    return {
        "row": run.row,
        "seed": run.seed,
        "variant": run.variant,
        "paper_row": sweep.rows.get(run.row),
        "tokens": records[-1]["tokens"],
        "validation_loss": records[-1]["validation_loss"],
        "validation_tokens": analysis.tokens,
        "gradient_norm": analysis.gradient_norm,
        "step_seconds": statistics.median(batch_tokens / record["tokens_per_second"] for record in records),
        "threads": torch.get_num_threads(),
        "added_flops_percent": analysis.added_flops_percent,
        "parameters": num_parameters(model.config),
        "config": model.config.to_diff_dict(),
        "recipe": read_provenance(model_folder)["recipe"],
        "data": validation.manifest.training_hash(),
        "num_layers": analysis.num_layers,
        "block_ends": analysis.block_ends,
        "curve": _curve(records),
        "depth": {name: _rounded(analysis.tensors[name]) for name in DEPTH},
    }


def _curve(records: list[dict]) -> dict[str, list[float]]:
    """Training curves, averaged over at most CURVE_POINTS equal parts of the run."""
    width = -(-len(records) // CURVE_POINTS)
    parts = [records[start : start + width] for start in range(0, len(records), width)]
    curve = {"tokens": [part[-1]["tokens"] for part in parts]}
    for name in ("loss", "grad_norm"):
        curve[name] = [round(statistics.fmean(record[name] for record in part), DIGITS) for part in parts]
    return curve


def _rounded(tensor: torch.Tensor) -> list:
    """Nested lists, without the NaN that pad the rows of sites with fewer sources."""
    if tensor.ndim == 1:
        return [round(value, DIGITS) for value in tensor.tolist()]
    return [_rounded(row[~row.isnan()]) for row in tensor]


def read_result(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def as_analysis(result: dict[str, Any]) -> DepthAnalysis:
    """The inverse of `measure`, for the figures of the package."""
    rows = [torch.tensor(row, dtype=torch.float64) for row in result["depth"]["depth_weights"]]
    tensors = {
        name: torch.tensor(values, dtype=torch.float64)
        for name, values in result["depth"].items()
        if name != "depth_weights"
    }
    if rows:
        tensors["depth_weights"] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=float("nan"))
    return DepthAnalysis(
        name=result["variant"],
        loaded_from=result["row"],
        residual_type=result["variant"].split("-")[0],
        num_layers=result["num_layers"],
        block_ends=result["block_ends"],
        tokens=result["validation_tokens"],
        loss=result["validation_loss"],
        added_flops_percent=result["added_flops_percent"],
        gradient_norm=result["gradient_norm"],
        tensors=tensors,
    )
