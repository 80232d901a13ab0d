"""A step of the training loop against the bare forward, backward and optimizer step of the same model.

The two alternate in one process: after each step of the loop, one bare step on a batch of the same shape is timed. A
step of the loop is all that happens between two bare ones: reading data, gradients, clipping, progress bar, metrics.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from harness import machine

from lr_attnres.data import PackedTokens, prepare
from lr_attnres.losses import use_chunked_loss
from lr_attnres.metrics import Metrics
from lr_attnres.optimizers import muon_adamw
from lr_attnres.training import new_model, train
from lr_attnres.training_arguments import TrainArguments, load_arguments


def bare_step(args: TrainArguments):
    """Forward, backward and optimizer of a step's micro-batches, on data that is already there."""
    data = PackedTokens(args.data)
    model = new_model(args, data.manifest).train()
    use_chunked_loss(model, args.z_loss)
    optimizer = muon_adamw(model, args.lr_muon, args.lr_adamw)
    rows = args.batch_tokens // data.sequence_length
    starts = range(0, rows, args.micro_batch_size)
    batches = [[data[start + i] for i in range(args.micro_batch_size)] for start in starts]
    batches = [torch.utils.data.default_collate(batch) for batch in batches]

    def step() -> None:
        for batch in batches:
            (model(**batch, use_cache=False).loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(args: TrainArguments) -> dict[str, list[float]]:
    """Seconds of each step, without the first three and the last, which warm up and save."""
    step, seconds, advance = bare_step(args), {"loop": [], "bare": []}, Metrics.advance
    last = time.perf_counter()

    def advance_and_compare(metrics: Metrics, *arguments) -> None:
        nonlocal last
        advance(metrics, *arguments)
        middle = time.perf_counter()
        step()
        end = time.perf_counter()
        seconds["loop"].append(middle - last)
        seconds["bare"].append(end - middle)
        last = end

    Metrics.advance = advance_and_compare
    try:
        train(args)
    finally:
        Metrics.advance = advance
    return {name: values[3:-1] for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder of the JSON report")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {"sequence_length": 256, "validation_fraction": 0.1}
        prepare("sotu", f"{folder}/data", train_tokenizer=2048, **rows, progress_bar=False)
        sizes = {"hidden_size": options.hidden_size, "num_hidden_layers": options.layers}
        sizes["intermediate_size"] = options.hidden_size * 11 // 4
        args = load_arguments("tiny", data=f"{folder}/data", output_dir=f"{folder}/run", model=sizes)
        args.steps, args.warmup_steps, args.micro_batch_size, args.log_steps = options.steps, 0, 4, 1
        args.eval_steps = args.save_steps = args.entropy_steps = options.steps + 1
        seconds = measure(args)
    settings = sizes | {"steps": args.steps, "batch_tokens": args.batch_tokens, "micro_batch_size": 4}
    print(f"\ntraining_throughput: {settings}\n{machine()}")
    report = {}
    for name, summarise in {"median": statistics.median, "min": min}.items():
        loop, bare = summarise(seconds["loop"]), summarise(seconds["bare"])
        report[name] = {"loop": loop, "bare": bare, "ratio": loop / bare}
        print(f"{name:8s}loop {loop:.4f} s   bare {bare:.4f} s   ratio {loop / bare:.3f}")
    options.output.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": "training_throughput", "settings": settings, "machine": machine(), "seconds": report}
    (options.output / "training_throughput.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
