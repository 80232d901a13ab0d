"""The rows of a step depend on the seed and the step alone."""

from types import SimpleNamespace

import pytest
import torch

from lr_attnres.batches import MicroBatchSampler, StepBatches
from lr_attnres.data import PackedTokens
from lr_attnres.training_arguments import TrainArguments


def sampler(rank: int = 0, processes: int = 1, accumulation: int = 4, done: int = 0, seed: int = 0):
    accelerator = SimpleNamespace(num_processes=processes, process_index=rank)
    size = 8 // (processes * accumulation)
    batches = SimpleNamespace(accelerator=accelerator, accumulation=accumulation, micro_batch_size=size)
    return MicroBatchSampler(20, 8, batches, TrainArguments(steps=5, seed=seed), done)


def flat(micro_batches) -> list[int]:
    return [row for micro_batch in micro_batches for row in micro_batch]


def test_every_epoch_is_a_new_permutation():
    rows = flat(sampler())
    assert len(rows) == 5 * 8
    first, second = rows[:20], rows[20:]
    assert sorted(first) == sorted(second) == list(range(20)) and first != second
    assert flat(sampler(seed=1)) != rows


def test_processes_share_the_rows_of_each_step():
    alone = [set(sampler().rows(step).tolist()) for step in range(5)]
    shared = [flat(sampler(rank, processes=2, accumulation=2)) for rank in range(2)]
    for step in range(5):
        mine, others = (set(rows[4 * step : 4 * step + 4]) for rows in shared)
        assert mine | others == alone[step] and not mine & others


def test_resumed_goes_on_with_the_same_rows():
    assert flat(sampler(done=3)) == flat(sampler())[3 * 8 :]


def test_micro_batches_divide_the_share(token_data):
    data = PackedTokens(token_data)
    accelerator = SimpleNamespace(num_processes=2, process_index=1, device=torch.device("cpu"))
    args = TrainArguments(steps=2, batch_tokens=12 * 32, micro_batch_size=4)
    batches = StepBatches(data, args, accelerator, done=0)
    assert (batches.micro_batch_size, batches.accumulation) == (3, 2)
    steps = list(batches)
    assert [len(step) for step in steps] == [2, 2] and steps[0][0]["input_ids"].shape == (3, 32)
    args.batch_tokens = 9 * 32
    with pytest.raises(ValueError, match="`batch_tokens` is 288; it must be a multiple of 64"):
        StepBatches(data, args, accelerator, done=0)
