"""What the benchmarks share: the models, the check against the naive read, timing side by side, and the reports.

All rows run interleaved, in another order each round, and a row counts with the smallest of its repeats. Reported is
the ratio to `standard` as timed. A second copy of `standard` is timed like any other row: its ratio shows the noise.
"""

import argparse
import ctypes
import json
import platform
import random
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from lr_attnres import LRAttnResConfig, LRAttnResForCausalLM


ROOT = Path(__file__).resolve().parents[1]
PAPER_WIDTH = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
VARIANTS = {
    "standard": {"residual_type": "standard"},
    "sliced-n8-r64": {"residual_type": "sliced", "num_depth_blocks": 8, "depth_key_rank": 64},
    "sliced-full-r64": {"residual_type": "sliced", "num_depth_blocks": None, "depth_key_rank": 64},
    "projected-n8-r32": {"residual_type": "projected", "num_depth_blocks": 8, "depth_key_rank": 32},
    "projected-full-r32": {"residual_type": "projected", "num_depth_blocks": None, "depth_key_rank": 32},
    "attnres-n8": {"residual_type": "attnres", "num_depth_blocks": 8},
    "attnres-full": {"residual_type": "attnres", "num_depth_blocks": None},
}
COPY, NAIVE, QWEN = "standard (copy)", "attnres-full, naive read", "Qwen3ForCausalLM"
ROWS = [*VARIANTS, NAIVE, QWEN]


def fields_of(variant: str) -> dict[str, object]:
    if variant in VARIANTS:  # also for an older checkout, which may not know its name
        return VARIANTS[variant]
    from lr_attnres.variants import variant_fields

    return variant_fields(variant)


def build(row: str, **sizes) -> torch.nn.Module:
    torch.manual_seed(0)
    if row == QWEN:
        heads = sizes["num_attention_heads"]
        config = Qwen3Config(**sizes, num_key_value_heads=heads, head_dim=sizes["hidden_size"] // heads)
        return Qwen3ForCausalLM(config)
    fields = fields_of("standard" if row == COPY else row.removesuffix(", naive read"))
    model = LRAttnResForCausalLM(LRAttnResConfig(**sizes, **fields))
    if fields["residual_type"] != "standard":
        torch.nn.init.normal_(model.model.depth_queries.weight, std=0.1)
    return read_naively(model) if row == NAIVE else model


shared_parameters: dict[tuple, torch.nn.Parameter] = {}
shared_moments: dict[torch.nn.Parameter, dict] = defaultdict(dict)  # AdamW's state


def share_parameters(model: torch.nn.Module) -> torch.nn.Module:
    """Models use the same memory for weights of the same name and shape: it is less, and its place cannot be what
    differs between two rows."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, shared_parameters.setdefault((path, name, parameter.shape), parameter))
    return model


# The naive read


def read_naively(model: LRAttnResForCausalLM) -> LRAttnResForCausalLM:
    """Each site reads a stack of all its sources, differentiated by autograd."""
    from lr_attnres.modeling_lr_attnres import LRAttnResDepthRead

    for module in model.modules():
        if isinstance(module, LRAttnResDepthRead):
            module.forward = NaiveRead(module)
    model.model.reads_from_bank = lambda embeddings: False
    return model


class NaiveRead:
    def __init__(self, module: torch.nn.Module):
        self.site, self.write = module.site, module.write

    def __call__(self, hidden_states, output, depth_state, output_depth_weights=False):
        from lr_attnres.depth_routing import naive_mix
        from lr_attnres.depth_state import site_columns

        site = self.site
        state, partial_source, _ = self.write(output, depth_state, False)
        columns = [site_columns(logits, site.sites_in_model) for logits in state.logits]
        sources = [*zip(state.values, columns), *([partial_source] if partial_source else [])]
        values, logits = zip(*sources)
        hidden = naive_mix(list(values), torch.cat(logits, dim=-1)).flatten(2)  # depth heads are one more axis
        return hidden.to(hidden_states.dtype), None, state


def check_against_naive_read(rows: list[str]) -> None:
    """Refuse to time a read that disagrees with the naive one, in float64: logits, gradients, and one token's logits
    without gradients, which are read from a `DepthBank`."""
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 4}
    for row in rows:
        if row in ("standard", COPY, NAIVE, QWEN):
            continue
        results = []
        for change in (lambda model: model, read_naively):
            model = change(build(row, num_hidden_layers=5, **sizes)).double()
            input_ids = torch.arange(2 * 17).view(2, 17)
            logits = model(input_ids).logits
            logits.square().mean().backward()
            with torch.no_grad():
                token_logits = model(input_ids[:, :1]).logits
            results.append([logits.detach(), token_logits, *(parameter.grad for parameter in model.parameters())])
        for ours, naive in zip(*results):
            torch.testing.assert_close(ours, naive, rtol=1e-7, atol=1e-9, msg=lambda m, r=row: f"{r}: {m}")


# Timing


def training_step(model: torch.nn.Module, input_ids: torch.Tensor, compiled: bool = False) -> Callable[[], None]:
    """Forward, backward and AdamW."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)
    optimizer.state = shared_moments
    forward = torch.compile(model, fullgraph=True) if compiled else model

    def step() -> None:
        forward(input_ids, labels=input_ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def interleave(timers: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """The smallest time of each row. One round first that does not count; each round has another order, so that no
    row always follows the same one."""
    times: dict[str, list[float]] = {row: [] for row in timers}
    for repeat in range(repeats + 1):
        for row in random.Random(repeat).sample(list(timers), len(timers)):
            times[row].append(timers[row]())
        if repeat == 0:
            print("warm: timing starts", file=sys.stderr, flush=True)
    return {row: min(times[row][1:]) for row in timers}


def keep_freed_memory() -> None:
    """Let the allocator of the C library keep what is freed: fetching it back page by page is slow and noisy."""
    trim_threshold, mmap_threshold, top_pad = -1, -3, -2  # M_* of malloc.h; the second has an upper limit of 32 MiB
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        for option, value in ((trim_threshold, 2**31 - 1), (mmap_threshold, 2**25), (top_pad, 2**28)):
            library.mallopt(option, value)


# Arguments and reports


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def known_row(text: str) -> str:
    """One of `ROWS`, or the name of another variant."""
    if text not in ROWS:
        try:
            fields_of(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error} Or one of {', '.join(ROWS)}.") from error
    return text


def parser(description: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--rows", nargs="+", default=ROWS, type=known_row, metavar="ROW")
    result.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder of the JSON report")
    return result


def processor() -> str:
    """The model of the CPU, where the system tells it, and its widest vectors as torch sees them."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def machine() -> dict[str, object]:
    return {
        "device": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def commit(checkout: Path = ROOT) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() or "unknown"


def write_report(name: str, output: Path, content: dict) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.json").write_text(json.dumps({"benchmark": name, **content}, indent=2) + "\n")


def report(name: str, settings: dict, columns: dict[str, dict[str, float]], unit: str, output: Path) -> None:
    """columns: title -> row -> measurement. Prints each beside its ratio to `standard`; writes all of it as JSON."""
    print(f"\n{name}, {unit}: {settings}\n{machine()}")
    print(f"{'':28s}" + "".join(f"{title:>12s}{'ratio':>8s}" for title in columns))
    for row in dict.fromkeys(row for column in columns.values() for row in column):
        cells = (f"{column[row]:12.3f}{column[row] / column['standard']:8.3f}" for column in columns.values())
        print(f"{row:28s}" + "".join(cells), flush=True)
    content = {"settings": settings, "machine": machine(), "commit": commit(), "unit": unit, "columns": columns}
    write_report(name, output, content)
