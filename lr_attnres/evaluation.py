"""The mean loss over every target token of a split: the same for any batch order and number of processes."""

import math
import os
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch.utils.data import default_collate
from tqdm import tqdm
from transformers import PreTrainedModel

from .batches import flatten_for_flash
from .data import PackedTokens, check_fits
from .held_out import check_same_tokens
from .loading import load_language_model
from .losses import evaluation_mode, num_targets


@dataclass(frozen=True)
class Evaluation:
    """Cross-entropy in nats per target token."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    model: PreTrainedModel,
    dataset: PackedTokens,
    accelerator: Accelerator,
    batch_size: int = 8,
    progress_bar: bool = False,
) -> Evaluation:
    """Cross-entropy over all rows of `dataset`, shared among the processes.

    The rows of a batch do not depend on the number of processes, the sums of the batches are float64 and added
    exactly: one process or many, the result is the same.
    """
    num_batches = math.ceil(len(dataset) / batch_size)
    rounds = math.ceil(num_batches / accelerator.num_processes)
    sums = torch.zeros(rounds, 2, dtype=torch.float64)
    with evaluation_mode(model):
        for i in tqdm(range(rounds), unit=" batches", disable=not (progress_bar and accelerator.is_main_process)):
            number = i * accelerator.num_processes + accelerator.process_index
            # A process without a batch of its own joins in with one that does not count: sharded models need all.
            start = number * batch_size if number < num_batches else 0
            batch = default_collate([dataset[row] for row in range(start, min(start + batch_size, len(dataset)))])
            if number >= num_batches:
                batch["labels"].fill_(-100)
            batch = flatten_for_flash(batch, model.config._attn_implementation)
            batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            total = model(**batch, use_cache=False, num_items_in_batch=1).loss
            sums[i] = torch.stack([total.cpu().double(), num_targets(batch["labels"]).cpu().double()])
    if accelerator.num_processes > 1:
        sums = accelerator.gather(sums.to(accelerator.device)).cpu()
    loss, tokens = sums.unbind(-1)
    return Evaluation(math.fsum(loss.tolist()) / tokens.sum().item(), int(tokens.sum().item()))


def evaluate_folder(
    model: str | os.PathLike,
    data: str | os.PathLike,
    split: str = "validation",
    batch_size: int = 8,
    dtype: str = "float32",
) -> Evaluation:
    """The loss of a saved model on a split of prepared data."""
    if batch_size < 1:
        raise ValueError(f"`batch_size` is {batch_size}; it must be at least 1.")
    dataset = PackedTokens(data, split)
    accelerator = Accelerator()  # of whatever precision: the model is not prepared by it, so none is applied
    loaded = load_language_model(os.fspath(model), str(accelerator.device), dtype)
    check_fits(loaded.config.vocab_size, loaded.config.max_position_embeddings, dataset.manifest)
    check_same_tokens(os.fspath(model), dataset)
    result = evaluate(loaded, dataset, accelerator, batch_size, progress_bar=True)
    if not math.isfinite(result.loss):
        raise ValueError(f"the loss of {model} is {result.loss}: weights are damaged, or too large for `dtype`.")
    return result
