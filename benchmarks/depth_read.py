"""The depth part alone: all writes and reads of a model, forward and backward, without its sub-layers.

The outputs of the sub-layers are given, and every site's hidden states get a gradient. This shows how the cost of
routing grows with the number of layers, which whole training steps bury under the matrix products.
"""

from functools import partial

import torch
from harness import (
    PAPER_WIDTH,
    QWEN,
    ROWS,
    at_least_one,
    build,
    check_against_naive_read,
    interleave,
    keep_freed_memory,
    parser,
    report,
    seconds,
)


def depth_part(row: str, layers: int, tokens: int):
    sizes = PAPER_WIDTH | {"intermediate_size": 8, "head_dim": 8}
    model = build(row, vocab_size=8, num_hidden_layers=layers, **sizes).model
    width = model.layers[0].mlp.down_proj.out_features
    embeddings = torch.randn(1, tokens, sizes["hidden_size"], requires_grad=True)
    outputs = [torch.randn(1, tokens, width, requires_grad=True) for _ in range(2 * layers)]
    gradients = [torch.randn(1, tokens, sizes["hidden_size"]) for _ in range(2 * layers)]
    reads = [read for layer in model.layers for read in (layer.attn_read, layer.mlp_read)]

    def step():
        hidden, state, read_hidden = embeddings, model.start_depth_state(embeddings), []
        for read, output in zip(reads, outputs):
            hidden, _, state = read(hidden, output, state)
            read_hidden.append(hidden)
        torch.autograd.backward(read_hidden, gradients)
        for tensor in (embeddings, *outputs):
            tensor.grad = None

    return step


def main() -> None:
    arguments = parser(__doc__)
    arguments.set_defaults(rows=[row for row in ROWS if row != QWEN])
    arguments.add_argument("--repeats", type=at_least_one, default=12)
    arguments.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 32])
    arguments.add_argument("--tokens", type=int, default=256)
    args = arguments.parse_args()
    check_against_naive_read(args.rows)
    keep_freed_memory()
    rows = list(dict.fromkeys(["standard", *args.rows]))
    columns = {}
    for layers in args.layers:
        timers = {row: partial(seconds, depth_part(row, layers, args.tokens)) for row in rows}
        columns[f"L={layers}"] = {row: 1e3 * time for row, time in interleave(timers, args.repeats).items()}
    settings = {"tokens": args.tokens, "repeats": args.repeats}
    report("depth_read", settings, columns, "ms", args.output)


if __name__ == "__main__":
    main()
