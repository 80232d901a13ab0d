"""Times of `lr-attnres doctor` on a GPU: a training step, prefill and decoding, beside what a data sheet predicts.

The model, the rows and the cache have the sizes that the prediction is for.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from transformers import PreTrainedModel, StaticCache
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from ..configuration_lr_attnres import LRAttnResConfig
from ..modeling_lr_attnres import LRAttnResForCausalLM
from ..variants import variant_fields
from .roofline import CONTEXT, find_gpu, predicted_ratio


QWEN = "Qwen3ForCausalLM"
ROWS = ("standard", "sliced-n8-r64", "projected-n8-r32", "sliced-full-r64", QWEN)
PAPER = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
PAPER |= {"vocab_size": 100_277, "max_position_embeddings": CONTEXT}
FORWARD_MODES = ("eager", "compiled")
MODES = {"training": FORWARD_MODES, "prefill": FORWARD_MODES, "decoding": (*FORWARD_MODES, "graph")}


def time_device(device: str, quick: bool, tokens: int = CONTEXT, **sizes: int) -> list[dict[str, Any]]:
    """One entry per model, backend, phase and mode, with seconds, launches and the ratio to `standard`; or with the
    failure. `quick` leaves out what is compiled."""
    entries, gpu = [], find_gpu(torch.cuda.get_device_name(device) if device.startswith("cuda") else "")
    for row in ROWS:
        model = build(row, sizes).to(device, torch.bfloat16 if device.startswith("cuda") else torch.float32)
        backends = ["torch"] if row in ("standard", QWEN) or not device.startswith("cuda") else ["torch", "triton"]
        for backend in backends:
            if backend != "torch":
                model.set_depth_backend(backend)
            for phase, modes in MODES.items():
                for mode in modes[:1] if quick else modes:
                    entry = {"model": row, "backend": backend, "phase": phase, "mode": mode, "gpu": gpu}
                    entries.append(entry | measure(model, phase, mode, tokens, repeats=5 if quick else 20))
        del model
    add_ratios(entries)
    return entries


def build(row: str, sizes: dict[str, int]) -> Any:
    torch.manual_seed(0)
    fields: dict[str, Any] = PAPER | sizes
    if row == QWEN:
        heads = {"num_key_value_heads": fields["num_attention_heads"]}
        heads["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
        return Qwen3ForCausalLM(Qwen3Config(**fields, **heads))
    return LRAttnResForCausalLM(LRAttnResConfig(**fields, **variant_fields(row)))


def measure(model: PreTrainedModel, phase: str, mode: str, tokens: int, repeats: int) -> dict[str, Any]:
    """The smallest time of a step, and the kernels that it launches."""
    torch._dynamo.reset()
    try:
        step = STEPS[phase](model, mode, tokens)
        for _ in range(3):
            step()
        return {"seconds": min(seconds(step) for _ in range(repeats)), "launches": count_launches(step)}
    except Exception as error:  # another row, mode or backend may still work
        return {"failure": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300]}


def training_step(model: PreTrainedModel, mode: str, tokens: int) -> Callable[[], None]:
    """Forward and backward; the optimizer is the same for every model."""
    forward = torch.compile(model.train()) if mode == "compiled" else model.train()
    input_ids = torch.randint(0, 100, (1, tokens), device=model.device)

    def step() -> None:
        forward(input_ids, labels=input_ids, use_cache=False).loss.backward()
        model.zero_grad()

    return step


def prefill_step(model: PreTrainedModel, mode: str, tokens: int) -> Callable[[], None]:
    forward = torch.compile(model.eval()) if mode == "compiled" else model.eval()
    input_ids = torch.randint(0, 100, (1, tokens), device=model.device)
    return torch.no_grad()(lambda: forward(input_ids, use_cache=False, logits_to_keep=1))


def decoding_step(model: PreTrainedModel, mode: str, tokens: int) -> Callable[[], None]:
    """One token on a static cache; `graph` records the eager step in a CUDA graph and plays it."""
    forward = torch.compile(model.eval()) if mode == "compiled" else model.eval()
    cache = StaticCache(config=model.config, max_cache_len=tokens)
    token, position = (torch.full((1, 1), number, device=model.device) for number in (1, 0))

    @torch.no_grad()
    def step() -> None:
        forward(token, past_key_values=cache, use_cache=True, position_ids=position)

    if mode != "graph":
        return lambda: (cache.reset(), step())[1]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # warm up where a recording cannot: caches are made, kernels compiled
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


STEPS = {"training": training_step, "prefill": prefill_step, "decoding": decoding_step}


def seconds(step: Callable[[], None]) -> float:
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def count_launches(step: Callable[[], None]) -> int:
    """Kernels and copies that the GPU ran."""
    with torch.profiler.profile() as profile:
        step()
        synchronize()
    return sum(event.count for event in profile.key_averages() if event.device_type == DeviceType.CUDA)


def add_ratios(entries: list[dict[str, Any]]) -> None:
    standard = {(e["phase"], e["mode"]): e["seconds"] for e in entries if e["model"] == "standard" and "seconds" in e}
    for entry in entries:
        base = standard.get((entry["phase"], entry["mode"]))
        if base is not None and "seconds" in entry:
            entry["ratio"] = entry["seconds"] / base
        # Eager reads with torch in training and prefill are chains of operators, which nothing here predicts.
        is_fused = entry["backend"] == "triton" or entry["mode"] == "compiled"
        is_predicted = entry["mode"] == "graph" if entry["phase"] == "decoding" else is_fused
        if entry["gpu"] is not None and entry["model"] != QWEN and is_predicted:
            entry["predicted_ratio"] = predicted_ratio(entry["model"], entry["phase"], entry["gpu"], entry["backend"])


def print_timings(device: str, entries: list[dict[str, Any]]) -> None:
    print(f"\n{device}: bfloat16, ratios to `standard`; predicted: docs/gpu.md")
    print(f"{'model':20s}{'reads by':10s}{'phase':10s}{'mode':10s}", end="")
    print(f"{'ms':>9s}{'launches':>10s}{'ratio':>8s}{'predicted':>11s}")
    for entry in entries:
        name = f"{entry['model']:20s}{entry['backend']:10s}{entry['phase']:10s}{entry['mode']:10s}"
        if "failure" in entry:
            print(f"{name} failed: {entry['failure']}")
            continue
        ratio, predicted = (f"{entry[key]:.3f}" if key in entry else "-" for key in ("ratio", "predicted_ratio"))
        print(f"{name}{entry['seconds'] * 1e3:9.2f}{entry['launches']:10d}{ratio:>8s}{predicted:>11s}")
