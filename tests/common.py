"""What the tests share: the variants, small configs, and models with no parameter at its initial value."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lr_attnres import LRAttnResConfig, LRAttnResForCausalLM
from lr_attnres.variants import RESIDUAL_TYPES


# Every residual type, full and in blocks, and each remaining switch that changes the maths.
VARIANTS = {
    "standard": {"residual_type": "standard"},
    "attnres_full": {"residual_type": "attnres", "num_depth_blocks": None},
    "attnres_block": {"residual_type": "attnres", "num_depth_blocks": 3},
    "projected_full": {"residual_type": "projected", "num_depth_blocks": None},
    "projected_block": {"residual_type": "projected", "num_depth_blocks": 3},
    "sliced_full": {"residual_type": "sliced", "num_depth_blocks": None},
    "sliced_block": {"residual_type": "sliced", "num_depth_blocks": 3},
    "projected_full_heads": {"residual_type": "projected", "num_depth_blocks": None, "depth_heads": 2},
    "sliced_block_heads": {"residual_type": "sliced", "num_depth_blocks": 3, "depth_heads": 4},
    "sliced_block_weighted_norms": {  # what an upgraded model has
        "residual_type": "sliced",
        "num_depth_blocks": 3,
        "norm_weight": True,
        "depth_scaled_eps": True,
        "rms_norm_eps": 1e-3,
    },
}
ROUTED = [name for name in VARIANTS if name != "standard"]
ROUTED_TYPES = [name for name in RESIDUAL_TYPES if name != "standard"]
ONE_OF_EACH = ["standard", "attnres_full", "projected_block", "sliced_block"]  # where a test takes its time
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "depth_key_rank": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small_config(variant: str = "sliced_block", **overrides) -> LRAttnResConfig:
    return LRAttnResConfig(**(SIZES | VARIANTS[variant] | overrides))


@torch.no_grad()
def perturb(model: torch.nn.Module) -> torch.nn.Module:
    """Weights large enough that every term matters, queries far from zero, norm weights far from one."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif "depth_queries" in name:
            parameter.normal_()
        else:
            parameter.normal_(std=0.25)
    return model


def small_model(variant: str = "sliced_block", model_class=LRAttnResForCausalLM, **overrides) -> torch.nn.Module:
    return perturb(model_class(small_config(variant, **overrides))).eval()


def random_tokens(*shape: int, vocab_size: int = SIZES["vocab_size"]) -> torch.Tensor:
    return torch.randint(3, vocab_size, shape)


BYTE_VOCAB_SIZE = 257


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one that ends a text: a tokenizer that needs no file, with a chat template."""
    letters = [*bytes_to_unicode().values(), "<|end|>"]
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", chat_template=template
    )


def save_text_model(folder, variant: str = "sliced_block", **overrides) -> LRAttnResForCausalLM:
    """A small model and its tokenizer, saved together; it never ends a text, so that lengths are known."""
    model = small_model(variant, vocab_size=BYTE_VOCAB_SIZE, max_position_embeddings=256, **overrides)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = BYTE_VOCAB_SIZE - 1
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model
