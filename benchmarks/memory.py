"""Bytes that autograd keeps for the backward of one training step, without the parameters."""

import torch
from harness import PAPER_WIDTH, build, check_against_naive_read, parser, report


def saved_bytes(row: str, layers: int, tokens: int) -> float:
    model = build(row, vocab_size=8192, num_hidden_layers=layers, **PAPER_WIDTH).train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    input_ids, saved = torch.randint(0, 8192, (1, tokens)), {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids, labels=input_ids, use_cache=False).loss
    assert loss.requires_grad  # the graph, and so every saved storage, is alive until here
    return sum(saved.values()) / 2**20


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=512)
    args = arguments.parse_args()
    check_against_naive_read(args.rows)
    rows = list(dict.fromkeys(["standard", *args.rows]))
    column = {row: saved_bytes(row, args.layers, args.tokens) for row in rows}
    report("memory", {"layers": args.layers, "tokens": args.tokens}, {"saved": column}, "MiB", args.output)


if __name__ == "__main__":
    main()
