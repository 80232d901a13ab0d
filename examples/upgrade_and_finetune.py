"""Upgrade a small pretrained Llama and fine-tune it: the queries only, queries and LoRA, or all weights.

A Llama is trained on early State of the Union addresses and upgraded, which leaves its predictions unchanged. It is
then fine-tuned on later addresses, with a plain loop and with TRL's SFTTrainer (`pip install ".[finetune]"`). The
queries start at zero and need a higher learning rate than the other weights. About a minute on a CPU:

    python examples/upgrade_and_finetune.py [--pretrain-steps 150] [--steps 40]
"""

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from random import Random

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, get_peft_model
from tiny_model import byte_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar
from trl import SFTConfig, SFTTrainer

from lr_attnres import upgrade_model
from lr_attnres.data.documents import EMBEDDED_CORPUS


LENGTH, BATCH = 128, 8
RECIPES = {"queries": 0.0, "queries + LoRA": 3e-3, "everything": 1e-3}  # learning rate of all but the queries
QUERY_LR = 1e-2


def read_texts() -> tuple[list[str], list[str], list[str]]:
    """Pieces of early addresses (pretraining), of later ones (fine-tuning), and held-out pieces of the later ones."""
    addresses = [json.loads(line)["text"] for line in EMBEDDED_CORPUS.read_text(encoding="utf-8").splitlines()]
    early, late = "".join(addresses[:30]), "".join(addresses[30:])
    early, late = ([text[i : i + LENGTH] for i in range(0, len(text), LENGTH)] for text in (early, late))
    return early, [text for i, text in enumerate(late) if i % 100], late[::100]


def tokens_of(texts: list[str]) -> torch.Tensor:
    # LENGTH characters may be more than LENGTH bytes
    options = {"padding": "max_length", "truncation": True, "max_length": LENGTH}
    return byte_tokenizer()(texts, return_tensors="pt", **options)["input_ids"]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, texts: list[str], steps: int) -> None:
    random = Random(0)
    for _ in range(steps):
        batch = tokens_of(random.sample(texts, BATCH))
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_trl(model: torch.nn.Module, optimizer: torch.optim.Optimizer, texts: list[str], steps: int) -> None:
    settings = SFTConfig(
        output_dir=tempfile.gettempdir(),  # nothing is saved
        max_steps=steps,
        max_length=LENGTH,
        per_device_train_batch_size=BATCH,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
    )
    data = Dataset.from_dict({"text": texts[: 2 * steps * BATCH]})
    tokenizer, optimizers = byte_tokenizer(), (optimizer, None)
    SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer, optimizers=optimizers).train()


def choose_parameters(recipe: str, model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Freeze weights or add an adapter. The first parameter group of the optimizer has the queries."""
    if recipe == "queries":
        model.requires_grad_(False).model.depth_queries.requires_grad_(True)
    elif recipe == "queries + LoRA":
        adapter = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", modules_to_save=["depth_queries"])
        model = get_peft_model(model, adapter)
    groups = [{"params": [], "lr": QUERY_LR}, {"params": [], "lr": RECIPES[recipe]}]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[0 if "depth_queries" in name else 1]["params"].append(parameter)
    return model, torch.optim.AdamW(groups, weight_decay=0.0)


@torch.no_grad()
def examine(model: torch.nn.Module, texts: list[str]) -> tuple[float, float]:
    """The loss, and the effective sources (exp of the entropy of the depth weights) averaged over sites."""
    tokens = tokens_of(texts)
    outputs = model.eval()(input_ids=tokens, labels=tokens, output_depth_weights=True)
    sources = [torch.special.entr(weights).sum(-1).exp().mean() for weights in outputs.depth_weights]
    model.train()
    return outputs.loss.item(), torch.stack(sources).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    disable_progress_bar()
    disable_progress_bars()
    early, late, held_out = read_texts()
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=256))
    train(llama, torch.optim.AdamW(llama.parameters(), lr=3e-3), early, arguments.pretrain_steps)

    with tempfile.TemporaryDirectory() as work:
        sizes = {"num_depth_blocks": 4, "depth_key_rank": 16}
        folder = upgrade_model(llama, Path(work) / "upgraded", tokenizer=byte_tokenizer(), **sizes)
        with torch.no_grad():
            tokens = tokens_of(held_out)
            change = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits - llama.eval()(tokens).logits
        print(f"the upgrade changed the logits by at most {change.abs().max():.1e}")
        for recipe, (trainer, run) in product(RECIPES, {"loop": train, "TRL": train_with_trl}.items()):
            model, optimizer = choose_parameters(recipe, AutoModelForCausalLM.from_pretrained(folder))
            trained = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
            before = examine(model, held_out)
            run(model, optimizer, late, arguments.steps)
            after = examine(model, held_out)
            line = f"{recipe:15s} {trainer:5s}{trained:8,} trained   loss {before[0]:.4f} -> {after[0]:.4f}"
            print(f"{line}   effective sources {before[1]:.3f} -> {after[1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
