"""The Triton kernels: their numbers, under the interpreter; what they compile to, for GPUs that are not here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


triton = pytest.importorskip("triton", reason="triton is not installed")

from lr_attnres import depth_routing_triton as kernels  # noqa: E402


ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import triton_report  # noqa: E402


KERNELS = {name for name in vars(kernels) if name.endswith("_kernel")}


@pytest.fixture
def compile_only(monkeypatch):
    """Kernels are compiled for an H100 and not run."""
    driver = triton_report.CompileOnlyDriver(90)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    yield driver
    for name in KERNELS:
        getattr(kernels, name).device_caches.clear()


def test_equals_the_oracle_under_the_interpreter():
    """The interpreter is chosen when triton is imported, so these tests have a process of their own."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/interpreted_depth_routing_triton.py"]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("capability", triton_report.CAPABILITIES)
def test_every_kernel_compiles_without_spills(capability, compile_only):
    """To a cubin, at the paper's width: the mix of 8 blocks, the merge of full sources (their mix compiles for half a
    minute: it is in the report). No atomics: sums have one order."""
    S, G, _ = triton_report.largest_reads(num_blocks=8)
    *_, Y = triton_report.largest_reads(num_blocks=None)
    table = triton_report.compile_reads(capability, S, G, Y)
    assert {row["kernel"] for row in table} == KERNELS
    assert all(row["registers"] > 0 and row["spilled_bytes"] == 0 for row in table), table
    # The step keeps the chunks of its sources there while it sums over them.
    assert all(row["shared_bytes"] <= (32768 if row["read"] == "step" else 4096) for row in table), table
    for name in KERNELS:
        compiled = getattr(kernels, name).device_caches[capability][0].values()
        assert compiled and not any(re.search(r"\b(atom|red)\.", kernel.asm["ptx"]) for kernel in compiled)


@pytest.mark.parametrize("num_sources, D, R", [(3, 7168, 64), (49, 1000, 1000), (98, 5000, 100)])
def test_a_step_of_any_size_compiles_once_without_spills(num_sources, D, R, compile_only):
    """With keys of its own, in bfloat16; once for all sites and batches."""
    options = kernels.StepOptions(1e-6, 1.0, normalize_emitted=True, normalize_keys=True, normalize_query=False)
    for batch in (2, 3, 64):
        value, key, output = (torch.zeros(batch, 1, size, dtype=torch.bfloat16) for size in (D, R, D + R))
        tables = kernels.new_step_tables((value, key), torch.zeros(num_sources, R), num_sources, heads=1)
        for site, num_blocks, slots in ((0, 0, (-1, 1)), (1, 0, (1, 0)), (16, 1, (-1, 2)), (2, 1, (2, 1))):
            kernels.step_site(tables, output.split([D, R], dim=-1), site, num_blocks, slots, options)
    (binary,) = compile_only.binaries
    assert binary["spilled_bytes"] == 0 and binary["shared_bytes"] <= 65536, binary


def test_no_kernel_is_compiled_again_for_another_length_or_site(compile_only, monkeypatch, D=64):
    """Nor for other logits: the columns of a site differ in stride and alignment from site to site."""
    monkeypatch.setattr(kernels, "INTERPRETED", True)  # tensors on the CPU pass for the driver that runs nothing
    compiled = []
    for T, num_sites in ((1, 1), (2, 2), (16, 3), (17, 16), (1000, 17), (2048, 48)):
        mix, value = (torch.zeros(1, T, D, requires_grad=True) for _ in range(2))
        *mixes, lse = kernels.depth_mix([mix, value], torch.zeros(1, T, 2, 2))
        younger = [(value, torch.zeros(1, T, num_sites)[..., -1:])]
        kernels.depth_merge(mixes[0], lse[..., 1:], younger, torch.float32).sum().backward()
        compiled.append(len(compile_only.binaries))
    # Both phases use the forward kernel, for 2 sites and for 1; nothing here is a step of generation.
    assert set(compiled) == {len(KERNELS)}


def test_tensors_on_the_cpu_are_an_error():
    with pytest.raises(ValueError, match="move them to a GPU"):
        kernels.depth_mix([torch.zeros(1, 1, 8)], torch.zeros(1, 1, 1, 1))


def test_without_triton_importing_works_and_calling_explains():
    code = """
import sys
sys.modules["triton"] = None
import torch
import depth_routing_triton as kernels
try:
    kernels.depth_mix([torch.zeros(1, 1, 8)], torch.zeros(1, 1, 1, 1))
except ImportError as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT / "lr_attnres", capture_output=True, text=True, check=True)
    assert "needs triton: install it" in result.stdout
