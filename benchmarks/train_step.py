"""A whole training step (forward, backward, AdamW) of every variant, eager and compiled."""

import torch
from harness import PAPER_WIDTH, build, time_rows, timing_parser


def training_step(row: str, layers: int, tokens: int, compiled: bool):
    model = build(row, vocab_size=8192, num_hidden_layers=layers, **PAPER_WIDTH).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model, fullgraph=True) if compiled else model
    input_ids = torch.randint(0, 8192, (1, tokens))

    def step():
        forward(input_ids, labels=input_ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    time_rows("train_step", training_step, timing_parser(__doc__, repeats=5, layers=8, tokens=512).parse_args())
