"""Time and peak memory of upgrading a Llama of the shape of Llama-3.2-1B (random weights, bfloat16), as JSON.

    python benchmarks/upgrade_memory.py [--layers 16] [--residual-type projected] [--max-shard-size 2GB]

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
from transformers import LlamaConfig, LlamaForCausalLM
rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}
config = LlamaConfig(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=int(sys.argv[2]),
                     num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=131072,
                     rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters=rope, dtype="bfloat16")
torch.set_default_dtype(torch.bfloat16)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""
UPGRADE = """
import sys
from lr_attnres.upgrade import upgrade_model
upgrade_model(sys.argv[1], sys.argv[2], residual_type=sys.argv[3], max_shard_size=sys.argv[4])
"""
COMPARE = """
import sys
from lr_attnres.model_folder import compare_logits
from lr_attnres.pretrained_source import open_source
compare_logits(sys.argv[2], open_source(sys.argv[1]).probe_logits(), tolerance=1e-4, dtype="float32")
"""
IMPORT = "import torch, transformers, lr_attnres.upgrade"


def weights_gb(folder: Path) -> float:
    return round(sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--residual-type", default="sliced", choices=["sliced", "projected", "attnres", "standard"])
    parser.add_argument("--max-shard-size", default="2GB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        source, folder = Path(work) / "llama", Path(work) / "upgraded"
        measure(WRITE, str(source), str(options.layers))
        report = {
            **machine(),
            **vars(options),
            "source_gb": weights_gb(source),
            "imports_alone": measure(IMPORT),
            "upgrade": measure(UPGRADE, str(source), str(folder), options.residual_type, options.max_shard_size),
            "result_gb": weights_gb(folder),
            "compare_float32_logits": measure(COMPARE, str(source), str(folder)),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
