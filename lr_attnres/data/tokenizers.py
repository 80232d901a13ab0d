"""Tokenizers: load and check them, build cl100k_base (the one of the released models), train small ones.

cl100k_base gives the same tokens as tiktoken. Its ranks are not part of this package: they come from a
`cl100k_base.tiktoken` file, or from tiktoken (the extra `lr-attnres[hub]`), which downloads them once into its cache.
"""

import base64
import hashlib
import json
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.utils import logging

from ..errors import LRAttnResError, one_line
from ..sources import check_has_file


logger = logging.get_logger(__name__)

CL100K_VOCAB_SIZE = 100_277
CL100K_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
TRAINING_DOCUMENTS = 100_000
END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 256 + 1  # byte-level BPE: every byte, and end-of-text
MAX_VOCAB_SIZE = 10**6
SPECIAL_TOKENS = {
    END_OF_TEXT: 100_257,
    "<|fim_prefix|>": 100_258,
    "<|fim_middle|>": 100_259,
    "<|fim_suffix|>": 100_260,
    "<|endofprompt|>": 100_276,
}
# tiktoken's pattern without its possessive quantifiers, which `tokenizers` does not support.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# For base models: roles in plain text, because the model has not seen special chat tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def load_tokenizer(
    source: str | os.PathLike, max_vocab_size: int | None = None, revision: str | None = None, token: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or Hub repository; raise if it has more than `max_vocab_size` tokens."""
    check_has_file(source, "tokenizer_config.json", revision, token)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, token=token, trust_remote_code=False)
    except Exception as error:  # the Rust library raises plain exceptions
        raise LRAttnResError(f"the tokenizer of {source} cannot be loaded: {one_line(error)}") from error
    if not isinstance(tokenizer.model_max_length, int | float):
        raise LRAttnResError(
            f"{source}: `model_max_length` of the tokenizer is {tokenizer.model_max_length!r}, no number."
        )
    if max_vocab_size is not None:
        check_vocabulary(tokenizer, max_vocab_size, source)
    return tokenizer


def find_tokenizer(source: str | os.PathLike, token: str | None = None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or Hub repository, or None without one; one that cannot be loaded is a warning."""
    path = Path(source)
    if not os.fspath(source) or (path.is_dir() and not (path / "tokenizer_config.json").is_file()):
        return None
    try:
        return load_tokenizer(source, token=token)
    except LRAttnResError as error:
        logger.warning(f"No tokenizer is used: {error}")
        return None


def open_tokenizer(
    source: str | os.PathLike | None, model_max_length: int = 2048, max_vocab_size: int | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer that a command is given: a folder or Hub repository with one, a `cl100k_base.tiktoken` file, or
    None or "cl100k_base" for the one that tiktoken has."""
    try:
        if source is None or source == "cl100k_base":
            tokenizer: PreTrainedTokenizerBase = cl100k_tokenizer(None, model_max_length)
        elif Path(source).is_file():
            tokenizer = cl100k_tokenizer(source, model_max_length)
        else:
            tokenizer = load_tokenizer(source)
        if max_vocab_size is not None:
            check_vocabulary(tokenizer, max_vocab_size, source or "tiktoken")
        return tokenizer
    except LRAttnResError as error:
        if source is None:
            raise
        raise LRAttnResError(f"`tokenizer`: {error}") from error


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest token id plus one. `len(tokenizer)` is too small if the ids have gaps, as in cl100k_base."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, max_vocab_size: int, source: str | os.PathLike) -> None:
    """Raise if the tokenizer has ids outside the embedding of a model."""
    if (size := vocabulary_size(tokenizer)) > max_vocab_size:
        rule = "use the tokenizer that the model was trained with"
        raise LRAttnResError(f"the tokenizer of {source} has {size} tokens, its model knows {max_vocab_size}: {rule}.")


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the vocabulary and the end-of-text token; for fast tokenizers also of the whole pipeline."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(f"{content}{tokenizer.eos_token_id}".encode()).hexdigest()


def folder_hash(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str | None:
    """As `tokenizer_hash`, from the file that `tokenizer` was loaded from.

    Another version of `tokenizers` may write the same tokenizer in another way; the file stays as it is.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    content = json.dumps(json.loads(file.read_text(encoding="utf-8")), separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(f"{content}{tokenizer.eos_token_id}".encode()).hexdigest()


def cl100k_tokenizer(
    ranks_file: str | os.PathLike | None = None, model_max_length: int = 2048
) -> PreTrainedTokenizerFast:
    """cl100k_base from a `cl100k_base.tiktoken` file or, without one, from tiktoken's cache or download."""
    converter: Any = TikTokenConverter()
    ranks = _ranks_from_file(Path(ranks_file)) if ranks_file is not None else _ranks_from_tiktoken()
    converter.load_tiktoken_bpe = lambda _: ranks
    vocabulary, merges = converter.extract_vocab_merges_from_model(None)
    tokenizer = Tokenizer(models.BPE(vocabulary | SPECIAL_TOKENS, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _byte_level()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return _as_fast_tokenizer(tokenizer, model_max_length)


def train_tokenizer(documents: Iterable[str], vocab_size: int, progress_bar: bool = False) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the first 100,000 documents, with the word pattern of cl100k_base.

    It has `vocab_size` tokens, or fewer if the text has nothing left to merge.
    """
    check_vocabulary_size(vocab_size, "vocab_size")
    tokenizer = Tokenizer(models.BPE())
    # Training time is quadratic in the length of a word: cut long words (a file of one letter) for the training.
    tokenizer.pre_tokenizer = _byte_level(pre_tokenizers.Split(Regex(r"[\s\S]{1,512}"), behavior="isolated"))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = islice(documents, TRAINING_DOCUMENTS)
    bar = tqdm(texts, desc="Training the tokenizer", unit=" documents", disable=not progress_bar)
    tokenizer.train_from_iterator(bar, trainer)
    tokenizer.pre_tokenizer = _byte_level()
    return _as_fast_tokenizer(tokenizer)


def check_vocabulary_size(size: int, name: str) -> None:
    """Raise unless a tokenizer of this size can be trained; `tokenizers` reserves memory for all of it at once."""
    if not MIN_VOCAB_SIZE <= size <= MAX_VOCAB_SIZE:
        smallest = f"{MIN_VOCAB_SIZE}, all bytes and end-of-text"
        raise LRAttnResError(f"`{name}` is {size}; it must be at least {smallest}, and at most {MAX_VOCAB_SIZE}.")


def _byte_level(*word_splitters: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, *word_splitters, to_bytes])


def _as_fast_tokenizer(tokenizer: Tokenizer, model_max_length: int = 2048) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )


def _ranks_from_file(path: Path) -> dict[bytes, int]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LRAttnResError(f"{path} cannot be read: {error.strerror}.") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != CL100K_SHA256:
        difference = f"its SHA-256 is {digest}, not {CL100K_SHA256}"
        raise LRAttnResError(f"{path} is not cl100k_base.tiktoken: {difference}; download it again.")
    lines = (line.split() for line in content.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _ranks_from_tiktoken() -> dict[bytes, int]:
    try:
        from tiktoken_ext.openai_public import cl100k_base
    except ImportError as error:
        install = 'pip install "lr-attnres[hub]", or in a clone pip install ".[hub]"'
        raise LRAttnResError(
            f"cl100k_base's ranks need tiktoken ({install}) or a cl100k_base.tiktoken file."
        ) from error
    try:
        return cl100k_base()["mergeable_ranks"]
    except (OSError, ValueError) as error:  # requests' errors are OSErrors
        advice = "give a cl100k_base.tiktoken file, or set TIKTOKEN_CACHE_DIR to a folder that has them"
        raise LRAttnResError(f"tiktoken could not download cl100k_base ({type(error).__name__}); {advice}.") from error
