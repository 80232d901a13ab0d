"""The rows of a step depend only on the seed and the step."""

from types import SimpleNamespace

import pytest
import torch

from lr_attnres.data.packed_tokens import PackedTokens
from lr_attnres.training.arguments import TrainArguments
from lr_attnres.training.batches import StepBatches, micro_batch_rows


def sampler(rank: int = 0, processes: int = 1, accumulation: int = 4, done: int = 0, seed: int = 0):
    shape = (accumulation, processes, 8 // (processes * accumulation))
    return micro_batch_rows(20, shape, rank, seed, range(done, 5))


def flat(micro_batches) -> list[int]:
    return [row for micro_batch in micro_batches for row in micro_batch]


def test_every_epoch_is_a_new_permutation():
    rows = flat(sampler())
    assert len(rows) == 5 * 8
    first, second = rows[:20], rows[20:]
    assert sorted(first) == sorted(second) == list(range(20)) and first != second
    assert flat(sampler(seed=1)) != rows


def test_a_step_of_many_epochs():
    rows = flat(micro_batch_rows(3, (4, 1, 250), 0, 0, range(3)))
    assert all(sorted(rows[start : start + 3]) == [0, 1, 2] for start in range(0, 3000, 3))


def test_processes_share_the_rows_of_each_step():
    rows = flat(sampler())
    alone = [set(rows[8 * step : 8 * step + 8]) for step in range(5)]
    shared = [flat(sampler(rank, processes=2, accumulation=2)) for rank in range(2)]
    for step in range(5):
        mine, others = (set(share[4 * step : 4 * step + 4]) for share in shared)
        assert mine | others == alone[step] and not mine & others


def test_resumed_continues_with_the_same_rows():
    assert flat(sampler(done=3)) == flat(sampler())[3 * 8 :]


def test_micro_batches_divide_the_share(token_data):
    data = PackedTokens(token_data)
    accelerator = SimpleNamespace(num_processes=2, process_index=1, device=torch.device("cpu"))
    args = TrainArguments(steps=2, batch_tokens=12 * 32, micro_batch_size=4)
    batches = StepBatches(data, args, accelerator, steps_done=0)
    assert (batches.micro_batch_size, batches.accumulation) == (3, 2)
    steps = list(batches)
    assert [len(step) for step in steps] == [2, 2] and steps[0][0]["input_ids"].shape == (3, 32)
    args.batch_tokens = 9 * 32
    with pytest.raises(ValueError, match="`batch_tokens` is 288; it must be a multiple of 64"):
        StepBatches(data, args, accelerator, steps_done=0)
