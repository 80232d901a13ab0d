"""Prefill of a prompt without gradients at the paper's width and depth, eager and compiled."""

import torch
from harness import PAPER_WIDTH, build, share_parameters
from side_by_side import time_rows, timing_parser


def prefill(row: str, compiled: bool, layers: int, tokens: int, batch: int):
    model = share_parameters(build(row, vocab_size=8192, num_hidden_layers=layers, **PAPER_WIDTH)).eval()
    forward = torch.compile(model, fullgraph=True) if compiled else model
    input_ids = torch.randint(0, 8192, (batch, tokens))

    @torch.no_grad()
    def step():
        forward(input_ids, use_cache=True, logits_to_keep=1)

    return step


if __name__ == "__main__":
    arguments = timing_parser(__doc__, repeats=40, layers=24, tokens=512)
    time_rows("prefill", prefill, arguments.parse_args())
