"""The checks of `lr-attnres doctor`, in a process of their own: a product that this CPU cannot compute kills it.

A check reads all sites of a schedule with one backend and compares hidden states and every gradient with the naive
read in float64, from the same rounded inputs. Each result is one line of JSON on standard output.

Shape letters: B batch, T tokens, D hidden size, R key rank, M sub-layers.
"""

import json
import math
import sys
import time
from typing import Any, NamedTuple

import torch

from ..configuration_lr_attnres import LRAttnResConfig
from ..depth_routing import DepthSite, depth_rms_norm, naive_depth_read, split_heads
from ..depth_state import (
    DepthBank,
    KernelBank,
    emit,
    normalizes_emitted_keys,
    read_site,
    scaled_queries,
    start_state,
    write_source,
)
from ..modeling_lr_attnres import DEPTH_BACKENDS
from ..variants import variant_fields


class Check(NamedTuple):
    device: str
    backend: str  # torch, compiled, triton; product: one matrix product, without which no model runs
    dtype: str
    size: str = "small"  # a key of SIZES


# Root mean square of the error over that of the exact numbers. Block sums are rounded to the dtype once per sub-layer,
# and a gradient is a difference of dot products with rounded hidden states: some 4 roundings of 2^-9 in bfloat16. A
# wrong source or a wrong weight gives an error of order 1.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-6, "float16": 2**-9}
HEADS = ("attnres-full-h2", "projected-full-r12-h2", "projected-n3-r16-h2", "sliced-n3-r10-h2")
VARIANTS = (*HEADS, "attnres-n3", "projected-full-r5", "projected-n3-r5", "sliced-full-r5", "sliced-n3-r5")
SIZES: dict[str, dict[str, Any]] = {
    "small": {"variants": VARIANTS, "layers": 3, "hidden_size": 80, "tokens": (2, 7)},
    "paper": {"variants": ("projected-n8-r32", "sliced-n8-r64"), "layers": 24, "hidden_size": 1024, "tokens": (1, 32)},
}


def run_check(check: Check) -> dict[str, float]:
    """-> the largest error of each thing that is compared."""
    dtype = getattr(torch, check.dtype)
    if check.backend == "product":
        x, weight = (torch.randn(256, 256, device=check.device).to(dtype).requires_grad_() for _ in range(2))
        return {"product": relative_error(x @ weight, x.double() @ weight.double())}
    errors: dict[str, float] = {}
    size = SIZES[check.size]
    # Compiling takes long: one variant of each size and, in the small one, depth heads.
    compiled = [variant for variant in size["variants"] if variant.startswith("sliced-n")]
    for variant in compiled if check.backend == "compiled" else size["variants"]:
        config = read_config(variant, size)
        for name, error in compare_reads(config, check, dtype, size["tokens"]).items():
            errors[name] = max(error, errors.get(name, 0.0))
    return errors


def read_config(variant: str, size: dict[str, Any]) -> LRAttnResConfig:
    sizes = {"num_hidden_layers": size["layers"], "hidden_size": size["hidden_size"], "num_attention_heads": 1}
    return LRAttnResConfig(**sizes, **variant_fields(variant))


def compare_reads(config: LRAttnResConfig, check: Check, dtype: torch.dtype, shape: tuple) -> dict[str, float]:
    rank, sites = config.depth_key_rank, 2 * config.num_hidden_layers
    width = config.hidden_size + (rank if config.residual_type == "projected" else 0)
    random = torch.Generator().manual_seed(0)
    outputs = torch.randn(sites + 1, *shape, width, generator=random).to(check.device, dtype).requires_grad_()
    queries = (torch.randn(sites, rank, generator=random) / math.sqrt(rank)).to(check.device).requires_grad_()
    gradient = torch.randn(sites, *shape, config.hidden_size, generator=random).to(check.device, dtype)

    def with_gradients(read: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [outputs.detach().to(dtype).requires_grad_(), queries.detach().clone().requires_grad_()]
        leaves[1] = leaves[1].detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        hidden = torch.stack(read(config, *leaves))
        return [hidden, *torch.autograd.grad(hidden, leaves, gradient.to(hidden.dtype))]

    read: Any = triton_read if check.backend == "triton" else torch_read
    if check.backend == "compiled":
        torch._dynamo.reset()
        read = torch.compile(read, fullgraph=True)
    exact = with_gradients(naive_read, torch.float64)
    names = ("hidden states", "gradient of the outputs", "gradient of the queries")
    errors = dict(zip(names, map(relative_error, with_gradients(read, dtype), exact)))
    if check.backend != "compiled":
        errors["generation"] = relative_error(step_read(config, outputs, queries, check.backend), exact[0][:, :, :1])
    return errors


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    error = (actual.detach().double() - exact.detach()).square().mean().sqrt() / exact.detach().square().mean().sqrt()
    return error.item() if error.isfinite() else math.inf


def torch_read(
    config: Any, outputs: torch.Tensor, queries: torch.Tensor, backend: str = "torch"
) -> list[torch.Tensor]:
    """What a model does: outputs [M + 1, B, T, D or D + R], the embedding first -> M hidden states [B, T, D]."""
    embedding, *key = parts(config, outputs[0])
    scaled = scaled_queries(split_heads(queries, config.depth_heads), config.rms_norm_eps)
    state, hidden = start_state(config, embedding, key[0] if key else None, *scaled), []
    for site, output in zip(DepthSite.schedule(len(queries), config.num_depth_blocks), outputs[1:]):
        state, newest = write_source(state, emit(config, *parts(config, output)), site, config)
        read, state = read_site(state, newest, site, outputs.dtype, *DEPTH_BACKENDS[backend])
        hidden.append(read)
    return hidden


def triton_read(config: Any, outputs: torch.Tensor, queries: torch.Tensor) -> list[torch.Tensor]:
    return torch_read(config, outputs, queries, "triton")


def parts(config: LRAttnResConfig, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A value and, in `projected`, a key."""
    return output.split(config.hidden_size, dim=-1) if config.residual_type == "projected" else (output,)


def naive_read(config: LRAttnResConfig, outputs: torch.Tensor, queries: torch.Tensor) -> list[torch.Tensor]:
    """The same, each site and head from its definition."""
    sources, hidden, rank, eps = [parts(config, outputs[0])], [], config.depth_key_rank, config.rms_norm_eps
    heads = config.depth_heads
    for site in DepthSite.schedule(len(queries), config.num_depth_blocks):
        value, *key = parts(config, outputs[site.index])
        if normalizes_emitted_keys(config):
            key = [torch.cat([depth_rms_norm(part, eps) for part in key[0].chunk(heads, -1)], dim=-1)]
        if site.num_in_block > 1:
            value, *key = (total + part for total, part in zip(sources.pop(), (value, *key)))
        sources.append((value, *key))
        values = zip(*(source[0].chunk(heads, -1) for source in sources))
        keys = zip(*(source[-1][..., -rank:].chunk(heads, -1) for source in sources))
        reads = zip(values, keys, queries[site.index - 1].chunk(heads))
        hidden.append(torch.cat([naive_depth_read(list(v), list(k), query, eps) for v, k, query in reads], dim=-1))
    return hidden


@torch.no_grad()
def step_read(config: LRAttnResConfig, outputs: torch.Tensor, queries: torch.Tensor, backend: str) -> torch.Tensor:
    """The first token as a step of generation reads it."""
    embedding, *key = parts(config, outputs[0, :, :1])
    schedule = DepthSite.schedule(len(queries), config.num_depth_blocks)
    start = (config, schedule[-1].num_sources, embedding, key[0] if key else None)
    if backend == "triton":
        bank: DepthBank = KernelBank(*start, queries)
    else:
        by_head = split_heads(queries, config.depth_heads)
        bank = DepthBank(*start, *scaled_queries(by_head, config.rms_norm_eps))
    return torch.stack([bank.read(site, outputs[site.index, :, :1], outputs.dtype)[0] for site in schedule])


def main() -> None:
    for fields in json.loads(sys.argv[1]):
        start, result = time.perf_counter(), dict[str, Any]()
        try:
            result["errors"] = run_check(Check(*fields))
        except Exception as error:
            result["failure"] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300]
        print(json.dumps(result | {"seconds": round(time.perf_counter() - start, 2)}), flush=True)


if __name__ == "__main__":
    main()
