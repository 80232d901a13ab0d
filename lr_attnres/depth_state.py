"""What travels from site to site: the sources written so far, and what a group of sites has already mixed.

Shape letters: B batch, T tokens, D hidden size, R key rank, M sub-layers, S sources, G sites of a group, H depth
heads. What sub-layers emit is summed as it is; a block that becomes a source is cut into heads, as in `depth_routing`.

`write_source` adds the output of a sub-layer to a `DepthState`, `read_site` reads a site from it. A step of
generation, few tokens without gradients, does the same on a `DepthBank`.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from itertools import islice
from typing import Any, NamedTuple

import torch

from .configuration_lr_attnres import LRAttnResConfig
from .depth_routing import DepthSite, depth_logits, depth_rms_norm, join_heads, split_heads, without_base
from .depth_routing_triton import StepOptions, StepTables, check_values, new_step_tables, step_site


class Source(NamedTuple):
    value: torch.Tensor  # [B, T, D]
    logits: torch.Tensor  # [B, T, sites that read it]


class DepthState(NamedTuple):
    """The sources of one forward, as a site leaves them to the next. Empty in `standard`."""

    queries: torch.Tensor | None = None  # [M, R] or [M, H, R / H], scaled for `depth_logits`
    floor: torch.Tensor | None = None  # of the key norm, see `depth_logits`; None without key norm
    values: tuple[torch.Tensor, ...] = ()  # of the completed sources, oldest first: [B, T, D]
    logits: tuple[torch.Tensor, ...] = ()  # of the completed sources for the sites after them: [B, T, sites]
    partial: tuple[torch.Tensor, ...] = ()  # sums of the open block: what `emit` returns
    mixes: tuple[torch.Tensor, ...] = ()  # phase 1 for the sites left in the group: [B, T, D]
    lses: torch.Tensor | None = None  # log-sum-exps of phase 1 for all sites of the group: [B, T, G]

    def flatten(self) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        """All tensors, and how many each field has. Layers take and return this form, because reentrant
        checkpointing sees positional tensors alone."""
        fields = [field if isinstance(field, tuple) else () if field is None else (field,) for field in self]
        return tuple(tensor for field in fields for tensor in field), tuple(map(len, fields))

    @classmethod
    def unflatten(cls, tensors: Sequence[torch.Tensor], counts: tuple[int, ...]) -> "DepthState":
        remaining = iter(tensors)
        queries, floor, values, logits, partial, mixes, lses = (tuple(islice(remaining, n)) for n in counts)
        optional = [field[0] if field else None for field in (queries, floor, lses)]
        return cls(optional[0], optional[1], values, logits, partial, mixes, optional[2])

    def written_since(self, earlier: "DepthState") -> "DepthState":
        """The new tensors alone: FSDP2 wraps the inputs of a layer in views and warns if a layer returns them."""
        num_old = len(earlier.values)
        # No new mixes if the group was opened before this layer, or if no site of it is left.
        has_new_mixes = self.lses is not earlier.lses and len(self.mixes) > 0
        return DepthState(
            values=self.values[num_old:],
            logits=self.logits[num_old:],
            partial=self.partial,
            mixes=self.mixes if has_new_mixes else (),
            lses=self.lses if has_new_mixes else None,
        )

    def with_written(self, tensors: Sequence[torch.Tensor], counts: tuple[int, ...], site: DepthSite) -> "DepthState":
        """This state and what a layer has written; `site` is the last one of the layer."""
        new = DepthState.unflatten(tensors, counts)
        group = new if len(new.mixes) > 0 else self
        return DepthState(
            self.queries,
            self.floor,
            (*self.values, *new.values),
            (*self.logits, *new.logits),
            new.partial,
            group.mixes[len(group.mixes) - site.mixes_left :],
            group.lses if site.mixes_left else None,
        )


def normalizes_emitted_keys(config: LRAttnResConfig) -> bool:
    """The keys of `projected` are normalised before they are summed into a block. With depth heads, the released
    models also normalise keys that are summed with no other: it makes a difference for a key close to zero."""
    is_summed = not config.has_full_sources or config.depth_heads > 1
    return config.residual_type == "projected" and config.depth_key_norm and is_summed


def emit(
    config: LRAttnResConfig, value: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor] | tuple[torch.Tensor, torch.Tensor]:
    """What one sub-layer, or the embedding, adds to its block: `(value,)` [B, T, D], if the last R coordinates of the
    value are its key, or `(value, key)`, where the key is [B, T, R]."""
    if key is None:
        return (value,)
    if not normalizes_emitted_keys(config):
        return value, key
    # contiguous(): the key is a view, and saving it for the backward would keep the whole output of the projection.
    return value, join_heads(depth_rms_norm(split_heads(key.contiguous(), config.depth_heads), config.rms_norm_eps))


def scaled_queries(
    queries: torch.Tensor, key_norm_eps: float | None, logit_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries [M, R], or [M, H, R / H] with heads -> the same, scaled, and the floor of the key norm: see
    `depth_logits`."""
    if key_norm_eps is None:
        return queries * logit_scale, None
    rank = queries.shape[-1]
    return queries * (logit_scale * math.sqrt(rank)), queries.new_full((), math.sqrt(rank * key_norm_eps))


def start_state(
    config: LRAttnResConfig,
    embedding: torch.Tensor,
    key: torch.Tensor | None,
    queries: torch.Tensor,
    floor: torch.Tensor | None,
) -> DepthState:
    """The state with one source, the embedding."""
    value, *keys = emit(config, embedding, key)
    first_key = (keys or [value])[0][..., -config.depth_key_rank :]
    logits = depth_logits(split_heads(first_key, config.depth_heads), queries, floor)
    return DepthState(queries, floor, values=(split_heads(value, config.depth_heads),), logits=(logits,))


def write_source(
    state: DepthState, emitted: tuple[torch.Tensor, ...], site: DepthSite, config: LRAttnResConfig
) -> tuple[DepthState, Source | None]:
    """Add what sub-layer `site.index` emitted to its block -> the state, and the open block as a source of this site
    alone. A complete block becomes a source of this and all later sites instead: then None."""
    if site.num_in_block == 1:
        partial = tuple(without_base(part) for part in emitted)
    else:
        partial = tuple(total + part for total, part in zip(state.partial, emitted))
    value, logits = block_source(state, partial, site, config)
    if not site.closes_block:
        return state._replace(partial=partial), Source(value, logits)
    return state._replace(values=(*state.values, value), logits=(*state.logits, logits), partial=()), None


def block_source(
    state: DepthState, partial: tuple[torch.Tensor, ...], site: DepthSite, config: LRAttnResConfig
) -> Source:
    """The block so far, with logits for this site or, if the block is complete, for this and all later sites."""
    value, key = partial if len(partial) == 2 else (partial[0], partial[0][..., -config.depth_key_rank :])
    scale = site.num_in_block**-config.depth_block_exponent
    if scale != 1:
        keys_are_normalised = config.residual_type == "projected" and config.depth_key_norm  # one by one, in `emit`
        value, key = value * scale, key if keys_are_normalised else key * scale
    assert state.queries is not None
    first = len(state.queries) - site.sites_in_model
    readers = state.queries[first:] if site.closes_block else state.queries[first : first + 1]
    value, key = split_heads(value, config.depth_heads), split_heads(key, config.depth_heads)
    logits = depth_logits(key, readers, state.floor)
    prior = config.depth_count_prior * math.log(site.num_in_block)
    return Source(value, logits if prior == 0 else logits + prior)


def site_columns(table: torch.Tensor, num_left: int, num_sites: int = 1) -> torch.Tensor:
    """The first `num_sites` of the last `num_left` columns; the last column belongs to the last site."""
    start = table.shape[-1] - num_left
    return table[..., start : start + num_sites]


def read_site(
    state: DepthState,
    partial_source: Source | None,
    site: DepthSite,
    dtype: torch.dtype,
    mix_older: Callable[..., tuple[torch.Tensor, ...]],
    merge_younger: Callable[..., torch.Tensor],
) -> tuple[torch.Tensor, DepthState]:
    """The read of a site; inside a block, `partial_source` is its newest source.
    -> hidden [B, T, D] in `dtype`; the state without the mix that was used."""
    if site.opens_group:  # phase 1
        older = state.logits[: site.num_mixed]
        logits = [site_columns(logits, site.sites_in_model, site.sites_in_group) for logits in older]
        *mixes, lses = mix_older(state.values[: site.num_mixed], torch.stack(logits, dim=-1))
        state = state._replace(mixes=tuple(mixes), lses=lses)
    if site.num_mixed == 1:
        mix, lse = state.values[0], site_columns(state.logits[0], site.sites_in_model)
    else:
        assert state.lses is not None
        mix, lse = state.mixes[0], site_columns(state.lses, site.sites_in_group)
        state = state._replace(mixes=state.mixes[1:])

    younger = list(zip(state.values, state.logits))[site.num_mixed :]  # phase 2
    sources = [(value, site_columns(logits, site.sites_in_model)) for value, logits in younger]
    if partial_source is not None:
        sources.append(partial_source)
    return join_heads(merge_younger(mix, lse, sources, dtype)), state


def site_weights(state: DepthState, partial_source: Source | None, site: DepthSite) -> torch.Tensor:
    """The depth weights of a site, [B, T, S] or [B, T, H, S], oldest source first."""
    logits = [site_columns(source, site.sites_in_model) for source in state.logits]
    if partial_source is not None:
        logits.append(partial_source.logits)
    return torch.cat(logits, dim=-1).softmax(dim=-1)


class BankRow(NamedTuple):
    """Views of one row of a `DepthBank`. With depth heads, keys and logits have the axis H."""

    value: torch.Tensor  # [B, T, D]
    key: torch.Tensor  # [B, T, R] or [B, T, H, R / H]
    columns: torch.Tensor  # the key as a factor of the product: [R, BT] or [H, R / H, BT]
    normed: torch.Tensor  # what the norm of the key is taken of: the key and, with one head, the floor
    logits: torch.Tensor  # [M, BT] or [H, M, BT]


class DepthBank:
    """The sources of new tokens, in tables that a step of generation writes and reads in place. No gradients. The
    tokens may be of several sequences, one each (T = 1) or packed into one row (B = 1).

    Such a step is bound by the number of operations, not by their size. So nothing is grouped and views are made in
    advance: a site adds the output to the row of its block, computes that row's logits for all sites, and takes one
    softmax and one product over all rows.

    A table has one row per source. The keys are the last R coordinates of the values or, where `emit` returns a key,
    have a table of their own. A depth head is a slice of each row; the product treats it as one more sequence.
    With one head, the floor of the key norm is a column behind the keys: the norm of both is the divisor of
    `depth_logits`. Logits of rows that are not written yet are -inf.
    """

    def __init__(
        self,
        config: LRAttnResConfig,
        num_sources: int,
        embedding: torch.Tensor,
        embedding_key: torch.Tensor | None,
        queries: torch.Tensor,
        floor: torch.Tensor | None = None,
    ):
        """embedding [B, T, D], its key [B, T, R] in `projected`; queries and floor as for `depth_logits`."""
        self.config, self.heads = config, config.depth_heads
        self.queries = queries if self.heads == 1 else queries.transpose(0, 1).contiguous()  # [H, M, R / H]
        self.product = torch.mm if self.heads == 1 else torch.bmm
        self.shape, self.num_tokens = embedding.shape, embedding.shape[:2].numel()
        self.sizes = [config.hidden_size, config.depth_key_rank]  # of an output with a key
        self.width_with_key = sum(self.sizes)
        self.adds_normalized_keys = normalizes_emitted_keys(config)
        self.floor = self.row_floor = floor
        if self.adds_normalized_keys and floor is not None:  # stored without their factor sqrt(R / H), like the floor
            self.row_floor = floor / math.sqrt(queries.shape[-1])
        self.floor_columns = int(floor is not None and self.heads == 1)
        value, *keys = emit(config, embedding) if embedding_key is None else (embedding, embedding_key)
        self.values = self.table(queries, value, num_sources, 0 if keys else self.floor_columns)
        self.keys = self.table(queries, keys[0], num_sources, self.floor_columns) if keys else None
        self.logits = queries.new_full((len(queries), self.num_tokens * self.heads, 1, num_sources), -math.inf)
        self.make_views()
        self.write(0, torch.cat([value, *keys], dim=-1))

    def table(self, like: torch.Tensor, content: torch.Tensor, num_sources: int, floor_columns: int) -> torch.Tensor:
        """Rows of zeros, to which outputs are added. They are finite before that, too: 0 * NaN would be NaN."""
        table = like.new_zeros(num_sources, *self.shape[:2], content.shape[-1] + floor_columns)
        if floor_columns and self.row_floor is not None:
            table[..., -1] = self.row_floor
        return table

    def make_views(self) -> None:
        num_sources, (hidden_size, rank) = len(self.values), self.sizes
        values = self.values[..., :hidden_size]
        keys = self.values if self.keys is None else self.keys
        keys = keys[..., keys.shape[-1] - self.floor_columns - rank :]  # and the floor
        logits = self.logits.view(-1, self.num_tokens, self.heads, num_sources).permute(3, 2, 0, 1)
        if self.heads == 1:
            normed, logits = keys.flatten(1, 2).transpose(1, 2), logits.squeeze(1)
            keys, columns = keys[..., :rank], normed[:, :rank]
        else:
            keys = keys.unflatten(-1, (self.heads, -1))
            normed = columns = keys.flatten(1, 2).permute(0, 2, 3, 1)
        views = (values, keys, columns, normed, logits)
        self.rows = [*map(BankRow, *(view.unbind() for view in views))]
        self.site_logits = self.logits.unbind()
        # [BT H, rows, D / H]
        by_head = values.flatten(1, 2) if self.heads == 1 else values.view(num_sources, self.logits.shape[1], -1)
        self.values_by_head = by_head.transpose(0, 1)

    def to(self, device: torch.device | str | int, **_: Any) -> "DepthBank":
        """Accelerate's hooks call this between layers on different devices."""
        values = self.values.to(device)
        if values is self.values:
            return self
        moved = copy(self)
        moved.values, moved.queries, moved.logits = values, self.queries.to(device), self.logits.to(device)
        moved.keys, moved.floor, moved.row_floor = (
            None if tensor is None else tensor.to(device) for tensor in (self.keys, self.floor, self.row_floor)
        )
        moved.make_views()
        return moved

    def read(
        self, site: DepthSite, output: torch.Tensor, dtype: torch.dtype, output_depth_weights: bool | None = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write what sub-layer `site.index` returned, then read -> hidden [B, T, D] and, if asked for, weights
        [B, T, S] or [B, T, H, S]."""
        self.write(site.num_sources - 1, output)
        logits, values = self.site_logits[site.index - 1], self.values_by_head
        if self.num_tokens > 1:  # for one token, these views would cost more than rows without weight
            logits, values = logits.narrow(2, 0, site.num_sources), values.narrow(1, 0, site.num_sources)
        weights = logits.softmax(dim=-1)
        hidden = torch.bmm(weights, values)
        if self.heads > 1 or self.shape[1] > 1:
            hidden = hidden.view(self.shape)
        hidden = hidden if hidden.dtype == dtype else hidden.to(dtype)
        return hidden, self.shaped(weights, site) if output_depth_weights else None

    def shaped(self, weights: torch.Tensor, site: DepthSite) -> torch.Tensor:
        heads = [self.config.depth_heads] if self.config.depth_heads > 1 else []
        return weights.view(*self.shape[:2], *heads, -1)[..., : site.num_sources]

    def write(self, index: int, output: torch.Tensor) -> None:
        """Add an output, value or in `projected` value and key, to a row, and compute its logits for all sites."""
        row = self.rows[index]
        if self.keys is None:
            row.value.add_(output)
        else:
            has_key = output.shape[-1] == self.width_with_key
            parts: Sequence[torch.Tensor] = output.split(self.sizes, -1) if has_key else emit(self.config, output)
            value, key = parts
            row.value.add_(value)
            if self.heads > 1:
                key = key.unflatten(-1, (self.heads, -1))
            if self.adds_normalized_keys:
                norm = torch.linalg.vector_norm(key, dim=-1, keepdim=True, dtype=row.key.dtype)
                row.key.addcdiv_(key, norm.hypot_(self.floor))
            else:
                row.key.add_(key)
        if self.row_floor is None:
            self.product(self.queries, row.columns, out=row.logits)
        else:
            norm = torch.linalg.vector_norm(row.normed, dim=-2, keepdim=True)
            if not self.floor_columns:
                norm.hypot_(self.row_floor)
            torch.div(self.product(self.queries, row.columns), norm, out=row.logits)

    # A bank takes the place of a `DepthState` between layers: written in place, it is passed on as it is.

    def flatten(self) -> tuple[tuple["DepthBank"], None]:
        return (self,), None

    def written_since(self, earlier: object) -> "DepthBank":
        return self

    def with_written(self, tensors: "Sequence[DepthBank]", *_: object) -> "DepthBank":
        return tensors[0]


class KernelBank(DepthBank):
    """A bank that a Triton kernel writes and reads: one launch a site, in memory that is allocated once per step."""

    def __init__(
        self,
        config: LRAttnResConfig,
        num_sources: int,
        embedding: torch.Tensor,
        embedding_key: torch.Tensor | None,
        queries: torch.Tensor,
    ):
        """As for `DepthBank`, but the queries [M, R] are as they were learned: the kernel scales them."""
        check_values([embedding, queries])
        self.config, self.shape = config, embedding.shape
        first = emit(config, embedding) if embedding_key is None else (embedding, embedding_key)
        self.tables = new_step_tables(by_token(first), queries, num_sources, config.depth_heads)
        self.options = StepOptions(
            eps=config.rms_norm_eps,
            scale=config.depth_logit_scale,
            normalize_emitted=normalizes_emitted_keys(config),
            normalize_keys=config.depth_key_norm,
            normalize_query=config.depth_query_norm,
        )

    def to(self, device: torch.device | str | int, **_: Any) -> "KernelBank":
        moved = copy(self)
        own_keys = self.tables.keys is not self.tables.values
        tables = StepTables(*(table.to(device) for table in self.tables))
        moved.tables = tables if own_keys else tables._replace(keys=tables.values)
        return moved

    def read(
        self, site: DepthSite, output: torch.Tensor, dtype: torch.dtype, output_depth_weights: bool | None = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # The sum moves to and fro between the slot of its block and the one after it, and ends in its own.
        num_blocks = site.num_sources - 2
        slots = [num_blocks + (site.block_size - count) % 2 for count in (site.num_in_block - 1, site.num_in_block)]
        old, new = (slots[0] if site.num_in_block > 1 else -1), slots[1]
        has_key = self.config.residual_type == "projected"
        emitted = output.split(self.config.hidden_size, dim=-1) if has_key else emit(self.config, output)
        step_site(self.tables, by_token(emitted), site.index - 1, num_blocks, (old, new), self.options)
        hidden = self.tables.hidden[site.index - 1].view(self.shape)
        hidden = hidden if hidden.dtype == dtype else hidden.to(dtype)
        weights = self.tables.weights[site.index - 1]
        return hidden, self.shaped(weights, site) if output_depth_weights else None


def by_token(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """[B, T, size] -> [BT, 1, size], each."""
    return tuple(part.flatten(0, 1).unsqueeze(1) for part in parts)


def unflatten_depth(tensors: Sequence[Any], counts: tuple[int, ...] | None) -> DepthState | DepthBank:
    """The inverse of `flatten`; a bank has no counts."""
    return tensors[0] if counts is None else DepthState.unflatten(tensors, counts)
