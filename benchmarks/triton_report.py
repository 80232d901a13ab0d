"""What is known of the Triton kernels without a GPU: registers, spills, shared memory and bytes moved per token.

    python benchmarks/triton_report.py

Every kernel is compiled to a cubin for sm_80 (A100), sm_90 (H100) and sm_100 (B200), through the calls that a model
makes, for the largest reads of the paper's model (D=1024, 48 sub-layers, bfloat16). The bytes that the kernels load
and store are counted under Triton's interpreter. The ideal reads each wide input ([B, T, D]) once, writes each wide
output once, and does not count logits. Times on a GPU are not measured.

Shape letters: B batch, T tokens, D hidden size, S sources, G sites of a group, Y younger sources of a merge.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from lr_attnres import depth_routing_triton as kernels
from lr_attnres.depth_routing import DepthSite


HIDDEN_SIZE, RANK, NUM_SUBLAYERS, CAPABILITIES = 1024, 64, 48, (80, 90, 100)
SOURCE_SETS = {"N=8": 8, "full": None}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def largest_reads(num_blocks: int | None) -> tuple[int, int, int]:
    """S and G of the schedule's largest phase 1, Y of its largest phase 2."""
    sites = DepthSite.schedule(NUM_SUBLAYERS, num_blocks)
    group = max((site for site in sites if site.opens_group), key=lambda site: site.num_mixed * site.sites_in_group)
    younger = max(site.num_sources - site.num_mixed for site in sites)
    return group.num_mixed, group.sites_in_group, younger


def reads(S: int, G: int, Y: int, D: int = HIDDEN_SIZE) -> dict[str, tuple[Callable, int]]:
    """Both phases for one token, forward and backward: name -> (call, ideal bytes)."""
    value, merge_logits = torch.ones(1, 1, D, dtype=torch.bfloat16), torch.ones(1, 1, Y + 1)
    mix, logits, lse = torch.ones(1, 1, D), torch.ones(1, 1, G, S), torch.ones(1, 1, G)
    # Per column: 2 bytes of a bfloat16 value, hidden state or gradient, 4 of a float32 mix or of its gradient.
    return {
        "mix": (partial(kernels.mix_op, [value] * S, logits), D * (2 * S + 4 * G)),
        "mix backward": (
            partial(kernels.mix_backward_op, [mix] * G, lse, [value] * S, logits, lse),
            D * (4 * G + 2 * S + 2 * S),
        ),
        "merge": (partial(kernels.merge_op, [mix, *[value] * Y], merge_logits, torch.bfloat16), D * (4 + 2 * Y + 2)),
        "merge backward": (
            partial(kernels.merge_backward_op, value, value, [value] * Y, merge_logits, torch.float32),
            D * (2 + 2 + 2 * Y + 4 + 2 * Y),
        ),
        "step": (partial(step, S, D), 2 * D * (S + 3)),
    }


def step(S: int, D: int) -> None:
    """The last site of a step of generation with S sources: S - 2 complete blocks, the embedding, and the open block,
    which is read and written beside the output and the hidden states."""
    output, queries = torch.ones(1, 1, D, dtype=torch.bfloat16), torch.ones(1, min(RANK, D))
    tables = kernels.new_step_tables((output,), queries, num_sources=S, heads=1)
    options = kernels.StepOptions(2**-23, 1.0, normalize_emitted=False, normalize_keys=True, normalize_query=False)
    kernels.step_site(tables, (output,), 0, S - 2, (S - 1, S - 2), options)


class CompileOnlyDriver:
    """Stands in for a GPU's driver: kernels are compiled for it, never run."""

    def __init__(self, capability: int):
        self.capability, self.binaries, self.utils = capability, [], self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # as if each target were a device: Triton caches kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 164 * 1024 - 1024}

    def launcher_cls(self, source, metadata) -> Callable:
        return lambda *launch: None

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, ...]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernel.cubin")
            path.write_bytes(cubin)
            usage = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        registers, stack, local = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL"))
        self.binaries.append(
            {"kernel": name, "registers": registers, "spilled_bytes": stack + local, "shared_bytes": shared}
        )
        return 1, 1, registers, stack + local, 1024


def compile_reads(capability: int, S: int, G: int, Y: int) -> list[dict]:
    """-> one row per compiled kernel."""
    driver = CompileOnlyDriver(capability)
    triton.runtime.driver.set_active(driver)
    table = []
    for name, (call, _) in reads(S, G, Y).items():
        call()
        table += [{"target": f"sm_{capability}", "read": name, **binary} for binary in driver.binaries]
        driver.binaries.clear()
    return table


@contextmanager
def counted_bytes():
    """Under the interpreter: a list that grows by the bytes of each load and store."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    load, store, counts = Builder.create_masked_load, Builder.create_masked_store, []

    def count(pointers, mask):
        counts.append(int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8)

    def counting_load(builder, pointers, mask, *rest):
        count(pointers, mask)
        return load(builder, pointers, mask, *rest)

    def counting_store(builder, pointers, value, mask, *rest):
        count(pointers, mask)
        return store(builder, pointers, value, mask, *rest)

    Builder.create_masked_load, Builder.create_masked_store = counting_load, counting_store
    try:
        yield counts
    finally:
        Builder.create_masked_load, Builder.create_masked_store = load, store


def count_reads(S: int, G: int, Y: int, D: int = HIDDEN_SIZE) -> list[dict]:
    """-> one row per read; the process must have been started with TRITON_INTERPRET=1."""
    table = []
    for name, (call, ideal) in reads(S, G, Y, D).items():
        with counted_bytes() as counts:
            call()
        table.append({"read": name, "bytes": sum(counts), "ideal_bytes": ideal, "ratio": sum(counts) / ideal})
    return table


def count_in_subprocess(S: int, G: int, Y: int) -> list[dict]:
    """The interpreter is chosen when the kernels are defined: it needs a process of its own."""
    command = [sys.executable, __file__, "--count", str(S), str(G), str(Y)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


def print_table(table: list[dict], columns: list[str]) -> None:
    cells = [columns, *([f"{row[c]:.3f}" if c == "ratio" else str(row[c]) for c in columns] for row in table)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder of the JSON report")
    parser.add_argument("--count", type=int, nargs=3, metavar=("S", "G", "Y"), help="print the bytes moved, as JSON")
    arguments = parser.parse_args()
    if arguments.count:
        print(json.dumps(count_reads(*arguments.count)))
        return

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    report = {"versions": versions, "gpu_times": "not measured", "source_sets": {}}
    print(f"torch {torch.__version__}, triton {triton.__version__}. Compiled, not run: GPU times are not measured.\n")
    for name, num_blocks in SOURCE_SETS.items():
        S, G, Y = largest_reads(num_blocks)
        print(f"{name}: D={HIDDEN_SIZE}, bfloat16, S={S} sources, G={G} sites, Y={Y} younger sources")
        resources = [row for capability in CAPABILITIES for row in compile_reads(capability, S, G, Y)]
        print_table(resources, ["target", "read", "kernel", "registers", "spilled_bytes", "shared_bytes"])
        traffic = count_in_subprocess(S, G, Y)
        print("bytes per token")
        print_table(traffic, ["read", "bytes", "ideal_bytes", "ratio"])
        report["source_sets"][name] = {"S": S, "G": G, "Y": Y, "resources": resources, "traffic": traffic}
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "triton_report.json").write_text(json.dumps(report, indent=2) + "\n")
    if any(row["spilled_bytes"] for results in report["source_sets"].values() for row in results["resources"]):
        sys.exit("A kernel spills registers.")


if __name__ == "__main__":
    main()
