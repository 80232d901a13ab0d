"""Tokenizers: cl100k_base, that of the released models, token for token what tiktoken gives, and small ones to train.

The ranks of cl100k_base are not part of this package. They come from a `cl100k_base.tiktoken` file, or from tiktoken
(the extra `lr-attnres[hub]`), which downloads them once into its own cache.
"""

import base64
import hashlib
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


CL100K_VOCAB_SIZE = 100_277
CL100K_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 256 + 1  # of a byte-level BPE: every byte, and the end of text
SPECIAL_TOKENS = {
    END_OF_TEXT: 100_257,
    "<|fim_prefix|>": 100_258,
    "<|fim_middle|>": 100_259,
    "<|fim_suffix|>": 100_260,
    "<|endofprompt|>": 100_276,
}
# tiktoken's pattern without its possessive quantifiers, which `tokenizers` does not honour.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# For base models: roles in plain text, no token that training has not seen.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

TRAINING_DOCUMENTS = 100_000


class TokenizerError(ValueError):
    """The ranks cannot be had; the message says where they were looked for."""


def cl100k_tokenizer(
    ranks_file: str | os.PathLike | None = None, model_max_length: int = 2048
) -> PreTrainedTokenizerFast:
    """cl100k_base from a `cl100k_base.tiktoken` file or, without one, from tiktoken's cache or download."""
    ranks = _ranks_from_file(Path(ranks_file)) if ranks_file is not None else _ranks_from_tiktoken()
    letters = bytes_to_unicode()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {names[token]: rank for token, rank in ranks.items()} | SPECIAL_TOKENS
    tokenizer = Tokenizer(models.BPE(vocabulary, _merges(ranks, names), ignore_merges=True))
    _set_byte_level(tokenizer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return _as_fast_tokenizer(tokenizer, model_max_length)


def train_tokenizer(
    documents: Iterable[str],
    vocab_size: int,
    model_max_length: int = 2048,
    progress_bar: bool = False,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `vocab_size` tokens, or fewer where the text has no more to merge, trained on the first
    100,000 documents; it splits words as cl100k_base does."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"`vocab_size` is {vocab_size}; it must be at least {MIN_VOCAB_SIZE}: all bytes and end-of-text."
        )
    tokenizer = Tokenizer(models.BPE())
    # Training takes the square of the length of a word, and a word may be a whole file of one letter.
    _set_byte_level(tokenizer, pre_tokenizers.Split(Regex(r"[\s\S]{1,512}"), behavior="isolated"))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    texts = islice(documents, TRAINING_DOCUMENTS)
    bar = tqdm(texts, desc="Training the tokenizer", unit=" documents", disable=not progress_bar)
    tokenizer.train_from_iterator(bar, trainer)
    _set_byte_level(tokenizer)
    return _as_fast_tokenizer(tokenizer, model_max_length)


def _set_byte_level(tokenizer: Tokenizer, *of_words: pre_tokenizers.PreTokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            *of_words,
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()


def _as_fast_tokenizer(tokenizer: Tokenizer, model_max_length: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )


def _merges(ranks: dict[bytes, int], names: dict[bytes, str]) -> list[tuple[str, str]]:
    """Every way to make a token from two others, in the order of the ranks."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(left, right) for left, right in splits if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(names[left], names[right]) for left, right in pairs]
    return merges


def _ranks_from_file(path: Path) -> dict[bytes, int]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}.") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != CL100K_SHA256:
        raise TokenizerError(
            f"{path} is not cl100k_base.tiktoken: its SHA-256 is {digest}, not {CL100K_SHA256}; download it again."
        )
    lines = (line.split() for line in content.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _ranks_from_tiktoken() -> dict[bytes, int]:
    try:
        from tiktoken_ext.openai_public import cl100k_base
    except ImportError as error:
        raise TokenizerError(
            'the cl100k_base ranks need tiktoken (pip install "lr-attnres[hub]", or in a clone '
            'pip install ".[hub]") or a cl100k_base.tiktoken file.'
        ) from error
    try:
        return cl100k_base()["mergeable_ranks"]
    except (OSError, ValueError) as error:  # requests' errors are OSErrors
        raise TokenizerError(
            f"tiktoken could not download the cl100k_base ranks ({type(error).__name__}); give a cl100k_base.tiktoken "
            "file, or set TIKTOKEN_CACHE_DIR to a folder that has them."
        ) from error
