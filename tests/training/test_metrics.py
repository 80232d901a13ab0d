"""The metrics file holds every logged step once, however often a run was stopped."""

import pytest
from accelerate import Accelerator

from lr_attnres.training.metrics import Metrics, read_metrics


def run(file, done: int, steps: int, written: range) -> None:
    with Metrics(file, Accelerator(cpu=True), done, steps, batch_tokens=100) as metrics:
        for step in written:
            record = {"step": step, "loss": 1 / step, "grad_norm": 1.0, "lr_muon": 0.1}
            metrics.advance(record, seconds=0.5)
            if step % 2 == 0:
                metrics.write(record | {"depth_entropy": [0.5, 0.25]})


def test_resumed_files_have_no_step_twice(tmp_path):
    file = tmp_path / "run/metrics.jsonl"
    assert read_metrics(file) == []
    run(file, 0, 10, range(1, 8))
    with open(file, "a") as broken:
        broken.write('{"step": 8, "lo')
    assert [record["step"] for record in read_metrics(file)] == [2, 4, 6]
    run(file, 4, 10, range(5, 11))
    records = read_metrics(file)
    assert [record["step"] for record in records] == [2, 4, 6, 8, 10]
    assert all(record["tokens_per_second"] == 200 and len(record["depth_entropy"]) == 2 for record in records)
    run(file, 0, 10, range(1, 3))
    assert [record["step"] for record in read_metrics(file)] == [2]


@pytest.mark.parametrize("line", ['{"loss": 1}', "[]", "{", '{"step": "two"}'])
def test_lines_that_are_refused(line, tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match="metrics.jsonl, line 2: .* is not "):
        read_metrics(file)
