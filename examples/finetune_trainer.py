"""Fine-tune all weights with Transformers' Trainer, the Muon + AdamW optimizer and the chunked loss.

On a CPU in about a minute:  python examples/finetune_trainer.py
On your model, text and GPUs: accelerate launch examples/finetune_trainer.py --model owner/name --source text.jsonl
Resume a stopped run with --resume; the result equals that of an uninterrupted run.
"""

import argparse
import math
from pathlib import Path

import torch
from tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

from lr_attnres import PackedTokens, muon_adamw_factory, prepare_data, use_chunked_loss


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub repository (default: a tiny random model)")
    parser.add_argument("--source", default="sotu", help="text, as for `lr-attnres prepare` (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=200_000, help="tokens to take (default: %(default)s)")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens per row (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="rows per device (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in --output")
    parser.add_argument("--output", type=Path, default=Path("outputs/finetune_trainer"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    base, data = arguments.model or arguments.output / "base", arguments.output / "data"
    training = TrainingArguments(
        arguments.output / "checkpoints",
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, arguments.steps // 10),
        max_grad_norm=1.0,
        bf16=torch.cuda.is_available(),
        logging_steps=max(1, arguments.steps // 10),
        save_steps=max(1, arguments.steps // 2),
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

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)  # fp32 master weights
    use_chunked_loss(model, z_loss=1e-5)
    trainer = Trainer(
        model,
        training,
        train_dataset=PackedTokens(data, "train"),
        eval_dataset=PackedTokens(data, "validation"),
        data_collator=default_data_collator,  # all rows are full: no padding
        processing_class=AutoTokenizer.from_pretrained(data / "tokenizer"),  # saved with the model
        optimizer_cls_and_kwargs=(
            muon_adamw_factory,
            # a random model has more to learn
            {"lr_muon": 2e-4, "lr_adamw": 5e-5} if arguments.model else {"lr_muon": 1e-2, "lr_adamw": 3e-3},
        ),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=arguments.resume or None)
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(arguments.output / "model")
    if trainer.is_world_process_zero():
        print(f"validation loss {before:.3f} -> {after:.3f} (perplexity {math.exp(after):.1f})")
        print(f"saved in {arguments.output / 'model'}")


if __name__ == "__main__":
    main()
