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
    """Views of one row of a `DepthBank`."""

    content: torch.Tensor  # [B, T, D], or [B, T, D + R] with a separate key; with heads [B, T, H, D / H + R / H]
    key: torch.Tensor  # [R, BT] or [H, R / H, BT]
    key_and_floor: torch.Tensor  # [R + 1, BT] or [H, R / H + 1, BT]
    logits: torch.Tensor  # [M, BT] or [H, M, BT]


class DepthBank:
    """The sources of new tokens, in a table that a step of generation writes and reads in place. No gradients. The
    tokens may be of several sequences, one each (T = 1) or packed into one row (B = 1).

    Such a step is bound by the number of operations, not by their size. So nothing is grouped and views are made in
    advance: a site adds the output to the row of its block, computes that row's logits for all sites, and takes one
    softmax and one product over all rows.

    One row per source: value [D], its key [R] if `emit` returns one, then the floor of the key norm. The norm of key
    and floor together is the divisor of `depth_logits`. Logits of rows that are not written yet are -inf. A depth head
    is like one more sequence of the batch: it has rows of its own, always with a key.
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
        self.config, self.heads, self.floor = config, config.depth_heads, floor
        self.queries = queries if self.heads == 1 else queries.transpose(0, 1).contiguous()  # [H, M, R / H]
        self.product = torch.mm if self.heads == 1 else torch.bmm
        self.value_size, self.key_size = config.hidden_size // self.heads, queries.shape[-1]
        self.adds_normalized_keys = normalizes_emitted_keys(config)
        self.shape, self.num_tokens = embedding.shape[:2], embedding.shape[:2].numel()
        has_key = self.heads > 1 or embedding_key is not None or len(emit(config, embedding)) == 2
        width, num_rows = self.value_size + (self.key_size if has_key else 0), self.num_tokens * self.heads
        # Outputs are added to rows of zeros. Rows that are not written yet must be finite: 0 * NaN would be NaN.
        self.bank = queries.new_zeros(num_rows, num_sources, width + 1)
        if floor is not None:
            # These keys are stored without their factor sqrt(R), and so is their floor.
            self.bank[..., -1] = floor / math.sqrt(self.key_size) if self.adds_normalized_keys else floor
        self.logits = queries.new_full((len(queries), num_rows, 1, num_sources), -math.inf)
        self.make_views()
        self.write(0, embedding if embedding_key is None else torch.cat([embedding, embedding_key], dim=-1))

    def make_views(self) -> None:
        self.values = self.bank[..., : self.value_size]
        by_row = self.bank.unflatten(0, (self.num_tokens, self.heads)).permute(2, 1, 3, 0)  # [rows, H, width + 1, BT]
        columns = by_row[:, :, -1 - self.key_size :]
        contents = self.bank[..., :-1].unflatten(0, (*self.shape, self.heads)).movedim(3, 0)  # [rows, B, T, H, width]
        logits = self.logits.unflatten(1, (self.num_tokens, self.heads))[..., 0, :].permute(3, 2, 0, 1)
        if self.heads == 1:
            contents, columns, logits = contents.squeeze(3), columns.squeeze(1), logits.squeeze(1)
        self.rows = [*map(BankRow, contents, columns[..., :-1, :], columns, logits)]
        if self.adds_normalized_keys:  # a value is divided by 1, a key by its norm
            assert self.floor is not None
            self.divisor = contents.new_ones(contents.shape[1:])
            self.key_divisor = self.divisor[..., self.value_size :]
            self.floors = self.floor.expand(self.key_size)
        self.norm_dim = None if len(self.bank) == 1 else -2  # over all is faster than over one dimension
        self.site_logits = self.logits.unbind(0)

    def to(self, device: torch.device | str | int, **_: Any) -> "DepthBank":
        """Accelerate's hooks call this between layers on different devices."""
        bank = self.bank.to(device)
        if bank is self.bank:
            return self
        moved = copy(self)
        moved.bank, moved.queries, moved.logits = bank, self.queries.to(device), self.logits.to(device)
        moved.floor = None if self.floor is None else self.floor.to(device)
        moved.make_views()
        return moved

    def read(self, site: DepthSite, output: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what sub-layer `site.index` returned, then read -> hidden [B, T, D], weights [B, T, rows] or
        [B, T, H, rows]."""
        self.write(site.num_sources - 1, output)
        logits, values = self.site_logits[site.index - 1], self.values
        if self.num_tokens > 1:  # for one token, these views would cost more than rows without weight
            logits, values = logits.narrow(2, 0, site.num_sources), values.narrow(1, 0, site.num_sources)
        weights = logits.softmax(dim=-1)
        hidden = torch.bmm(weights, values)
        if self.heads > 1:
            hidden, weights = hidden.view(*self.shape, -1), weights.view(*self.shape, self.heads, -1)
        elif self.shape[1] > 1:
            hidden, weights = hidden.view(*self.shape, -1), weights.view(*self.shape, -1)
        return hidden if hidden.dtype == dtype else hidden.to(dtype), weights

    def write(self, index: int, output: torch.Tensor) -> None:
        """Add an output, value or in `projected` value and key, to a row, and compute its logits for all sites."""
        content, key, key_and_floor, logits = self.rows[index]
        if self.adds_normalized_keys:
            if self.heads > 1:
                output = self.join_by_head(output.split(self.config.hidden_size, dim=-1))
            new_key = output.narrow(-1, self.value_size, self.key_size)
            norm = torch.linalg.vector_norm(new_key, dim=-1, keepdim=True, dtype=content.dtype)
            torch.hypot(norm, self.floors, out=self.key_divisor)
            content.addcdiv_(output, self.divisor)
        elif self.heads == 1 and output.shape[-1] == content.shape[-1]:
            content.add_(output)
        else:
            content.add_(self.row_content(output))
        if self.floor is not None:
            norm = torch.linalg.vector_norm(key_and_floor, dim=self.norm_dim, keepdim=True)
            torch.div(self.product(self.queries, key), norm, out=logits)
        else:
            self.product(self.queries, key, out=logits)

    def row_content(self, output: torch.Tensor) -> torch.Tensor:
        """The parts of an output as a row holds them: [B, T, width] or [B, T, H, width]."""
        emitted = emit(self.config, *output.split(self.config.hidden_size, dim=-1))
        if self.heads == 1:
            return torch.cat(emitted, dim=-1)
        return self.join_by_head((emitted[0], emitted[-1][..., -self.config.depth_key_rank :]))

    def join_by_head(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A value [B, T, D] and its key [B, T, R] -> [B, T, H, D / H + R / H]."""
        return torch.cat([part.view(*self.shape, self.heads, -1) for part in parts], dim=-1)

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
        self.config, self.shape = config, embedding.shape[:2]
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

    def read(self, site: DepthSite, output: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        # The sum moves to and fro between the slot of its block and the one after it, and ends in its own.
        num_blocks = site.num_sources - 2
        slots = [num_blocks + (site.block_size - count) % 2 for count in (site.num_in_block - 1, site.num_in_block)]
        old, new = (slots[0] if site.num_in_block > 1 else -1), slots[1]
        has_key = self.config.residual_type == "projected"
        emitted = output.split(self.config.hidden_size, dim=-1) if has_key else emit(self.config, output)
        step_site(self.tables, by_token(emitted), site.index - 1, num_blocks, (old, new), self.options)
        heads = [self.config.depth_heads] if self.config.depth_heads > 1 else []
        hidden = self.tables.hidden[site.index - 1].view(*self.shape, -1)
        weights = self.tables.weights[site.index - 1].view(*self.shape, *heads, -1)
        return hidden if hidden.dtype == dtype else hidden.to(dtype), weights


def by_token(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """[B, T, size] -> [BT, 1, size], each."""
    return tuple(part.flatten(0, 1).unsqueeze(1) for part in parts)


def unflatten_depth(tensors: Sequence[Any], counts: tuple[int, ...] | None) -> DepthState | DepthBank:
    """The inverse of `flatten`; a bank has no counts."""
    return tensors[0] if counts is None else DepthState.unflatten(tensors, counts)
