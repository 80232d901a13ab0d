"""`lr-attnres doctor`: what this machine has, whether the reads are right on it and, on a GPU, what they cost."""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available, is_torch_flex_attn_available

from ..errors import LRAttnResError
from .read_checks import TOLERANCE, Check


PACKAGES = ("lr-attnres", "torch", "triton", "transformers", "accelerate", "peft", "trl", "vllm")
# extra -> a module that it brings, and what it is for
EXTRAS = {
    "train": ("accelerate", "prepare, train, evaluate"),
    "hub": ("tiktoken", "the tokenizer cl100k_base"),
    "gguf": ("gguf", "upgrade of a GGUF file"),
    "serve": ("fastapi", "serve"),
    "analysis": ("matplotlib", "analyze, cost --figure"),
    "explore": ("gradio", "explore"),
    "peft": ("peft", "LoRA and other adapters"),
    "finetune": ("trl", "fine-tuning with PEFT and TRL"),
    "eval": ("lm_eval", "lm-evaluation-harness"),
    "backends": ("torchao", "quantised weights, ONNX, ExecuTorch, DeepSpeed"),
}
# oneDNN reads this variable. Some virtual machines advertise instructions for half precision that they do not have.
CRASH_ADVICE = "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before Python starts, or compute in float32"


def doctor(quick: bool = False, interpret: bool = False, output: str | os.PathLike | None = None) -> dict[str, Any]:
    """Print what is installed, compare the reads of every device with the naive read and, on a GPU, time a training
    step, prefill and decoding beside what the data sheet predicts. Raises if something disagrees.

    Args:
        quick: under a minute: no compiled reads, fewer and shorter timings.
        interpret: also run the Triton kernels on the CPU, under Triton's interpreter; one or two minutes.
        output: a JSON file with everything that was found.
    """
    report: dict[str, Any] = {"environment": environment()}
    print_environment(report["environment"])
    checks = plan_checks(devices(), quick, has_triton=importlib.util.find_spec("triton") is not None)
    results = run_checks(checks)
    if interpret:
        interpreted = [Check("cpu", "triton", dtype) for dtype in TOLERANCE]
        results += run_checks(interpreted, {"TRITON_INTERPRET": "1"})
    report["checks"] = results
    report["timings"] = {}
    if torch.cuda.is_available():
        from .gpu_timings import print_timings, time_device

        for device in devices()[1:]:
            with torch.cuda.device(device):
                report["timings"][device] = time_device(device, quick)
            print_timings(device, report["timings"][device])
    else:
        print("\nNo GPU: nothing is timed.")
    if output is not None:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"\nReport: {output}")
    problems = [result["problem"] for result in results if result["problem"]]
    if problems:
        raise LRAttnResError(f"{len(problems)} of {len(results)} checks failed: {problems[0]}.")
    print(f"\nAll {len(results)} checks agree.")
    return report


def devices() -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def environment() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform(), "packages": {}}
    for package in PACKAGES:
        try:
            found["packages"][package] = version(package)
        except PackageNotFoundError:
            found["packages"][package] = None
    found["cpu"] = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    found["gpus"] = [
        {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "gib": round(gpu.total_memory / 2**30, 1)}
        for gpu in gpus
    ]
    attention = {"flex_attention": is_torch_flex_attn_available(), "flash_attention_2": is_flash_attn_2_available()}
    found["attention"] = {"eager": True, "sdpa": True, **attention}
    found["extras"] = {name: importlib.util.find_spec(module) is not None for name, (module, _) in EXTRAS.items()}
    return found


def print_environment(found: dict[str, Any]) -> None:
    print(f"python {found['python']}, {found['system']}")
    print(", ".join(f"{name} {number or '-'}" for name, number in found["packages"].items()))
    print(f"cpu: {found['cpu']}")
    for gpu in found["gpus"]:
        print(f"gpu: {gpu['name']}, compute capability {gpu['capability']}, {gpu['gib']} GiB")
    print("attention: " + ", ".join(name for name, is_there in found["attention"].items() if is_there))
    print("extras: " + (", ".join(name for name, is_there in found["extras"].items() if is_there) or "none"))
    for name, is_there in found["extras"].items():
        if not is_there:
            print(f'missing: {EXTRAS[name][1]}: pip install "lr-attnres[{name}]"')
    if found["packages"]["triton"] is None:
        print("missing: --depth-backend triton, torch.compile on a GPU: pip install triton")


def plan_checks(devices: list[str], quick: bool, has_triton: bool) -> list[Check]:
    """Every device, dtype and backend that there is; products last, because they may kill their process."""
    reads, products = [], []
    for device in devices:
        kernels = ["triton"] if has_triton and device != "cpu" else []
        backends = ["torch", *kernels, *([] if quick else ["compiled"])]
        for dtype in TOLERANCE:
            reads += [Check(device, backend, dtype, size) for size in ("small", "paper") for backend in backends]
            products.append(Check(device, "product", dtype))
    return reads + products


def run_checks(checks: list[Check], variables: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run all checks in one other process, and in a new one those after a check that killed it. Prints each result."""
    print(f"\n{'device':8s}{'reads by':10s}{'dtype':10s}{'size':8s}{'largest error':>14s}{'seconds':>9s}")
    results: list[dict[str, Any]] = []
    while len(results) < len(checks):
        command = worker_command(checks[len(results) :])
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | (variables or {})
        ) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                results.append(judge(checks[len(results)], json.loads(line)))
        if len(results) < len(checks):
            results.append(judge(checks[len(results)], {"killed": worker.returncode}))
    return results


def worker_command(checks: list[Check]) -> list[str]:
    return [sys.executable, "-m", "lr_attnres.analysis.read_checks", json.dumps(checks)]


def judge(check: Check, result: dict[str, Any]) -> dict[str, Any]:
    """The fields of a check, its result, and its problem in one line; None if it agrees."""
    what = f"{check.dtype} {'products' if check.backend == 'product' else f'{check.backend} reads'} on {check.device}"
    errors, problem = result.get("errors", {}), None
    name, largest = max(errors.items(), key=lambda item: item[1], default=("", 0.0))
    if "killed" in result:
        problem = f"{what} kill the process (exit code {result['killed']})"
        problem += f"; {CRASH_ADVICE}" if check.device == "cpu" and check.dtype != "float32" else ""
    elif "failure" in result:
        problem = f"{what} fail: {result['failure']}"
    elif not largest <= TOLERANCE[check.dtype]:
        problem = f"{what}: the {name} are off by {largest:.1e} (limit {TOLERANCE[check.dtype]:.1e})"
    row = f"{check.device:8s}{check.backend:10s}{check.dtype:10s}{check.size:8s}"
    print(
        f"{row}{largest:14.1e}{result.get('seconds', 0.0):9.1f}{'' if problem is None else '  ' + problem}", flush=True
    )
    return {**check._asdict(), **result, "problem": problem}
