"""Supervised fine-tuning on conversations with TRL's SFTTrainer. Only the last answer of each one is trained.

On a CPU in about a minute:   python examples/finetune_sft.py
On your model, chats and GPUs: accelerate launch examples/finetune_sft.py --model owner/name --chats chats.jsonl

A line of the chat file is {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}.
TRL computes the loss in chunks of tokens, so the logits of the whole batch never exist.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from lr_attnres import muon_adamw_factory


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub repository (default: a tiny random model)")
    parser.add_argument("--chats", default=str(Path(__file__).with_name("chats.jsonl")), help="JSONL file")
    parser.add_argument("--epochs", type=float, default=60, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=4, help="conversations per device (default: %(default)s)")
    parser.add_argument(
        "--max-length", type=int, default=256, help="truncate to this many tokens (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/finetune_sft"))
    return parser.parse_args()


def split_last_answer(example: dict) -> dict:
    return {"prompt": example["messages"][:-1], "completion": example["messages"][-1:]}


def answer(model: torch.nn.Module, tokenizer, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    tokens = model.eval().generate(
        **inputs, max_new_tokens=80, do_sample=False, stop_strings=["\n"], tokenizer=tokenizer
    )
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def main() -> None:
    arguments = parse_arguments()
    base = arguments.model or arguments.output / "base"
    training = SFTConfig(
        arguments.output / "checkpoints",
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch_size,
        max_length=arguments.max_length,
        completion_only_loss=True,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=torch.cuda.is_available(),
        logging_steps=20,
        save_strategy="no",
        report_to="none",
    )
    with training.main_process_first():
        if arguments.model is None and not base.exists():
            save_tiny_model(base)
    chats = load_dataset("json", data_files=arguments.chats, split="train")
    chats = chats.map(split_last_answer, remove_columns=chats.column_names)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    trainer = SFTTrainer(
        model,
        training,
        train_dataset=chats,
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=(
            muon_adamw_factory,
            # a random model has more to learn
            {"lr_muon": 2e-4, "lr_adamw": 5e-5} if arguments.model else {"lr_muon": 1e-2, "lr_adamw": 5e-3},
        ),
    )
    trainer.train()
    trainer.save_model(arguments.output / "model")
    if trainer.is_world_process_zero():
        question = chats[0]["prompt"][-1]["content"]
        print(f"user: {question}\nassistant: {answer(trainer.model, tokenizer, question)}")
        print(f"saved in {arguments.output / 'model'}")


if __name__ == "__main__":
    main()
