"""Peak memory of the loss, forward and backward, from hidden states and head weight: chunked and plain.

This counts everything that is allocated beyond the inputs (hidden states, head weight, labels): logits, what the
backward keeps, temporaries, and the gradients of hidden states and weight. The plain path is `lm_head` and
Transformers' `ForCausalLMLoss`. Its logits stay alive until the end, as in a model's output, and it has no z-loss.
Each path runs in a process of its own; on a CPU the figure is the growth of its resident memory.
"""

import argparse
import multiprocessing
import os
from pathlib import Path

import torch
from harness import commit, machine, write_report
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from lr_attnres.training.losses import ChunkedLoss


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_bytes(path: str, tokens: int, vocabulary: int, hidden: int, device: str, dtype: str) -> tuple[int, float]:
    """-> peak beyond the inputs, and the loss."""
    torch.manual_seed(0)
    head = nn.Linear(hidden, vocabulary, bias=False, device=device, dtype=getattr(torch, dtype))
    states = torch.randn(1, tokens, hidden, device=device, dtype=getattr(torch, dtype), requires_grad=True)
    labels = torch.randint(0, vocabulary, (1, tokens), device=device)
    head(states[:, :1].detach())  # the library's own buffers are not the loss's
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = resident_bytes("VmRSS")
    else:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    if path == "plain":
        logits = head(states)
        loss = ForCausalLMLoss(logits, labels, vocabulary)
    else:
        loss = ChunkedLoss(z_loss=1e-5)(head, states, labels)
    loss.backward()
    assert head.weight.grad is not None and states.grad is not None
    peak = resident_bytes("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated()
    return peak - before, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=100_277)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder of the JSON report")
    settings = vars(parser.parse_args())
    output = settings.pop("output")
    peaks = {}
    for path in ("plain", "chunked"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peaks[path], loss = pool.apply(peak_bytes, (path, *settings.values()))
        print(f"{path:8s} {peaks[path] / 2**20:8.1f} MiB   loss {loss:.4f}", flush=True)
    ratio = peaks["chunked"] / peaks["plain"]
    print(f"ratio    {ratio:8.3f}        {settings}\n{machine()}")
    content = {"settings": settings, "machine": machine(), "commit": commit(), "bytes": peaks, "ratio": ratio}
    write_report("loss_memory", output, content)


if __name__ == "__main__":
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # bf16 on virtual machines without AMX
    main()
