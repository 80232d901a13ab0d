"""A whole training step of Transformers' Llama and Qwen3, and of the same weights as `standard` and as routed models.

`standard` is to take at most 1.03 of the time of the class that it came from. Both are built twice: what two copies of
one model differ by is noise. The logits are compared before the clock starts.
"""

import copy

import torch
from harness import PAPER_WIDTH, interleave, parser, pool, report, settle, share_parameters, total, training_step
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lr_attnres.upgrade import load_upgraded
from lr_attnres.variants import variant_fields


SOURCES = {"Llama": (LlamaConfig, LlamaForCausalLM), "Qwen3": (Qwen3Config, Qwen3ForCausalLM)}
UPGRADES = ("standard", "sliced-n8-r64", "projected-n8-r32")


def steps_of(name: str, rows: list[str], layers: int, tokens: int, compiled: bool) -> dict:
    torch.manual_seed(0)
    config_class, model_class = SOURCES[name]
    sizes = PAPER_WIDTH | {"vocab_size": 8192, "num_hidden_layers": layers, "num_key_value_heads": 4, "head_dim": 64}
    source, input_ids = model_class(config_class(**sizes)), torch.randint(0, 8192, (1, tokens))
    models = {"Transformers": source} | {row: load_upgraded(source, **variant_fields(row)) for row in rows}
    models |= {
        "Transformers, again": copy.deepcopy(source),
        "standard, again": load_upgraded(source, **variant_fields("standard")),
    }
    with torch.no_grad():
        expected = source(input_ids).logits
        for row in models:
            torch.testing.assert_close(models[row](input_ids).logits, expected, atol=1e-4, rtol=0)
    pool.clear()  # the other source has weights of the same names
    return {row: training_step(share_parameters(model), input_ids, compiled) for row, model in models.items()}


def main() -> None:
    arguments = parser(__doc__, repeats=9, rows=UPGRADES)
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=512)
    arguments.add_argument("--sources", nargs="+", choices=list(SOURCES), default=list(SOURCES))
    arguments.add_argument("--compiled", action="store_true")
    args = arguments.parse_args()
    columns = {}
    for name in args.sources:
        steps = steps_of(name, args.rows, args.layers, args.tokens, args.compiled)
        times = interleave(steps, args.repeats)
        columns[name] = {row: total(parts) for row, parts in settle(times).items()}
        columns[f"{name}, as timed"] = {row: total(parts) for row, parts in times.items()}
        torch.compiler.reset()
    settings = {"layers": args.layers, "tokens": args.tokens, "repeats": args.repeats, "compiled": args.compiled}
    report("upgrade_speed", settings, columns, "s", args.output, baseline="Transformers")


if __name__ == "__main__":
    main()
