"""What depth routing should cost on a GPU, from bytes, launches and a data sheet: no measurement is in here.

A step takes `flops / peak + bytes / bandwidth + launches * LAUNCH`. Each kernel reads its wide inputs once and writes
its wide outputs once. Everything is per token and in bfloat16 (2 bytes), mixes of a group in float32 (4).

Shape letters: D hidden size, R key rank, L layers, S sources of a group, G its sites, Y younger sources of a site.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from ..configuration_lr_attnres import LRAttnResConfig
from ..depth_routing import DepthSite
from ..modeling_lr_attnres import LRAttnResForCausalLM
from ..variants import variant_fields
from .cost import depth_cost


class Sheet(NamedTuple):
    """Dense bfloat16 products without sparsity, and the memory, of NVIDIA's data sheet."""

    flops: float  # per second
    bandwidth: float  # bytes per second


SHEETS = {"A100": Sheet(312e12, 2.04e12), "H100": Sheet(990e12, 3.35e12), "B200": Sheet(2250e12, 8.0e12)}
LAUNCH = 2e-6  # seconds from the start of a small kernel to the next one's, in a CUDA graph
PHASES = ("training", "prefill", "decoding")
CONTEXT = 2048  # tokens per row in training and prefill, and in the cache of a decoding step
NO_LAUNCH = (
    *("view", "slice", "select", "unsqueeze", "squeeze", "expand", "transpose", "alias", "t", "permute", "unbind"),
    *("split", "split_with_sizes", "detach", "_unsafe_view", "as_strided", "_reshape_alias", "lift_fresh"),
    *("empty", "empty_like", "new_empty"),
)


def find_gpu(name: str) -> str | None:
    """The data sheet of a device, by its name."""
    return next((gpu for gpu in SHEETS if gpu in name), None)


def paper_config(variant: str) -> LRAttnResConfig:
    return LRAttnResConfig(**variant_fields(variant))


def depth_bytes(config: LRAttnResConfig, phase: str) -> int:
    """Bytes of the residual side per token: of its additions in `standard`, else of its sums and reads as kernels."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    addition = 6 * hidden * (2 if phase == "training" else 1)  # two inputs and an output; two gradients and their sum
    if config.residual_type == "standard":
        return 2 * layers * addition
    sites = DepthSite.schedule(2 * layers, config.num_depth_blocks)
    # Keys beside the values: what is emitted, read in bfloat16, and its sum, read and written in float32.
    keys = len(sites) * 10 * config.depth_key_rank if config.residual_type == "projected" else 0
    if phase == "decoding":  # complete blocks, embedding, output; the open block read and written; the hidden states
        return keys + sum(2 * hidden * (site.num_sources + 2 + (site.num_in_block > 1)) for site in sites)
    total = keys * (2 if phase == "training" else 1) + sum(addition for site in sites if site.num_in_block > 1)
    for site in sites:
        if site.opens_group:  # values in, mixes out; backward: gradients of mixes and values in, of values out
            S, G = site.num_mixed, site.sites_in_group
            total += hidden * (2 * S + 4 * G) + (hidden * (4 * G + 4 * S) if phase == "training" else 0)
        Y, mix = site.num_sources - site.num_mixed, 4 if site.num_mixed > 1 else 2
        total += hidden * (mix + 2 * Y + 2)
        if phase == "training":
            total += hidden * (4 + 2 * Y + mix + 2 * Y)
    return total


def rest_bytes(config: LRAttnResConfig, phase: str) -> float:
    """Bytes of everything else per token: activations, or in decoding the weights and the cache of one row."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    if phase == "decoding":
        weights = depth_cost(config).core_macs + depth_cost(config).key_projection_macs + hidden * config.vocab_size
        return 2 * weights + 2 * 2 * layers * hidden * CONTEXT
    # In and out of norms (4 D), norms of queries and keys (4 D), RoPE (4 D), attention (4 D), products (8 D + 3 m),
    # activation (3 m); in training twice as many backward, and the logits forward and backward.
    forward = 2 * layers * (24 * hidden + 6 * config.intermediate_size)
    return forward if phase == "prefill" else 3 * forward + 8 * config.vocab_size


def flops(config: LRAttnResConfig, phase: str) -> float:
    """Of the products per token; those of the reads are no products of matrices and wait for memory."""
    cost = depth_cost(config)
    macs = cost.core_macs + cost.key_projection_macs + config.num_hidden_layers * config.hidden_size * CONTEXT
    head = 0 if phase == "prefill" else config.hidden_size * config.vocab_size
    return 2 * (macs + head) * (3 if phase == "training" else 1)


class LaunchCounter(TorchDispatchMode):
    """Operators that are kernels on a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(function).split(".")[1] not in NO_LAUNCH
        return function(*args, **kwargs or {})


class FusedNorm(TorchFunctionMode):
    """A norm is one kernel on a GPU, but several operators on the meta device, where this counts."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.rms_norm:
            return torch.neg(args[0])
        return function(*args, **kwargs or {})


@cache
def torch_launches(variant: str, tokens: int) -> int:
    """Launches of an eager forward without gradients, counted by running it on tensors without data."""
    with torch.device("meta"), torch.no_grad():
        model = LRAttnResForCausalLM(paper_config(variant)).eval()
        arguments = {"input_ids": torch.zeros(1, tokens, dtype=torch.long), "use_cache": True}
        arguments["past_key_values"] = DynamicCache(config=model.config)
        with LaunchCounter() as counter, FusedNorm():
            model(**arguments, logits_to_keep=1)
    return counter.count


def decoding_launches(variant: str, backend: str) -> int:
    """Of one token. The kernel of a site takes the place of the addition in `standard`; the key of the embedding is
    one product more."""
    if variant == "standard" or backend == "torch":
        return torch_launches(variant, 1)
    return torch_launches("standard", 1) + variant.startswith("projected")


def predicted_seconds(variant: str, phase: str, gpu: str, backend: str = "triton") -> float:
    """Per token. Launches count in decoding: elsewhere many tokens share them."""
    config, sheet = paper_config(variant), SHEETS[gpu]
    launches = decoding_launches(variant, backend) if phase == "decoding" else 0
    moved = depth_bytes(config, phase) + rest_bytes(config, phase)
    return flops(config, phase) / sheet.flops + moved / sheet.bandwidth + launches * LAUNCH


def predicted_ratio(variant: str, phase: str, gpu: str, backend: str = "triton") -> float:
    """The time of a step over that of `standard`: reads as kernels or compiled; decoding in a CUDA graph."""
    return predicted_seconds(variant, phase, gpu, backend) / predicted_seconds("standard", phase, gpu)
