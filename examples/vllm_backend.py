"""What vLLM's Transformers backend asks of a model, shown to hold for a saved folder; vLLM itself is not needed.

    python examples/vllm_backend.py [FOLDER]      (without FOLDER: a tiny random model)

vLLM loads the bare model through `auto_map`, puts its own attention in place of ours, and gives it, by way of the
model's keyword arguments, one cache per layer. With vLLM installed and a GPU, the command is printed at the end.
"""

import sys
import tempfile

import torch
from tiny_model import save_tiny_model
from transformers import AutoConfig, AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lr_attnres  # noqa: F401


class PagedAttention:
    """Stands in for vLLM's attention layer: flat tokens in, flat tokens out, [T, heads * head_dim]."""

    def __init__(self, scaling: float):
        self.scaling, self.calls = scaling, 0

    def __call__(self, query, key, value):
        self.calls += 1
        query, key, value = (states[0] for states in (query, key, value))  # one flat batch: [heads, T, head_dim]
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scaling, enable_gqa=True
        )
        return output.transpose(0, 1).flatten(1)


def attention_of_the_engine(module, query, key, value, attention_mask, attention_instances=None, **kwargs):
    assert attention_mask is None, "the engine masks by itself"
    return attention_instances[module.layer_idx](query, key, value), None


@torch.no_grad()
def check(folder: str) -> dict[str, bool]:
    """Each condition and whether it holds."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float64)  # so that "the same" can be strict
    tokens = torch.arange(12).unsqueeze(0) % config.vocab_size
    positions = torch.arange(12).unsqueeze(0)
    expected = model(tokens, position_ids=positions, use_cache=False).last_hidden_state

    ALL_ATTENTION_FUNCTIONS.register("engine", attention_of_the_engine)
    model.set_attn_implementation("engine")
    layers = {i: PagedAttention(config.head_dim**-0.5) for i in range(config.num_hidden_layers)}
    output = model(tokens, position_ids=positions, use_cache=False, attention_instances=layers).last_hidden_state
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    sharded = {name.replace("*", "0") for name in config.base_model_tp_plan}
    return {
        "auto_map names the bare model": "AutoModel" in config.auto_map,
        "the model declares the attention interface": model._supports_attention_backend,
        "every layer used the engine's attention, once": all(layer.calls == 1 for layer in layers.values()),
        "the output is the same": torch.allclose(output, expected, rtol=0, atol=1e-8),
        "attention is marked causal": all(layer.self_attn.is_causal for layer in model.layers),
        "tensor parallelism covers every projection": {n for n in linear if n.startswith("layers.0.")} <= sharded,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        folder = sys.argv[1] if len(sys.argv) > 1 else f"{work}/model"
        if len(sys.argv) == 1:
            save_tiny_model(folder)
        conditions = check(folder)
    for condition, holds in conditions.items():
        print(f"{'yes' if holds else 'NO '}  {condition}")
    print("vllm serve owner/name --trust-remote-code --model-impl transformers")
    sys.exit(not all(conditions.values()))
