"""What the benchmarks share: the models that are compared, the check against the naive read, timing, and the report.

All rows of a benchmark run interleaved in one process, and what is reported is the ratio to `standard`. A step is cut
into parts where an operator or a compiled kernel ends. Each part counts with the smallest of its repeats, the step
with their sum: a shared machine is seldom undisturbed for seconds, but often for milliseconds. Matrix products and
attention of the same shapes, most of the time and the same work in every model, count alike in all of them (`settle`).
`standard` is built twice, as two models that are timed like any other. The smaller time counts, and the larger one as
a ratio to it says how far the noise of the machine reaches.
"""

import argparse
import ctypes
import itertools
import json
import os
import platform
import random
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch._inductor.config
import transformers
from torch.autograd import profiler
from transformers import Qwen3Config, Qwen3ForCausalLM

from lr_attnres import LRAttnResConfig, LRAttnResForCausalLM
from lr_attnres.depth_read import LRAttnResDepthRead
from lr_attnres.depth_routing import naive_depth_read
from lr_attnres.variants import variant_fields


PAPER_WIDTH = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
VARIANTS = [
    "standard",
    "sliced-n4-r64",
    "sliced-n8-r64",
    "sliced-full-r64",
    "projected-n4-r32",
    "projected-n8-r32",
    "projected-full-r32",
    "attnres-n8",
    "attnres-full",
]
ROWS = {name: variant_fields(name) for name in VARIANTS}
ROWS |= {f"{name}, naive read": ROWS[name] for name in ("sliced-full-r64", "attnres-full")}
ROWS["Qwen3ForCausalLM"] = None
CONTROL = "standard, again"
PRODUCTS, ATTENTION, OTHER = "products", "attention", "other"  # kinds of operators
COMPARED = [row for row in ROWS if "-n4-" not in row and row != "sliced-full-r64, naive read"]


class NaiveDepthRead(LRAttnResDepthRead):
    """The same site with one read over a stack of all its sources, differentiated by autograd."""

    def read(self, completed, source, mixes, dtype, norm):
        own = [] if source is None else [*source]
        logits = torch.cat([*(older[..., self.here] for older in completed[1::2]), *own[1:]], dim=-1)
        hidden = naive_depth_read([*completed[0::2], *own[:1]], logits).to(dtype)
        return hidden, norm and norm(hidden), ()


def read_naively(model: LRAttnResForCausalLM) -> LRAttnResForCausalLM:
    for module in model.modules():
        if isinstance(module, LRAttnResDepthRead):
            module.__class__ = NaiveDepthRead
    model.model.reads_from_bank = lambda embeddings: False
    return model


def build(row: str, **sizes) -> torch.nn.Module:
    torch.manual_seed(0)
    if ROWS[row] is None:
        heads = sizes["num_attention_heads"]
        config = Qwen3Config(**sizes, num_key_value_heads=heads, head_dim=sizes["hidden_size"] // heads)
        return Qwen3ForCausalLM(config)
    model = LRAttnResForCausalLM(LRAttnResConfig(**sizes, **ROWS[row]))
    if ROWS[row]["residual_type"] != "standard":
        torch.nn.init.normal_(model.model.depth_queries.weight, std=0.1)
    return read_naively(model) if "naive" in row else model


pool: dict[tuple, torch.nn.Parameter] = {}


def share_parameters(model: torch.nn.Module) -> torch.nn.Module:
    """All models use the same memory for weights of the same name and shape, so that where the weights lie cannot be
    what differs. A precaution: copies of one model differed with and without it."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, pool.setdefault((path, name, parameter.shape), parameter))
    return model


def check_against_naive_read(rows: list[str]) -> None:
    """Refuse to time a read that disagrees with the naive one, in float64: logits, gradients, and one token's logits
    without gradients, which are read from a `DepthBank`."""
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 4}
    for row in rows:
        if ROWS[row] is None or ROWS[row]["residual_type"] == "standard" or "naive" in row:
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


def keep_freed_memory() -> None:
    """Let the allocator of the C library keep what is freed: fetching it back page by page is slow and noisy."""
    trim_threshold, mmap_threshold, top_pad = -1, -3, -2  # M_* of malloc.h; the second has an upper limit of 32 MiB
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        for option, value in ((trim_threshold, 2**31 - 1), (mmap_threshold, 2**25), (top_pad, 2**28)):
            library.mallopt(option, value)


Parts = list[tuple[str, float]]  # what each part of a step is, and its seconds


def cut_at_operators(step: Callable[[], None]) -> Parts:
    """The parts of a step between the ends of its operators and compiled kernels, as the profiler saw them. What it
    takes itself, around a microsecond for each, is in them."""
    with profiler.profile(use_kineto=True, record_shapes=True) as profile, profiler.record_function("step"):
        step()
    events = profile.kineto_results.events()
    whole = next(event for event in events if event.name() == "step")
    own = [event for event in events if event.start_thread_id() == whole.start_thread_id()]
    spans = [(event.start_ns(), event.end_ns(), describe(event.name(), event.shapes())) for event in own]
    return cut(whole.start_ns(), [span for span in spans if whole.start_ns() <= span[0] < whole.end_ns()])


marks: list[tuple[int, str]] = []  # when a part ended, and what it was


def mark_linears(model: torch.nn.Module) -> torch.nn.Module:
    """For `cut_at_linears`. Not for compiled models, which it would cut up."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            name = f"{PRODUCTS} {module.in_features} {module.out_features}"
            module.register_forward_pre_hook(lambda *_: marks.append((time.perf_counter_ns(), OTHER)))
            module.register_forward_hook(lambda *_, name=name: marks.append((time.perf_counter_ns(), name)))
    return model


def cut_at_linears(step: Callable[[], None]) -> Parts:
    """The linear maps of a step and what lies between them: for steps of so many small operators that the profiler
    would slow them down."""
    marks.clear()
    now = time.perf_counter_ns()
    step()
    marks.append((time.perf_counter_ns(), OTHER))
    starts = [now, *(end for end, _ in marks)]
    return [(name, 1e-9 * (end - start)) for start, (end, name) in zip(starts, marks)]


def describe(operator: str, shapes: list) -> str:
    """Operators that all models have alike are told apart by kind and shapes; the rest are `OTHER`."""
    if operator in ("aten::mm", "aten::addmm", "aten::mv"):
        return f"{PRODUCTS} {shapes}"
    return f"{ATTENTION} {shapes}" if "scaled_dot_product" in operator else OTHER


def cut(now: int, spans: list[tuple[int, int, str]]) -> Parts:
    """Spans (start, end, what it is). A product or attention is one part, from its start to its end, whatever it
    calls; around them, what happens up to the end of each other operator is one."""
    inside = 0
    ends, parts = [], []
    for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        if name != OTHER and start >= inside:
            inside = end
            ends += [(start, OTHER), (end, name)]
        elif end > inside:
            ends.append((end, OTHER))
    for end, name in sorted(ends):
        parts.append((name, 1e-9 * (end - now)))
        now = end
    return parts


def training_step(model: torch.nn.Module, input_ids: torch.Tensor, compiled: bool = False) -> Callable[[], None]:
    """Forward, backward and AdamW."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model, fullgraph=True) if compiled else model

    def step() -> None:
        forward(input_ids, labels=input_ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def interleave(
    steps: dict[str, Callable[[], None]],
    repeats: int,
    time_parts: Callable[[Callable[[], None]], Parts] = cut_at_operators,
) -> dict[str, Parts]:
    """The parts of each step, each with the smallest of its times. One untimed round first; each round has another
    order, so that none always follows the same one."""
    keep_freed_memory()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would announce each of its uses
    best: dict[str, Parts] = {}
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": True}):  # compiled kernels are among the operators
        for step in steps.values():
            step()
        for repeat in range(repeats):
            for name in random.Random(repeat).sample(list(steps), len(steps)):
                parts = time_parts(steps[name])
                best[name] = smallest(best.get(name, parts), parts)
    return {name: best[name] for name in steps}


def smallest(one: Parts, other: Parts) -> Parts:
    """Two repeats of a step, which always runs the same operators."""
    if [name for name, _ in one] != [name for name, _ in other]:
        raise RuntimeError("a step ran other operators than before: its parts cannot be compared.")
    return [(name, min(seconds, again)) for (name, seconds), (_, again) in zip(one, other)]


def total(parts: Parts) -> float:
    return sum(seconds for _, seconds in parts)


def settle(times: dict[str, Parts]) -> dict[str, Parts]:
    """Products and attention of the same shapes are the same work in every model: each counts with the smallest time
    that it took in any of them. What is left of the noise is that of everything else."""
    shared: dict[str, float] = {}
    for name, seconds in itertools.chain.from_iterable(times.values()):
        if name != OTHER:
            shared[name] = min(seconds, shared.get(name, seconds))
    return {row: [(name, shared.get(name, seconds)) for name, seconds in parts] for row, parts in times.items()}


def compare(
    make_step: Callable[[str, bool], Callable[[], None]],
    rows: list[str],
    modes: dict[str, list[str]],
    repeats: int,
    eager_cut: Callable[[Callable[[], None]], Parts] = cut_at_operators,
) -> dict[str, dict[str, float]]:
    """mode -> row -> time as a ratio to that of `standard`; the same as timed, before `settle`; and, settled,
    products, attention and the rest as parts of the step of `standard`. `modes` says which rows a mode has."""
    columns: dict[str, dict[str, float]] = {}
    for mode, rows_of_mode in modes.items():
        chosen = ["standard", *(row for row in rows if row in rows_of_mode and row != "standard")]
        print(f"{mode}: {', '.join(chosen)}", file=sys.stderr, flush=True)
        steps = {row: make_step(row, mode == "compiled") for row in chosen}
        time_parts = eager_cut if mode == "eager" else cut_at_operators
        steps[CONTROL] = make_step("standard", mode == "compiled")
        times = interleave(steps, repeats, time_parts)
        settled, as_timed = faster_first(settle(times)), faster_first(times)
        columns[mode] = {row: total(parts) / total(settled["standard"]) for row, parts in settled.items()}
        columns[f"{mode}, as timed"] = {row: total(own) / total(as_timed["standard"]) for row, own in as_timed.items()}
        for kind in (PRODUCTS, ATTENTION, OTHER):
            own = {row: total([part for part in parts if part[0].startswith(kind)]) for row, parts in settled.items()}
            if any(own.values()):
                columns[f"{mode}, {kind}"] = {row: own[row] / total(settled["standard"]) for row in own}
        torch.compiler.reset()
    return columns


def faster_first(times: dict[str, Parts]) -> dict[str, Parts]:
    """Of the two copies of `standard` the faster one counts as it, the slower one is the control."""
    copies = sorted((times["standard"], times[CONTROL]), key=total)
    others = {row: parts for row, parts in times.items() if row not in ("standard", CONTROL)}
    return dict(zip(("standard", CONTROL), copies)) | others


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def parser(description: str, repeats: int | None, rows: Iterable[str] = tuple(ROWS)) -> argparse.ArgumentParser:
    """`repeats` is None where nothing is timed: no such option."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--rows", nargs="+", default=list(rows), choices=list(rows), metavar="ROW")
    if repeats is not None:
        result.add_argument("--repeats", type=at_least_one, default=repeats)
    result.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder of the JSON report")
    return result


def timing_parser(description: str, repeats: int, layers: int, tokens: int) -> argparse.ArgumentParser:
    result = parser(description, repeats)
    result.set_defaults(rows=COMPARED)
    result.add_argument("--layers", type=int, default=layers)
    result.add_argument("--tokens", type=int, default=tokens)
    result.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    result.add_argument(
        "--compiled-rows", nargs="+", choices=list(ROWS), metavar="ROW", help="compile these only; default: all rows"
    )
    return result


def time_rows(
    name: str,
    make_step: Callable[..., Callable[[], None]],
    args: argparse.Namespace,
    eager_cut: Callable[[Callable[[], None]], Parts] = cut_at_operators,
) -> None:
    """What the timing benchmarks have in common, once their arguments are known. A mode that is not timed keeps the
    columns that it has in the report of an earlier run."""
    rows = list(dict.fromkeys([*args.rows, *(args.compiled_rows or [])]))
    check_against_naive_read(rows)
    timed = {"eager": args.rows, "compiled": args.compiled_rows or args.rows}
    modes = {mode: timed[mode] for mode in args.modes}
    repeats, earlier = other_modes(name, args)
    columns = earlier | compare(
        lambda row, compiled: make_step(row, args.layers, args.tokens, compiled), rows, modes, args.repeats, eager_cut
    )
    settings = {"layers": args.layers, "tokens": args.tokens, "repeats": repeats | dict.fromkeys(modes, args.repeats)}
    report(name, settings, columns, "of standard", args.output, baseline=None)


def other_modes(name: str, args: argparse.Namespace) -> tuple[dict[str, int], dict[str, dict[str, float]]]:
    """Repeats and columns of the modes that are not timed now, from a report on this machine with the same sizes."""
    path = args.output / f"{name}.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    settings = content.get("settings", {})
    found = [content.get("benchmark"), content.get("machine"), settings.get("layers"), settings.get("tokens")]
    if found != [name, machine(), args.layers, args.tokens] or not isinstance(settings.get("repeats"), dict):
        return {}, {}
    repeats = {mode: number for mode, number in settings["repeats"].items() if mode not in args.modes}
    columns = {title: column for title, column in content["columns"].items() if title.split(",")[0] in repeats}
    if repeats:
        print(f"kept from {path}: {', '.join(repeats)}", file=sys.stderr, flush=True)
    return repeats, columns


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


def report(
    name: str,
    settings: dict,
    columns: dict[str, dict[str, float]],
    unit: str,
    output: Path,
    baseline: str | None = "standard",
) -> None:
    """columns: title -> row -> measurement. Prints each, with its ratio to `baseline`; writes all of it as JSON."""
    print(f"\n{name}, {unit}: {settings}\n{machine()}")
    widths = {title: max(14, len(title) + 2) for title in columns}
    ratio_title = "" if baseline is None else f"{'ratio':>8s}"
    print(f"{'':32s}" + "".join(f"{title:>{widths[title]}s}{ratio_title}" for title in columns))
    for row in dict.fromkeys(row for column in columns.values() for row in column):
        cells = (cell(column, row, baseline, widths[title]) for title, column in columns.items())
        print(f"{row:32s}" + "".join(cells), flush=True)
    output.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": name, "settings": settings, "machine": machine(), "unit": unit, "columns": columns}
    (output / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def cell(column: dict[str, float], row: str, baseline: str | None, width: int) -> str:
    if row not in column:
        return " " * (width if baseline is None else width + 8)
    ratio = "" if baseline is None else f"{column[row] / column[baseline]:8.3f}"
    return f"{column[row]:{width}.3f}{ratio}"
