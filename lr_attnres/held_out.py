"""Held-out tokens to measure a model on: the validation rows of a prepared folder, or text tokenized on the way."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from .configuration_lr_attnres import LRAttnResConfig
from .data import PackedTokens, check_fits, load_data_tokenizer
from .documents import open_documents
from .loading import LoadingError, load_tokenizer


PIECE_CHARACTERS = 100_000


def open_rows(
    data: str | list[str], model: str, config: LRAttnResConfig, sequence_length: int | None = None
) -> Iterable[dict[str, torch.Tensor]]:
    """The rows of a prepared folder, or of text tokenized for `model`, a folder or Hub repository."""
    data = [data] if isinstance(data, str) else data
    if len(data) == 1 and (Path(data[0]) / "manifest.json").is_file():
        packed = PackedTokens(data[0], "validation")
        check_fits(config.vocab_size, config.max_position_embeddings, packed.manifest)
        check_same_tokens(model, packed)
        if sequence_length is not None:
            raise ValueError(f"`sequence_length` is for text; {data[0]} has rows of {packed.sequence_length} tokens.")
        return (packed[i] for i in range(len(packed)))
    length = min(config.max_position_embeddings, 2048) if sequence_length is None else sequence_length
    if length < 2:
        raise ValueError(f"`sequence_length` is {length}; it must be at least 2.")
    if length > config.max_position_embeddings:
        raise ValueError(
            f"`sequence_length` is {length}; the context of {model} is {config.max_position_embeddings}: lower it."
        )
    return text_rows(open_documents(data), load_tokenizer(model, config), length)


def check_same_tokens(model: str, data: PackedTokens) -> None:
    """Raise where the tokenizer beside the model numbers other tokens than that of the data."""
    try:
        tokenizer = load_tokenizer(model)
    except LoadingError as error:
        print(f"Whether the tokenizer fits the data is not checked: {error}", file=sys.stderr)
        return
    if tokenizer.get_vocab() != load_data_tokenizer(data.folder).get_vocab():
        raise ValueError(
            f"{data.folder} was prepared with another tokenizer than that of {model}: prepare the text again with "
            "the model's."
        )


def text_rows(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Documents packed end to end into rows as `prepare` packs them; the last row may be shorter."""
    tokens: list[int] = []
    positions: list[int] = []
    for text in documents:
        if not text.strip():
            continue
        position = 0
        for piece in [*_pieces(text), None]:
            new = [tokenizer.eos_token_id] if piece is None else _encode(tokenizer, piece)
            new = [token for token in new if token is not None]
            tokens += new
            positions += range(position, position + len(new))
            position += len(new)
            while len(tokens) >= length:
                yield _row(tokens[:length], positions[:length])
                tokens, positions = tokens[length:], positions[length:]
    if len(tokens) > 1:
        yield _row(tokens, positions)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # Text that looks like a special token stays text.
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def _pieces(text: str) -> Iterator[str]:
    """A long document in pieces that end with a line, so that its tokens are never in memory all at once."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE_CHARACTERS) + 1 or len(text)
        yield text[start:end]
        start = end


def _row(tokens: list[int], positions: list[int]) -> dict[str, torch.Tensor]:
    input_ids, position_ids = torch.tensor(tokens), torch.tensor(positions)
    # A row starts afresh, also inside a document.
    restart = (position_ids == 0).nonzero()
    first = int(restart[0]) if len(restart) else len(tokens)
    position_ids[:first] = torch.arange(first)
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "labels": input_ids.masked_fill(position_ids == 0, -100),
    }


def make_batches(rows: Iterable[dict], batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Stack rows of the same length."""
    batch: list[dict[str, torch.Tensor]] = []
    for row in rows:
        if batch and (len(batch) == batch_size or len(row["input_ids"]) != len(batch[0]["input_ids"])):
            yield torch.utils.data.default_collate(batch)
            batch = []
        batch.append(row)
    if batch:
        yield torch.utils.data.default_collate(batch)


def take_tokens(batches: Iterable[dict], max_tokens: int | None) -> Iterator[dict[str, torch.Tensor]]:
    """Whole rows of at most `max_tokens` together, but one row at least."""
    if max_tokens is None:
        yield from batches
        return
    left = max_tokens
    for batch in batches:
        length = batch["input_ids"].shape[1]
        rows = min(len(batch["input_ids"]), max(left // length, 1))
        yield {key: value[:rows] for key, value in batch.items()}
        left -= rows * length
        if left < length:
            return
