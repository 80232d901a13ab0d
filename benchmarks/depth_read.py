"""The depth part alone: all writes and reads of a model, forward and backward, without its sub-layers.

Sub-layer outputs are given, every site's hidden states get a gradient. This shows how the cost of routing grows with
the number of layers, which whole training steps (scaling.py) bury under the matrix products.
"""

import itertools

import torch
from harness import PAPER_WIDTH, ROWS, build, check_against_naive_read, interleave, parser, report, total

from lr_attnres.depth_routing import DepthSite


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
            hidden, _, _, *state = read(hidden, output, *state)
            read_hidden.append(hidden)
        torch.autograd.backward(read_hidden, gradients)
        for tensor in (embeddings, *outputs):
            tensor.grad = None

    return step


def source_reads(sites: list[DepthSite]) -> int:
    """Values that the two phases read: once per group if older than it, else once per site."""
    older = sum(site.num_older for site in sites if site.opens_group)
    return older + sum(site.num_completed + 1 - site.num_older + (site.num_older == 1) for site in sites)


def main() -> None:
    arguments = parser(__doc__, repeats=5)
    arguments.set_defaults(rows=[row for row in ROWS if "-n4-" not in row and "Qwen3" not in row])
    arguments.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 32])
    arguments.add_argument("--tokens", type=int, default=256)
    args = arguments.parse_args()
    check_against_naive_read(args.rows)
    rows = ["standard", *(row for row in args.rows if row != "standard")]
    columns = {}
    for layers in args.layers:
        parts = interleave({row: depth_part(row, layers, args.tokens) for row in rows}, args.repeats)
        columns[f"L={layers}"] = {row: 1e3 * total(parts[row]) for row in rows}
    reads = {f"{sources}, {how}": [] for sources in ("N=8", "full") for how in ("two phases", "naive")}
    for layers, (sources, num_blocks) in itertools.product(args.layers, (("N=8", 8), ("full", None))):
        sites = DepthSite.schedule(2 * layers, num_blocks)
        reads[f"{sources}, two phases"].append(source_reads(sites))
        reads[f"{sources}, naive"].append(sum(site.num_completed + 1 for site in sites))
    settings = {"tokens": args.tokens, "repeats": args.repeats, "pass": "forward and backward"}
    settings |= {"layers": args.layers, "source_reads": reads}
    report("depth_read", settings, columns, "ms", args.output)


if __name__ == "__main__":
    main()
