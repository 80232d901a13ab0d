"""`doctor`: what it compares, what it says when something disagrees or dies, and what it predicts."""

import json
import os
import re
import signal
import sys
from importlib.metadata import metadata

import pytest
import torch

from lr_attnres import LRAttnResError, cli, doctor
from lr_attnres.analysis import gpu_timings, machine, read_checks, roofline
from lr_attnres.analysis.read_checks import TOLERANCE, Check, run_check
from lr_attnres.depth_routing import DepthSite


FEW = [Check("cpu", "product", "float32"), Check("cpu", "torch", "float32")]


@pytest.fixture
def few_checks(monkeypatch):
    monkeypatch.setattr(machine, "plan_checks", lambda *_, **__: FEW)


def test_a_machine_where_all_agrees(few_checks, tmp_path, capsys):
    assert cli.main(["doctor", "--output", str(tmp_path / "new" / "doctor.json")]) == 0
    report, text = json.loads((tmp_path / "new" / "doctor.json").read_text()), capsys.readouterr().out
    assert [(result["backend"], result["problem"]) for result in report["checks"]] == [
        ("product", None),
        ("torch", None),
    ]
    assert set(report["checks"][1]["errors"]) == {
        "hidden states",
        "gradient of the outputs",
        "gradient of the queries",
        "generation",
    }
    assert (
        report["environment"]["packages"]["torch"] == torch.__version__ and report["environment"]["attention"]["sdpa"]
    )
    assert "All 2 checks agree." in text and "No GPU: nothing is timed." in text


def test_a_missing_extra_is_named_with_what_it_is_for(monkeypatch, capsys):
    monkeypatch.setitem(machine.EXTRAS, "explore", ("no_such_module", "explore"))
    machine.print_environment(machine.environment())
    text = capsys.readouterr().out
    assert 'missing: explore: pip install "lr-attnres[explore]"' in text
    (present,) = re.findall("^extras: (.*)$", text, flags=re.MULTILINE)
    assert "train" in present.split(", ") and "explore" not in present
    listed = {extra for extra in metadata("lr-attnres").get_all("Provides-Extra") if extra != "dev"}
    assert set(machine.EXTRAS) == listed


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_torch_reads_agree(dtype):
    errors = run_check(Check("cpu", "torch", dtype))
    assert len(errors) == 4 and all(0 < error < TOLERANCE[dtype] for error in errors.values())


@pytest.mark.parametrize("part", ["mix", "merge", "bank"])
def test_a_wrong_read_disagrees(part, monkeypatch):
    mix, merge = read_checks.DEPTH_BACKENDS["torch"]
    if part == "mix":
        wrong = (lambda values, logits: mix(values[::-1], logits), merge)
    else:
        wrong = (mix, lambda first, lse, younger, dtype: merge(first, lse + 0.1, younger, dtype))
    if part == "bank":
        monkeypatch.setattr(read_checks.DepthBank, "write", lambda bank, index, output: bank.values.add_(0.01))
    else:
        monkeypatch.setitem(read_checks.DEPTH_BACKENDS, "torch", wrong)
    errors = run_check(Check("cpu", "torch", "float32"))
    assert not max(errors.values()) <= TOLERANCE["float32"]


def test_a_disagreement_is_one_line_and_exit_code_1(few_checks, monkeypatch, capsys):
    results = [{"errors": {"product": 1e-7}}, {"errors": {"hidden states": 1e-7, "gradient of the queries": 0.5}}]
    script = f"[print(line) for line in {[json.dumps(result) for result in results]}]"
    monkeypatch.setattr(machine, "worker_command", lambda checks: [sys.executable, "-c", script])
    assert cli.main(["doctor"]) == 1
    problem = "float32 torch reads on cpu: the gradient of the queries are off by 5.0e-01 (limit 1.0e-05)"
    assert capsys.readouterr().err == f"Error: 1 of 2 checks failed: {problem}.\n"


def test_a_crash_is_a_finding_that_names_the_variable(monkeypatch, capsys):
    """As on processors that advertise AMX without giving it. The checks after it still run, in a new process."""
    checks = [
        Check("cpu", "torch", "float32"),
        Check("cpu", "product", "bfloat16"),
        Check("cpu", "product", "float16"),
    ]
    one = json.dumps({"errors": {"product": 1e-9}})

    def worker(remaining):
        dies = f"import os; print('{one}', flush=True); os.kill(os.getpid(), {int(signal.SIGILL)})"
        return [sys.executable, "-c", dies if len(remaining) == 3 else f"print('{one}')"]

    monkeypatch.setattr(machine, "worker_command", worker)
    monkeypatch.setattr(machine, "plan_checks", lambda *_, **__: checks)
    with pytest.raises(LRAttnResError, match="1 of 3 checks failed: bfloat16 products on cpu kill the process .*ISA="):
        doctor()
    assert capsys.readouterr().out.count("product   ") == 2


def test_every_backend_of_every_device_is_planned():
    checks = machine.plan_checks(["cpu", "cuda:0"], quick=False, has_triton=True)
    planned = {(check.device, check.backend) for check in checks}
    assert planned == {("cpu", b) for b in ("torch", "compiled", "product")} | {
        ("cuda:0", b) for b in ("torch", "compiled", "triton", "product")
    }
    assert {check.dtype for check in checks} == set(TOLERANCE)
    assert not any(check.backend == "compiled" for check in machine.plan_checks(["cpu"], True, True))


def test_timings_are_beside_the_prediction(monkeypatch, capsys):
    """On the CPU, with tiny models: what runs on a GPU but for launches and CUDA graphs."""
    monkeypatch.setattr(gpu_timings, "count_launches", lambda step: 7)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    entries = gpu_timings.time_device("cpu", quick=True, tokens=4, vocab_size=128, **sizes)
    assert len(entries) == 15 and all(entry["seconds"] > 0 and entry["ratio"] > 0 for entry in entries)
    failed = gpu_timings.measure(torch.nn.Linear(1, 1), "prefill", "eager", 4, 1)
    made_up = {"model": "sliced-n8-r64", "backend": "triton", "phase": "decoding", "mode": "graph", "gpu": "H100"}
    entries += [{**made_up, "seconds": 1.0, "launches": 780}, {**made_up, **failed}]
    gpu_timings.add_ratios(entries)
    gpu_timings.print_timings("cuda:0", entries)
    assert entries[-2]["predicted_ratio"] == roofline.predicted_ratio("sliced-n8-r64", "decoding", "H100")
    with torch.device("meta"):  # what is timed has the size that the prediction is for
        timed, paper = gpu_timings.build("sliced-n8-r64", {}).config, roofline.paper_config("sliced-n8-r64")
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    assert [getattr(timed, name) for name in names] == [getattr(paper, name) for name in names]
    assert timed.max_position_embeddings == roofline.CONTEXT
    assert "failed: AttributeError" in capsys.readouterr().out


def test_bytes_of_the_roofline_are_those_of_the_kernels():
    """Summed over the sites: what `benchmarks/triton_report.py` calls the ideal of each kernel, and the block sums."""
    pytest.importorskip("triton", reason="triton is not installed")
    sys.path.append(os.path.join(os.path.dirname(__file__), "..", "..", "benchmarks"))
    import triton_report

    for variant, blocks in (("sliced-n8-r64", 8), ("attnres-full", None)):
        config, sites = roofline.paper_config(variant), DepthSite.schedule(48, blocks)
        training = decoding = 0
        for site in sites:
            G, Y = max(site.sites_in_group, 1), site.num_sources - site.num_mixed
            ideal = {name: size for name, (_, size) in triton_report.reads(site.num_mixed, G, max(Y, 1)).items()}
            if site.opens_group:
                training += ideal["mix"] + ideal["mix backward"]
            training += ideal["merge"] + ideal["merge backward"] - (0 if Y else 6 * 1024)
            training -= 0 if site.num_mixed > 1 else 4 * 1024  # the embedding is no mix in float32
            training += 12 * 1024 * (site.num_in_block > 1)
            decoding += 2 * 1024 * (site.num_sources + 3) - 2 * 1024 * (site.num_in_block == 1)
        assert roofline.depth_bytes(config, "training") == training
        assert roofline.depth_bytes(config, "decoding") == decoding


def test_predictions():
    for gpu in roofline.SHEETS:
        assert roofline.find_gpu(f"NVIDIA {gpu}-SXM") == gpu
        for phase in roofline.PHASES:
            assert roofline.predicted_ratio("standard", phase, gpu) == 1
            assert 1 < roofline.predicted_ratio("sliced-n8-r64", phase, gpu) < 1.2
    assert roofline.find_gpu("GeForce") is None
    assert roofline.decoding_launches("sliced-n8-r64", "triton") == roofline.decoding_launches("standard", "torch")
    assert roofline.decoding_launches("sliced-n8-r64", "torch") > roofline.decoding_launches("standard", "torch")
