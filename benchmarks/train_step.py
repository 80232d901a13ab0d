"""A whole training step (forward, backward, AdamW) of every variant, eager and compiled."""

import torch
from harness import PAPER_WIDTH, build, share_parameters, training_step
from side_by_side import time_rows, timing_parser


def train_step(row: str, compiled: bool, layers: int, tokens: int, batch: int):
    model = share_parameters(build(row, vocab_size=8192, num_hidden_layers=layers, **PAPER_WIDTH))
    return training_step(model, torch.randint(0, 8192, (batch, tokens)), compiled)


if __name__ == "__main__":
    arguments = timing_parser(__doc__, repeats=40, layers=8, tokens=512)
    time_rows("train_step", train_step, arguments.parse_args())
