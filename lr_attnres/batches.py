"""Which rows of the data a step trains on, whatever the number of processes and wherever a run was resumed."""

from collections.abc import Iterator
from functools import lru_cache

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Sampler

from .data import PackedTokens
from .training_arguments import TrainArguments


class StepBatches:
    """The micro-batches of this process, step by step, from the step after `done` on.

    The rows of a step depend on the seed and its number alone: not on the processes, nor on where a run was resumed.
    """

    def __init__(self, data: PackedTokens, args: TrainArguments, accelerator: Accelerator, done: int):
        self.accelerator, processes = accelerator, accelerator.num_processes
        length = data.manifest["settings"]["sequence_length"]
        rows, rest = divmod(args.batch_tokens, length)
        if rest or rows % processes:
            raise ValueError(
                f"`batch_tokens` is {args.batch_tokens}; it must be a multiple of {processes * length}: rows of "
                f"{length} tokens, as many for each of the {processes} processes."
            )
        share = rows // processes
        self.micro_batch_size = max(n for n in range(1, min(args.micro_batch_size, share) + 1) if share % n == 0)
        self.accumulation = share // self.micro_batch_size
        self.epochs = args.steps * rows / len(data)
        sampler = MicroBatchSampler(len(data), rows, self, args, done)
        self.loader = DataLoader(
            data,
            batch_sampler=sampler,
            num_workers=args.num_workers,
            pin_memory=accelerator.device.type == "cuda",
            generator=torch.Generator(),  # its own: reading data must not touch the state that is saved
        )

    def __iter__(self) -> Iterator[list[dict[str, torch.Tensor]]]:
        micro_batches = iter(self.loader)
        while True:
            try:
                yield [next(micro_batches) for _ in range(self.accumulation)]
            except StopIteration:
                return


class MicroBatchSampler(Sampler):
    """Row numbers: every epoch a new permutation of all rows, cut into steps, each dealt out to the processes."""

    def __init__(self, num_rows: int, batch_rows: int, batches: StepBatches, args: TrainArguments, done: int):
        self.num_rows, self.batch_rows, self.seed = num_rows, batch_rows, args.seed
        self.steps = range(done, args.steps)
        self.shape = (batches.accumulation, batches.accelerator.num_processes, batches.micro_batch_size)
        self.process = batches.accelerator.process_index
        self.permutation = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> torch.Tensor:
        return torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))

    def rows(self, step: int) -> torch.Tensor:
        """The rows of a step, counted from 0, for all processes together."""
        positions = torch.arange(step * self.batch_rows, (step + 1) * self.batch_rows)
        epochs, places = positions // self.num_rows, positions % self.num_rows
        return torch.cat([self.permutation(epoch)[places[epochs == epoch]] for epoch in epochs.unique().tolist()])

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            yield from self.rows(step).view(self.shape)[:, self.process].tolist()


def flatten_for_flash(batch: dict[str, torch.Tensor], attn_implementation: str) -> dict[str, torch.Tensor]:
    """Flash attention looks for documents in a single row: [B, T] -> [1, B * T], each row beginning at position 0."""
    return {name: tensor.view(1, -1) for name, tensor in batch.items()} if "flash" in attn_implementation else batch
