"""Prefill of a prompt without gradients at the paper's size, batch 1."""

import torch
from common import PAPER_WIDTH, build, check_against_naive_read, interleave, parser, report


def prefill(row: str, layers: int, tokens: int):
    model = build(row, vocab_size=8192, num_hidden_layers=layers, **PAPER_WIDTH).eval()
    input_ids = torch.randint(0, 8192, (1, tokens))

    @torch.no_grad()
    def step():
        model(input_ids, use_cache=True, logits_to_keep=1)

    return step


def main() -> None:
    arguments = parser(__doc__, repeats=5)
    arguments.set_defaults(rows=["sliced N=8 r=64", "projected N=8 r=32", "sliced full r=64", "attnres full"])
    arguments.add_argument("--layers", type=int, default=24)
    arguments.add_argument("--tokens", type=int, default=512)
    args = arguments.parse_args()
    check_against_naive_read(args.rows)
    rows = ["standard", *(row for row in args.rows if row != "standard")]
    times = interleave({row: prefill(row, args.layers, args.tokens) for row in rows}, args.repeats)
    report("prefill", {"layers": args.layers, "tokens": args.tokens}, {"eager": times}, "s", args.output)


if __name__ == "__main__":
    main()
