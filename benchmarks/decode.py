"""Decoding one token with the KV cache at the paper's size, batch 1, eager and compiled."""

import torch
from common import PAPER_WIDTH, build, check_against_naive_read, interleave, parser, report
from transformers import StaticCache


def decode_steps(row: str, layers: int, tokens: int, compiled: bool):
    """`tokens` greedy steps behind a prompt of 16, on a static cache, as `generate` runs them when compiled."""
    model = build(row, vocab_size=8192, num_hidden_layers=layers, **PAPER_WIDTH).eval()
    forward = torch.compile(model, fullgraph=True) if compiled else model
    cache = StaticCache(config=model.config, max_cache_len=16 + tokens)
    prompt = torch.arange(16)[None]

    @torch.no_grad()
    def step():
        cache.reset()
        token = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        for position in range(16, 15 + tokens):
            position_ids = torch.tensor([[position]])
            outputs = forward(token, past_key_values=cache, use_cache=True, position_ids=position_ids)
            token = outputs.logits.argmax(-1)

    return step


def main() -> None:
    arguments = parser(__doc__, repeats=5)
    arguments.set_defaults(rows=["sliced N=8 r=64", "projected N=8 r=32", "sliced full r=64", "attnres full"])
    arguments.add_argument("--layers", type=int, default=24)
    arguments.add_argument("--tokens", type=int, default=8)
    arguments.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    args = arguments.parse_args()
    check_against_naive_read(args.rows)
    columns = {}
    for mode in args.modes:
        times = {"standard": 1.0}
        for row in args.rows:
            pair = {r: decode_steps(r, args.layers, args.tokens, mode == "compiled") for r in ("standard", row)}
            measured = interleave(pair, args.repeats)
            times[row] = measured[row] / measured["standard"]
            torch.compiler.reset()
        columns[mode] = times
    report("decode", {"layers": args.layers, "tokens": args.tokens}, columns, "of standard", args.output)


if __name__ == "__main__":
    main()
