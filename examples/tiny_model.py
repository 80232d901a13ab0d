"""Save a tiny random model with a byte-level tokenizer. The other examples use it when no model is given.

python examples/tiny_model.py outputs/tiny
"""

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lr_attnres import LRAttnResConfig, LRAttnResForCausalLM
from lr_attnres.data.tokenizers import CHAT_TEMPLATE


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and an end-of-text token."""
    vocabulary = {letter: index for index, letter in enumerate([*bytes_to_unicode().values(), "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


def save_tiny_model(folder: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LRAttnResConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        num_depth_blocks=4,
        depth_key_rank=16,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LRAttnResForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/tiny_model.py FOLDER")
    save_tiny_model(sys.argv[1])
    print(f"saved a tiny model in {sys.argv[1]}")
