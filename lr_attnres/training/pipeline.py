"""Pipeline parallelism: a model cut into stages for the schedules of `torch.distributed.pipelining`.

Shape letters: B batch, T tokens, D hidden size, R key rank, M sub-layers.

The cut lies between the write and the read of a site. So a stage passes on only what later sites read: the sources,
their logits for those sites, the open block and the queries. The next stage reads the site itself, and mixes an open
group again, which costs less than to send the mixes.
"""

from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from ..configuration_lr_attnres import LRAttnResConfig
from ..depth_routing import DepthSite, depth_block_ends, without_base
from ..depth_state import DepthState, block_source, read_site, site_columns
from ..errors import LRAttnResError
from ..modeling_lr_attnres import DEPTH_BACKENDS, LRAttnResDepthRead, LRAttnResForCausalLM
from .losses import ChunkedLoss


def pipeline_stage(model: LRAttnResForCausalLM, stage_index: int, num_stages: int) -> "StageModule":
    """The stage with number `stage_index` of a model, for `torch.distributed.pipelining.PipelineStage`.

    The first stage takes `input_ids`, the last one returns logits or, given `labels`, the loss. `position_ids`,
    `attention_mask` and `labels` are keyword arguments of `schedule.step` in every process. Parameters keep their
    names and are shared with `model`. A tied head is the exception: it is a copy in the last stage, so call
    `sum_tied_gradients` after the backward. Wrap the stage in DDP or FSDP2 before `PipelineStage`.
    """
    num_layers = len(model.model.layers)
    if not 1 <= num_stages <= num_layers:
        rule = f"it must lie in 1..{num_layers}: each stage needs a layer, and `num_hidden_layers` is {num_layers}"
        raise LRAttnResError(f"`num_stages` is {num_stages}; {rule}.")
    if not 0 <= stage_index < num_stages:
        raise LRAttnResError(f"`stage_index` is {stage_index}; it must lie in 0..{num_stages - 1}.")
    return StageModule(model, stage_index, num_stages)


def stage_layers(num_layers: int, stage_index: int, num_stages: int) -> range:
    """The layers of a stage. The first stages have one more if they cannot all have equally many."""
    ends = [0, *depth_block_ends(num_layers, num_stages)]
    return range(ends[stage_index], ends[stage_index + 1])


class DepthWrite(LRAttnResDepthRead):
    """The last site of a stage: writes the output of the sub-layer, and leaves the read to the next stage."""

    def forward(self, hidden_states, output, depth_state, output_depth_weights=False):  # type: ignore[no-untyped-def]
        state, _, weights = self.write(output, depth_state, output_depth_weights)
        return hidden_states, weights, state


class StageModule(nn.Module):
    """Consecutive layers of a model; with the embedding in the first stage, and norm and head in the last."""

    def __init__(self, model: LRAttnResForCausalLM, stage_index: int, num_stages: int):
        super().__init__()
        self.config = model.config
        self.autocast_dtype: torch.dtype | None = None  # for mixed precision
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1
        numbers = stage_layers(len(model.model.layers), stage_index, num_stages)
        layers = {str(number): model.model.layers[number] for number in numbers}
        is_routed = self.config.residual_type != "standard"
        # The site before this stage, and the last one of this stage: the cuts.
        self.entry = None if self.is_first or not is_routed else model.model.layers[numbers[0] - 1].mlp_read.site
        self.exit = None if self.is_last or not is_routed else model.model.layers[numbers[-1]].mlp_read.site
        if self.exit is not None:
            layers[str(numbers[-1])] = with_modules(
                layers[str(numbers[-1])], mlp_read=DepthWrite(self.config, self.exit)
            )
        kept = [*["embed_tokens", "depth_queries", "depth_embedding_key"] * self.is_first, *["norm"] * self.is_last]
        parts = {name: part for name, part in model.model.named_children() if name in [*kept, "rotary_emb"]}
        self.model = copy(model.model)
        self.model._modules = {**parts, "layers": nn.ModuleDict(layers)}
        if self.is_last:
            self.lm_head, self.chunked_loss = model.lm_head, model.chunked_loss
            if self.config.tie_word_embeddings and not self.is_first:
                weight = nn.Parameter(model.lm_head.weight.detach().clone(), model.lm_head.weight.requires_grad)
                self.lm_head = copy(model.lm_head)
                self.lm_head._parameters = {"weight": weight, "bias": None}

    def forward(self, *inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        dtype = self.autocast_dtype
        with torch.autocast(inputs[0].device.type, dtype) if dtype else nullcontext():
            return self.run(*inputs, **kwargs)

    def run(
        self,
        *inputs: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        output_depth_weights: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """`input_ids`, or what the stage before returned -> what the next stage takes; logits or loss at the end."""
        state: Any = DepthState()
        for tensor in inputs:
            if tensor.requires_grad:  # gradients are sent, which takes contiguous tensors
                tensor.register_hook(torch.Tensor.contiguous)
        if self.is_first:
            hidden_states = self.model.embed_tokens(inputs[0])
            state = self.model.start_depth_state(hidden_states, may_use_bank=False)
        elif self.entry is None:
            (hidden_states,) = inputs
        else:
            hidden_states, state = self.read_entry(inputs, self.entry)
        hidden_states, state = self.model.run_layers(
            self.model.layers.values(),
            hidden_states,
            state,
            attention_mask=attention_mask,
            position_ids=position_ids,
            output_depth_weights=output_depth_weights,
        )
        if not self.is_last:
            return hidden_states if self.exit is None else to_next_stage(state, self.exit)
        hidden_states = self.model.norm(hidden_states)
        if labels is None:
            return self.lm_head(hidden_states)
        loss = self.chunked_loss or ChunkedLoss()
        return loss(self.lm_head, hidden_states, labels, num_items_in_batch=num_items_in_batch)

    def read_entry(self, inputs: tuple[torch.Tensor, ...], site: DepthSite) -> tuple[torch.Tensor, DepthState]:
        """The read of the site before this stage: its sources were written there."""
        num_completed = site.num_sources - (not site.closes_block)
        num_parts = 0 if site.closes_block else 1 + (self.config.residual_type == "projected")
        counts = (1, int(self.config.depth_key_norm), num_completed, num_completed, num_parts, 0, 0)
        state = DepthState.unflatten(inputs, counts)
        partial_source = None if site.closes_block else block_source(state, state.partial, site, self.config)
        mixes_again = replace(site, opens_group=site.num_mixed > 1)
        backend = DEPTH_BACKENDS[self.model.depth_backend]
        return read_site(state, partial_source, mixes_again, state.values[0].dtype, *backend)


def with_modules(module: nn.Module, **modules: nn.Module) -> nn.Module:
    """A copy that shares all children but the given ones."""
    changed = copy(module)
    changed._modules = {**module._modules, **modules}
    return changed


def to_next_stage(state: DepthState, site: DepthSite) -> tuple[torch.Tensor, ...]:
    """The flat state, as `site` has been written, without the columns of earlier sites."""
    assert state.queries is not None
    logits = tuple(site_columns(each, site.sites_in_model, site.sites_in_model) for each in state.logits)
    queries = state.queries[-site.sites_in_model :]
    tensors, _ = state._replace(queries=queries, logits=logits, mixes=(), lses=None).flatten()
    return tuple(without_base(tensor.contiguous()) for tensor in tensors)


def pipeline_stage_args(
    config: LRAttnResConfig,
    stage_index: int,
    num_stages: int,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> dict[str, tuple[torch.Tensor, ...]]:
    """`input_args` and `output_args` of `PipelineStage` for micro-batches of `shape` [B, T], on the meta device. A
    stage in DDP needs them: otherwise torch infers them by an extra forward, and DDP raises as no backward follows."""
    with torch.device("meta"):
        model = LRAttnResForCausalLM(config).to(dtype)  # type: ignore[arg-type]
        outputs: tuple[torch.Tensor, ...] = (torch.zeros(shape, dtype=torch.long),)
    for index in range(stage_index + 1):
        inputs, results = outputs, pipeline_stage(model, index, num_stages)(*outputs)
        results = results if isinstance(results, tuple) else (results,)
        outputs = tuple(result.detach().requires_grad_(result.requires_grad) for result in results)
    return {"input_args": inputs, "output_args": outputs}


def sum_tied_gradients(*stages: PipelineStage) -> None:
    """Add the gradients that a tied weight has in the first and the last stage, in both of them. Call it in every
    process with its stages, once per optimizer step; untied embeddings need nothing."""
    gradients = {}
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            is_tied = (stage.is_first and name.endswith("embed_tokens.weight")) or (
                stage.is_last and name.endswith("lm_head.weight")
            )
            if is_tied and stage_config(stage).tie_word_embeddings and parameter.grad is not None:
                gradient = parameter.grad
                gradients[stage] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    if len(gradients) == 2:  # both in this process
        first, last = gradients.values()
        first += last
        last.copy_(first)
    elif gradients:
        ((stage, gradient),) = gradients.items()
        if stage.num_stages == 1:
            return
        other_stage = stage.num_stages - 1 if stage.is_first else 0
        group: Any = stage.group or dist.group.WORLD
        peer = dist.get_global_rank(group, stage.stage_index_to_group_rank[other_stage])
        other = torch.empty_like(gradient)
        exchange = [dist.P2POp(dist.isend, gradient, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        gradient += other


def stage_config(stage: PipelineStage) -> LRAttnResConfig:
    return next(module for module in stage.submod.modules() if isinstance(module, StageModule)).config


def boundary_elements(config: LRAttnResConfig, stage_index: int, num_stages: int) -> tuple[int, int, int]:
    """What crosses after a stage, in one direction: elements per token in the dtype of the model, elements per token
    in float32 (the logits), and float32 elements per micro-batch (the queries and the floor of the key norm)."""
    if config.residual_type == "standard":
        return config.hidden_size, 0, 0
    sites = DepthSite.schedule(2 * config.num_hidden_layers, config.num_depth_blocks)
    site = sites[2 * stage_layers(config.num_hidden_layers, stage_index, num_stages).stop - 1]
    num_completed = site.num_sources - (not site.closes_block)
    width = site.num_sources * config.hidden_size
    if config.residual_type == "projected" and not site.closes_block:
        width += config.depth_key_rank
    queries = site.sites_in_model * config.depth_key_rank + config.depth_key_norm
    return width, num_completed * site.sites_in_model * config.depth_heads, queries
