"""A whole training step (forward, backward, AdamW) of every variant, eager and compiled."""

import torch
from common import PAPER_WIDTH, build, check_against_naive_read, interleave, parser, report


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


def main() -> None:
    arguments = parser(__doc__, repeats=5)
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=512)
    arguments.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    args = arguments.parse_args()
    check_against_naive_read(args.rows)
    rows = ["standard", *(row for row in args.rows if row != "standard")]
    columns = {}
    for mode in args.modes:
        # Few models at a time keep memory small; each batch of them has its own `standard`.
        times = {"standard": 1.0}
        for start in range(1, len(rows), 4):
            batch = ["standard", *rows[start : start + 4]]
            steps = {row: training_step(row, args.layers, args.tokens, mode == "compiled") for row in batch}
            measured = interleave(steps, args.repeats)
            times |= {row: measured[row] / measured["standard"] for row in batch}
            torch.compiler.reset()
        columns[mode] = times
    report("train_step", {"layers": args.layers, "tokens": args.tokens}, columns, "of standard", args.output)


if __name__ == "__main__":
    main()
