"""Build a small LR-AttnRes model, train it a little, save it, load it back through AutoModel, generate.

Runs on a CPU in about a minute: `python examples/quickstart.py [--steps 250] [--output outputs/quickstart]`.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lr_attnres import LRAttnResConfig, LRAttnResForCausalLM


# Abraham Lincoln, Gettysburg, 1863 (public domain). The model reads bytes, so that it needs no tokenizer.
TEXT = """Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in \
Liberty, and dedicated to the proposition that all men are created equal.

Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and so dedicated, \
can long endure. We are met on a great battle-field of that war. We have come to dedicate a portion of that field, as \
a final resting place for those who here gave their lives that that nation might live. It is altogether fitting and \
proper that we should do this.

But, in a larger sense, we can not dedicate -- we can not consecrate -- we can not hallow -- this ground. The brave \
men, living and dead, who struggled here, have consecrated it, far above our poor power to add or detract. The world \
will little note, nor long remember what we say here, but it can never forget what they did here. It is for us the \
living, rather, to be dedicated here to the unfinished work which they who fought here have thus far so nobly \
advanced. It is rather for us to be here dedicated to the great task remaining before us -- that from these honored \
dead we take increased devotion to that cause for which they gave the last full measure of devotion -- that we here \
highly resolve that these dead shall not have died in vain -- that this nation, under God, shall have a new birth of \
freedom -- and that government of the people, by the people, for the people, shall not perish from the earth."""


def train(model: LRAttnResForCausalLM, data: torch.Tensor, steps: int, batch: int = 16, length: int = 64) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    around = torch.cat([data, data[:length]])  # the text begins again after its end, so that no part of it is rare
    model.train()
    for step in range(1, steps + 1):
        starts = torch.randint(0, len(data), (batch,))
        input_ids = torch.stack([around[start : start + length] for start in starts])
        loss = model(input_ids, labels=input_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    model.eval()


def effective_sources(model: torch.nn.Module, data: torch.Tensor) -> list[float]:
    """exp(entropy) of the depth weights, per site: how many sources a read really uses."""
    with torch.no_grad():
        depth_weights = model(data[None, :256], output_depth_weights=True).depth_weights
    return [torch.special.entr(weights).sum(-1).exp().mean().item() for weights in depth_weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart"))
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = LRAttnResConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        residual_type="sliced",
        num_depth_blocks=4,
        depth_key_rank=16,
    )
    model = LRAttnResForCausalLM(config)
    queries = model.model.depth_queries.weight
    print(
        f"{model.num_parameters():,} parameters, of which {queries.numel():,} are depth queries {list(queries.shape)}"
    )

    data = torch.tensor(list(TEXT.encode()))
    before = effective_sources(model, data)
    train(model, data, arguments.steps)
    after = effective_sources(model, data)
    print("effective sources per site, before: " + " ".join(f"{x:.1f}" for x in before))
    print("effective sources per site, after:  " + " ".join(f"{x:.1f}" for x in after))

    model.save_pretrained(arguments.output)
    loaded = AutoModelForCausalLM.from_pretrained(arguments.output)
    print(f"saved to {arguments.output} and loaded back as {type(loaded).__name__}")

    prompt = "Four score and seven"
    tokens = loaded.generate(torch.tensor([list(prompt.encode())]), max_new_tokens=100, do_sample=False)
    print("generated: " + bytes(tokens[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
