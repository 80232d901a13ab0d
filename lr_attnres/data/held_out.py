"""Held-out rows to evaluate a model on: the validation split of a prepared folder, or freshly tokenized text."""

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..configuration_lr_attnres import LRAttnResConfig
from ..errors import LRAttnResError
from .documents import open_documents
from .manifest import FILENAME
from .packed_tokens import PackedTokens, load_data_tokenizer, make_row
from .tokenizers import load_tokenizer


PIECE_CHARACTERS = 100_000
MAX_BATCH_SIZE = 10_000


def open_rows(
    data: str | list[str], model: str, config: LRAttnResConfig, sequence_length: int | None = None
) -> Iterable[dict[str, torch.Tensor]]:
    """The validation rows of a prepared folder, or rows of text, tokenized with the tokenizer of `model`."""
    data = [data] if isinstance(data, str) else data
    if len(data) == 1 and (Path(data[0]) / FILENAME).is_file():
        packed = PackedTokens(data[0], "validation")
        packed.manifest.check_fits(config)
        check_same_tokens(model, packed)
        length = packed.sequence_length
        if sequence_length is not None:
            raise LRAttnResError(f"`sequence_length` is for text; {data[0]} has rows of {length} tokens.")
        return (packed[i] for i in range(len(packed)))
    context = config.max_position_embeddings
    length = min(context, 2048) if sequence_length is None else sequence_length
    if not 2 <= length <= context:
        raise LRAttnResError(f"`sequence_length` is {length}; it must lie in 2..{context}, the context of {model}.")
    return text_rows(open_documents(data), load_tokenizer(model, config.vocab_size), length)


def check_same_tokens(model: str, data: PackedTokens) -> None:
    """Raise if the model's tokenizer has another vocabulary than the tokenizer of the data."""
    try:
        tokenizer = load_tokenizer(model)
    except LRAttnResError as error:
        print(f"Cannot check that the tokenizer fits the data: {error}", file=sys.stderr)
        return
    if tokenizer.get_vocab() != load_data_tokenizer(data.folder).get_vocab():
        advice = f"prepare the text again with `tokenizer` {model}"
        raise LRAttnResError(f"{data.folder} was prepared with another tokenizer than that of {model}: {advice}.")


def text_rows(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Documents packed end to end into rows, as `prepare_data` does; the last row may be shorter."""
    tokens: list[int] = []
    starts = {0}  # of the documents in `tokens`, and of the rest of a document
    for text in documents:
        if not text.strip():
            continue
        starts.add(len(tokens))
        for new_tokens in _encode_document(tokenizer, text):
            tokens += new_tokens
            while len(tokens) >= length:
                yield make_row(np.array(tokens[:length]), np.array(sorted(starts)))
                tokens, starts = tokens[length:], {0}
    if len(tokens) > 1:
        yield make_row(np.array(tokens), np.array(sorted(starts)))


def _encode_document(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[list[int]]:
    """The tokens of a document, cut at line ends: those of a long document are never all in memory."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE_CHARACTERS) + 1 or len(text)
        # `split_special_tokens`: text that looks like a special token stays text.
        encoded = tokenizer(text[start:end], add_special_tokens=False, split_special_tokens=True, verbose=False)
        yield encoded["input_ids"]
        start = end
    if tokenizer.eos_token_id is not None:
        yield [tokenizer.eos_token_id]


def check_batch_size(batch_size: int) -> None:
    """Raise before a batch fills the memory."""
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise LRAttnResError(f"`batch_size` is {batch_size}; it must lie in 1..{MAX_BATCH_SIZE} rows.")


def make_batches(rows: Iterable[dict], batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of consecutive rows of the same length."""
    for _, same_length in groupby(rows, key=lambda row: len(row["input_ids"])):
        while batch := list(islice(same_length, batch_size)):
            yield torch.utils.data.default_collate(batch)


def take_tokens(batches: Iterable[dict], max_tokens: int | None) -> Iterator[dict[str, torch.Tensor]]:
    """Batches with at most `max_tokens` tokens in total, in whole rows, and at least one row."""
    remaining = sys.maxsize if max_tokens is None else max_tokens
    for batch in batches:
        num_rows, length = batch["input_ids"].shape
        rows = min(num_rows, max(remaining // length, 1))
        yield {key: value[:rows] for key, value in batch.items()}
        remaining -= rows * length
        if remaining < length:
            return
