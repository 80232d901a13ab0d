"""The rows of each training step: the same for any number of processes, and after a resume."""

import math
import os
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from ..data.packed_tokens import PackedTokens
from ..errors import LRAttnResError
from .arguments import TrainArguments
from .checkpoints import in_main_process


Batch = dict[str, torch.Tensor]  # the columns of `PackedTokens`, [B, T]


def open_split(folder: str | os.PathLike, split: str, accelerator: Accelerator) -> PackedTokens:
    """A split of a prepared folder. The main process verifies it; if it is damaged, all processes raise."""
    in_main_process(accelerator, lambda: PackedTokens(folder, split))
    return PackedTokens(folder, split, verify=False)


class StepBatches:
    """Iterates over the steps after `steps_done`: the micro-batches of this process for each step."""

    def __init__(self, data: PackedTokens, args: TrainArguments, accelerator: Accelerator, steps_done: int):
        length, stages = data.sequence_length, args.pipeline_stages
        # The stages of a pipeline have the same rows.
        self.num_replicas = processes = accelerator.num_processes // stages
        rows, rest = divmod(args.batch_tokens, length)
        if rest or rows % processes:
            sharers = f"{processes} {'processes' if stages == 1 else 'pipelines'}"
            rule = f"{sharers} with an equal number of rows of {length} tokens"
            multiple = f"it must be a multiple of {processes * length}"
            raise LRAttnResError(f"`batch_tokens` is {args.batch_tokens}; {multiple}: {rule}.")
        share = rows // processes
        self.micro_batch_size = max(n for n in range(1, min(args.micro_batch_size, share) + 1) if share % n == 0)
        self.accumulation = share // self.micro_batch_size
        if self.accumulation < stages:
            rule = f"a pipeline of {stages} stages needs as many micro-batches, from its {share} rows of a step"
            raise LRAttnResError(f"`micro_batch_size` is {self.micro_batch_size}: {rule}. Choose a smaller one.")
        self.epochs = args.steps * rows / len(data)
        shape, steps = (self.accumulation, processes, self.micro_batch_size), range(steps_done, args.steps)
        self.loader = DataLoader(
            data,
            batch_sampler=micro_batch_rows(len(data), shape, accelerator.process_index // stages, args.seed, steps),
            num_workers=args.num_workers,
            pin_memory=accelerator.device.type == "cuda",
            generator=torch.Generator(),  # the default one is saved in checkpoints and must not change here
        )

    def __iter__(self) -> Iterator[list[Batch]]:
        micro_batches = iter(self.loader)
        while step := list(islice(micro_batches, self.accumulation)):
            yield step


def micro_batch_rows(
    num_rows: int, shape: tuple[int, ...], process: int, seed: int, steps: range
) -> Iterator[list[int]]:
    """The row numbers of each micro-batch of a process; `shape` is (accumulation, processes, micro-batch size).

    Every epoch is a new permutation of all rows. It is cut into steps, each of which the processes share.
    """
    step_rows = math.prod(shape)

    @lru_cache(maxsize=2)
    def permutation(epoch: int) -> torch.Tensor:
        return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))

    for step in steps:
        start, end = step * step_rows, (step + 1) * step_rows
        epochs = range(start // num_rows, (end - 1) // num_rows + 1)
        rows = [permutation(epoch)[max(start - epoch * num_rows, 0) : end - epoch * num_rows] for epoch in epochs]
        yield from torch.cat(rows).view(shape)[:, process].tolist()


def flatten_for_flash(batch: Batch, attn_implementation: str) -> Batch:
    """[B, T] -> [1, B * T]: flash attention separates documents (by their positions) only in a batch of one row."""
    return {name: tensor.view(1, -1) for name, tensor in batch.items()} if "flash" in attn_implementation else batch
