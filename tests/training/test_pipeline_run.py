"""`train --pipeline-stages` gives the results of one process, and checkpoints that one process can resume."""

import shutil
from types import SimpleNamespace

import processes
import pytest
import torch
from processes import arguments, losses
from safetensors.torch import load_file

from lr_attnres import LRAttnResForCausalLM
from lr_attnres.data.packed_tokens import PackedTokens
from lr_attnres.errors import LRAttnResError
from lr_attnres.training.arguments import TrainArguments
from lr_attnres.training.batches import StepBatches
from lr_attnres.training.metrics import read_metrics
from lr_attnres.training.pipeline_run import check_processes
from lr_attnres.training.setup import start_accelerator


CLOSE = {"atol": 2e-5, "rtol": 2e-5}  # float32 sums in another order, through five steps
TERMINATED, KILLED = (("one of two terminated", 2), 143), (("killed in a step", 5), -9)
RUNS = [  # variant, tied, processes, how it ends
    ("sliced-n2-r8", False, 2, TERMINATED),
    ("projected-full-r8", True, 4, TERMINATED),  # two pipelines
    ("standard", True, 2, KILLED),
    ("attnres-n3", True, 2, KILLED),
]


@pytest.mark.compatibility("`lr-attnres train --pipeline-stages`", parameter="run")
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run[0])
def test_stages_are_one_process(run, token_data, tmp_path):
    """Killed or terminated and resumed, two stages end where one process ends. So does one process that resumes their
    checkpoint."""
    variant, tied, num_processes, (stop, code) = run
    model = {"tie_word_embeddings": tied, "num_hidden_layers": 4}
    values = {"variant": variant, "model": model, "steps": 5, "micro_batch_size": 1 if num_processes == 4 else 2}
    assert processes.run(processes.train, arguments(token_data, tmp_path / "alone", **values)) == [0]
    staged = arguments(token_data, tmp_path / "staged", pipeline_stages=2, **values)
    assert processes.run(processes.train, staged, stop, processes=num_processes) == [code] * num_processes
    shutil.copytree(tmp_path / "staged", tmp_path / "continued")
    staged["resume"] = "last"
    assert processes.run(processes.train, staged, processes=num_processes) == [0] * num_processes
    continued = staged | {"output_dir": str(tmp_path / "continued"), "pipeline_stages": 1}
    assert processes.run(processes.train, continued) == [0]

    expected, wanted = (
        read_metrics(tmp_path / "alone/metrics.jsonl"),
        load_file(tmp_path / "alone/model/model.safetensors"),
    )
    for name in ("staged", "continued"):
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
        torch.testing.assert_close(losses(records), losses(expected), **CLOSE)
        for measured in {"validation_loss", "depth_entropy"} & expected[-1].keys():
            torch.testing.assert_close(records[-1][measured], expected[-1][measured], **CLOSE)
        assert [r.keys() for r in records] == [r.keys() for r in expected]
        torch.testing.assert_close(load_file(tmp_path / name / "model/model.safetensors"), wanted, **CLOSE)
    _, info = LRAttnResForCausalLM.from_pretrained(tmp_path / "staged/model", output_loading_info=True)
    assert not any(info.values())


def test_what_is_refused(token_data, tmp_path):
    args = TrainArguments(**arguments(token_data, tmp_path, pipeline_stages=4))
    kind = start_accelerator(args).distributed_type
    for num_processes in (1, 2, 6):
        with pytest.raises(LRAttnResError, match=f"`pipeline_stages` is 4, the number of processes {num_processes}"):
            check_processes(args, num_processes, kind)
    check_processes(args, 8, kind)


def test_too_few_micro_batches(token_data, tmp_path):
    args = TrainArguments(**arguments(token_data, tmp_path, pipeline_stages=2, micro_batch_size=8))
    two = SimpleNamespace(num_processes=2, process_index=0, device=torch.device("cpu"))
    with pytest.raises(LRAttnResError, match="`micro_batch_size` is 8: a pipeline of 2 stages"):
        StepBatches(PackedTokens(token_data), args, two, steps_done=0)
