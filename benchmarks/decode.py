"""Decoding token by token with the KV cache at the paper's width and depth, eager and compiled."""

import torch
from harness import PAPER_WIDTH, build, share_parameters
from side_by_side import time_rows, timing_parser
from transformers import StaticCache


@torch.no_grad()
def decode_steps(row: str, compiled: bool, layers: int, tokens: int, batch: int):
    """`tokens` greedy steps from the first position on, on a static cache, as `generate` runs them when compiled."""
    model = share_parameters(build(row, vocab_size=8192, num_hidden_layers=layers, **PAPER_WIDTH)).eval()
    forward = torch.compile(model, fullgraph=True) if compiled else model
    cache = StaticCache(config=model.config, max_cache_len=max(64, tokens))
    first = torch.arange(1, batch + 1)[:, None]
    model(first, past_key_values=cache, use_cache=True)  # allocates the cache's tensors

    @torch.no_grad()
    def step():
        cache.reset()
        token = first
        for position in range(tokens):
            position_ids = torch.tensor([[position]])
            outputs = forward(token, past_key_values=cache, use_cache=True, position_ids=position_ids)
            token = outputs.logits.argmax(-1)

    return step


if __name__ == "__main__":
    arguments = timing_parser(__doc__, repeats=40, layers=24, tokens=4)
    time_rows("decode", decode_steps, arguments.parse_args())
