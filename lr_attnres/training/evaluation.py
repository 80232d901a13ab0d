"""The mean loss over all target tokens of a split; it does not depend on the number of processes."""

import math
import os
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch.utils.data import default_collate
from tqdm import tqdm
from transformers import PreTrainedModel

from ..data.held_out import check_batch_size, check_same_tokens
from ..data.packed_tokens import PackedTokens
from ..errors import LRAttnResError
from ..folders.adapter import load_routing_adapter
from ..folders.loading import load_causal_lm
from .batches import flatten_for_flash, open_split
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
def evaluate_model(
    model: PreTrainedModel,
    dataset: PackedTokens,
    accelerator: Accelerator,
    batch_size: int = 8,
    progress_bar: bool = False,
) -> Evaluation:
    """The loss of a model in memory over all rows of `dataset`, which the processes share.

    The batches are the same for any number of processes, and their float64 sums are added exactly (`math.fsum`), so
    the result is the same too.
    """
    num_batches = math.ceil(len(dataset) / batch_size)
    rounds = math.ceil(num_batches / accelerator.num_processes)
    sums = torch.zeros(rounds, 2, dtype=torch.float64)
    with evaluation_mode(model):
        for i in tqdm(range(rounds), unit=" batches", disable=not (progress_bar and accelerator.is_main_process)):
            number = i * accelerator.num_processes + accelerator.process_index
            # Sharded models need all processes in every forward: one without a batch repeats the first, unlabelled.
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


def evaluate(
    model: str | os.PathLike,
    data: str | os.PathLike,
    split: str = "validation",
    batch_size: int = 8,
    dtype: str = "float32",
    depth_backend: str = "torch",
    adapter: str | os.PathLike | None = None,
) -> Evaluation:
    """The loss of a saved model (a folder or Hub repository) on a split of a prepared folder.

    The model is an LR-AttnRes one, with or without a routing adapter, or an ordinary causal model of Transformers.
    """
    check_batch_size(batch_size)
    accelerator = Accelerator()  # its precision does not matter: `accelerator.prepare` is not called
    dataset = open_split(data, split, accelerator)
    loaded = load_causal_lm(os.fspath(model), str(accelerator.device), dtype, depth_backend=depth_backend)
    if adapter is not None:
        load_routing_adapter(loaded, adapter)
    dataset.manifest.check_fits(loaded.config)
    check_same_tokens(os.fspath(model), dataset)
    result = evaluate_model(loaded, dataset, accelerator, batch_size, progress_bar=True)
    if not math.isfinite(result.loss):
        raise LRAttnResError(f"the loss of {model} is {result.loss}: weights are damaged, or too large for `dtype`.")
    return result
