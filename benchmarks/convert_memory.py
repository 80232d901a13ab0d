"""Time and peak memory of converting and loading a checkpoint of the paper's shape (random weights), as JSON.

    python benchmarks/convert_memory.py [--layers 24] [--dtype bfloat16]

Each step runs in a process of its own; its peak is the kernel's count of resident memory, mapped file pages included.
"""

import argparse
import json
import tempfile
from pathlib import Path

from harness import machine
from processes import measure


WRITE = """
import sys, torch
path, layers = sys.argv[1], int(sys.argv[2])
D, M, V, N, R = 1024, 2816, 100277, 8, 32
def weight(*shape):
    return torch.empty(shape).normal_(std=0.02)
model = {"transformer.wte.weight": weight(V, D), "lm_head.weight": weight(V, D)}
for i in range(layers):
    name = f"transformer.layers.{i}."
    model[name + "attn.c_attn.weight"] = weight(3 * D, D)
    model[name + "attn.c_proj.proj.weight"] = weight(D + R, D)
    model[name + "mlp.fc1.weight"] = weight(2 * M, D)
    model[name + "mlp.fc2.proj.weight"] = weight(D + R, M)
for j in range(2 * layers):
    model[f"transformer.lrid_queries.{j}"] = weight(1, R)
model["transformer.lrid_embedding_key.proj.weight"] = weight(R, D)
args = dict(n_layer=layers, n_head=16, n_embd=D, mlp_hidden_dim=M, vocab_size=V, block_size=2048, rope_theta=500000.0,
            use_attnres=True, attnres_type="block", attnres_num_blocks=N, use_lrid=True, lrid_rank=R)
torch.save({"model": model, "model_args": args, "step": 1, "tokens_processed": 1}, path)
"""
CONVERT = """
import sys, torch
from lr_attnres.conversion import convert_released_checkpoint
convert_released_checkpoint(sys.argv[1], sys.argv[2], dtype=getattr(torch, sys.argv[3]) if sys.argv[3] else None)
"""
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
import lr_attnres
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    assert model(torch.arange(8)[None]).logits.isfinite().all()
"""
IMPORT = "import torch, transformers, lr_attnres.conversion"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dtype", default="", choices=["", "float32", "bfloat16", "float16"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        source, folder = Path(work) / "final_model.pt", Path(work) / "model"
        measure(WRITE, str(source), str(options.layers))
        report = {
            **machine(),
            "layers": options.layers,
            "dtype": options.dtype or "as in the file",
            "file_gb": round(source.stat().st_size / 1e9, 2),
            "imports_alone": measure(IMPORT),
            "convert": measure(CONVERT, str(source), str(folder), options.dtype),
            "weights_gb": round(sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9, 2),
            "load_and_forward": measure(LOAD, str(folder)),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
