"""One step's tables for kernels that read pages themselves, in one buffer and one upload.

    requests: starts, counts, first rows | by group: bounds, tables | tiles | slots | rows'
    requests, where there are states | block ids

All of a step is int32 in one buffer at a fixed address. A step of R requests with T rows and N
tiles always lies the same way, so a graph that was captured for such a step finds the next one's
tables where it found the last one's; only block ids, at the end, vary in number.

Requests fall into classes by their own number of tokens, which fixes the shape of their tiles and
the splits of their contexts: a row's bits then depend on its request alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm.exceptions import InvariantError
from vllm.utils.uploads import StagingBuffers
from vllm.v1.attention.block_lookup import BlockLookup
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.ops.triton.launch import IS_INTERPRETED
from vllm.v1.attention.ops.triton.paged_attention import PagedRequests, ScorePlan, attend_pages
from vllm.v1.attention.ops.triton.pages import write_slots
from vllm.v1.attention.ops.triton.recurrent import StateTables, run_states
from vllm.v1.attention.recurrent_tables import find_states
from vllm.v1.attention.step_batch import ragged_arange
from vllm.v1.attention.step_tables import GuessedRows, RequestSlice
from vllm.v1.kv_cache_specs.layouts import StateLayout

# Requests with at most so many tokens read a long context with few queries: it is split.
_MAX_FEW_QUERIES = 8
_SPLITS = 1 if IS_INTERPRETED else 16
_PREFILL_ROWS = 128 if IS_INTERPRETED else 64
# Values of a tile's sums, which stay in registers.
_PREFILL_VALUES = 1 << 20 if IS_INTERPRETED else 1 << 13
_MIN_PREFILL_ROWS = 16
# Columns of a group's bounds: one value a request each.
_NUM_BOUNDS = {"keys": 4, "recurrent": 5}
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TileClass:
    """Tiles of one shape.

    Attributes:
        tiles: Where they stand among all tiles.
        queries_per_tile: Queries of each.
        num_splits: Parts of each context.
    """

    tiles: slice
    queries_per_tile: int
    num_splits: int


@dataclass(frozen=True, slots=True)
class GroupTables:
    """One KV group's part of a step.

    Attributes:
        requests: By tile class.
        slots: int32 [T]: where each row goes; negative: nowhere.
        window: Tokens attended; 0: all.
    """

    requests: tuple[PagedRequests, ...]
    slots: torch.Tensor
    window: int


@dataclass(frozen=True, slots=True)
class PagedTables:
    """A step as the layers read it; stands where ``StepMetadata`` does.

    Attributes:
        num_tokens: T.
        classes: Shapes of tiles.
        groups: By group id, those that keep keys.
        states: By group id, those that keep recurrent states.
        group_of: Cache name -> group id.
        kv_caches: Cache name -> pages.
        is_decode: Whether every request has one token.
        drafts: Of requests that have some, in order.
    """

    num_tokens: int
    classes: tuple[TileClass, ...]
    groups: Mapping[int, GroupTables]
    states: Mapping[int, tuple[StateTables, StateLayout]]
    group_of: Mapping[str, int]
    kv_caches: Mapping[str, torch.Tensor]
    is_decode: bool
    drafts: tuple[GuessedRows, ...] = ()

    @property
    def pages(self) -> "PagedTables":
        """Itself: layers attend by ``attend``."""
        return self

    @property
    def state_runner(self) -> "PagedTables":
        """Itself: recurrent layers run by ``run_states``."""
        return self

    def itself(self) -> "PagedTables":
        """Returns itself: what a graph's step reads is laid out before it."""
        return self

    def find_wanted(self, device: torch.device) -> None:
        """Returns None: every row is computed to the end."""

    def attend(
        self,
        cache_name: str,
        queries: torch.Tensor,
        rows: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float,
        soft_cap: float,
        *,
        latent_dim: int = 0,
        is_owner: bool = True,
    ) -> torch.Tensor:
        """Stores a layer's rows and attends its queries.

        Args:
            cache_name: The layer's cache.
            queries: [T, H, d].
            rows: [T, 2 * K * d], keys then values; with latents [T, d].
            sinks: fp32 [H], or None.
            scale: Of the products.
            soft_cap: Scores are capped by tanh; 0: they are not.
            latent_dim: Of a row that is the key of all heads, so many values are their value too;
                0: rows have both.
            is_owner: Whether the rows are the layer's own, to be stored.

        Returns:
            [T, H, d], with latents [T, H, latent_dim].

        Mutates:
            The layer's pages.
        """
        cache, group = self.kv_caches[cache_name], self.groups[self.group_of[cache_name]]
        if is_owner:
            write_slots(cache, group.slots, rows)
        num_rows, heads, width = queries.shape
        width = latent_dim or width
        # Rows of no request are in no tile, and must be numbers all the same.
        make = torch.zeros if self.is_decode else torch.empty
        into = (
            make((num_rows, heads, width), dtype=queries.dtype, device=queries.device),
            torch.empty((num_rows, heads), dtype=torch.float32, device=queries.device),
        )
        for tiles, requests in zip(self.classes, group.requests, strict=True):
            plan = ScorePlan(
                scale, soft_cap, group.window, tiles.queries_per_tile, tiles.num_splits, latent_dim
            )
            attend_pages(queries, rows, cache, requests, plan, sinks, into)
        return into[0]

    def run_states(
        self,
        cache_name: str,
        number: int,
        num_key_heads: int,
        channels: torch.Tensor,
        weight: torch.Tensor,
        logs: torch.Tensor,
        rates: torch.Tensor,
    ) -> torch.Tensor:
        """Takes the requests' recurrent states through their rows; see ``recurrent.run_states``.

        Args:
            cache_name: The states' cache.
            number: Which of the recurrent layers.
            num_key_heads: Of it.
            channels: fp32 [T, C]: inputs of its convolution.
            weight: fp32 [C, W]: of that.
            logs: fp32 [T, H] or [T, H, K]: of decays.
            rates: fp32 [T, H]: of writing.

        Mutates:
            The states' pages.
        """
        tables, layout = self.states[self.group_of[cache_name]]
        pages = self.kv_caches[cache_name]
        return run_states(
            channels, weight, logs, rates, pages, layout, number, num_key_heads, tables
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """A step's rows: requests' first positions and numbers of tokens [R], positions [T]."""

    starts: np.ndarray
    counts: np.ndarray
    positions: np.ndarray


class PagedTablesBuilder:
    """Builds a model's tables.

    Args:
        layout: The KV groups, of kind "keys" or "recurrent".
        kv_caches: Cache name -> pages.
        group_size: Most query heads of one key head.
        width: Most values of a query.
        device: Where the kernels run.

    Owns: the buffer on the device, and those of the host that it is filled from.
    """

    def __init__(
        self,
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        group_size: int,
        width: int,
        device: torch.device,
    ) -> None:
        self._layout, self._kv_caches, self._device = layout, kv_caches, device
        rows = min(_PREFILL_ROWS, max(_MIN_PREFILL_ROWS, _PREFILL_VALUES // width))
        self._prefill_queries = max(1, rows // group_size)
        self._has_states = any(group.state is not None for group in layout.groups)
        self._device_buffer = torch.zeros(0, dtype=torch.int32, device=device)
        self._staging = StagingBuffers((0,), torch.int32, device)

    @property
    def buffer(self) -> torch.Tensor:
        """Where tables lie on the device."""
        return self._device_buffer

    def reserve(self, num_values: int) -> None:
        """Make the buffers hold ``num_values``; tables handed out before are not valid afterwards.

        A graph needs their address to stay: reserve the most that a captured step may take, first.
        """
        if num_values <= len(self._device_buffer):
            return
        size = 1 << (num_values - 1).bit_length()
        self._device_buffer = torch.zeros(size, dtype=torch.int32, device=self._device)
        # Copies from those before may not have been made yet: torch keeps pinned memory for them.
        self._staging = StagingBuffers((size,), torch.int32, self._device)

    def __call__(
        self, slices: Sequence[RequestSlice], layout: CacheLayout, num_padded: int = 0
    ) -> PagedTables:
        """Lays a step out and uploads it.

        Args:
            slices: The requests in flat-batch order; those without tokens are ignored.
            layout: As at construction.
            num_padded: Rows of a decode step, filled up with rows of no request; 0: as many as
                there are.

        Raises:
            InvariantError: A row that attention must read is not stored (I5).
        """
        del layout
        kept = [item for item in slices if item.num_tokens]
        starts = np.array([item.start for item in kept], dtype=np.int64)
        counts = np.array([item.num_tokens for item in kept], dtype=np.int64)
        # A step of padding alone is one that a graph is captured from.
        is_decode = int(counts.max()) == 1 if len(kept) else bool(num_padded)
        num_padding = max(0, num_padded - len(kept))
        assert not num_padding or is_decode, "only decode steps are filled up"
        row_starts = np.cumsum(counts) - counts
        classes, tile_requests, tile_queries = self._make_tiles(counts, num_padding)
        parts: list[np.ndarray] = [starts, counts, row_starts]
        request_of_row = np.repeat(np.arange(len(kept)), counts)
        rows = _Rows(starts, counts, ragged_arange(starts, counts))
        num_ids = 0
        ids: list[np.ndarray] = []
        slot_rows: list[np.ndarray] = []
        bounds: list[np.ndarray] = []
        for group_id, group in enumerate(self._layout.groups):
            if group.state is not None:
                columns, tables = find_states(kept, group, group_id, num_ids)
                bounds += columns
                ids += tables
                num_ids += sum(map(len, tables))
                continue
            own, slots = self._read_keys(kept, group, group_id, num_ids, request_of_row, rows)
            bounds += own
            slot_rows.append(slots)
            ids += [item.tables[group_id].block_ids for item in kept]
            num_ids += sum(len(item.tables[group_id].block_ids) for item in kept)
        if self._has_states:
            slot_rows.append(request_of_row)
        sizes = [len(part) + num_padding for part in (*parts, *bounds)]
        sizes += [len(tile_requests)] * 2
        sizes += [len(request_of_row) + num_padding] * len(slot_rows)
        parts += [*bounds, tile_requests, tile_queries, *slot_rows]
        drafts = tuple(
            GuessedRows(int(row) + item.num_tokens, item.num_drafts)
            for row, item in zip(row_starts, kept, strict=True)
            if item.num_drafts
        )
        return self._upload(parts, sizes, ids, classes, is_decode, drafts)

    def _read_keys(
        self,
        kept: Sequence[RequestSlice],
        group: GroupLayout,
        group_id: int,
        num_ids: int,
        request_of_row: np.ndarray,
        rows: _Rows,
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Returns a group's bounds, and its slots.

        Raises:
            InvariantError: A row that attention must read is not stored (I5).
        """
        tables = [item.tables[group_id] for item in kept]
        lookup = BlockLookup(tables, group, _HOST)
        starts, counts, positions = rows.starts, rows.counts, rows.positions
        write_from = np.array(
            [item.write_from[group_id] if item.write_from else 0 for item in kept],
            dtype=np.int64,
        )
        own_from = np.clip(write_from, starts, starts + counts)
        read_from = np.zeros(len(kept), dtype=np.int64)
        if group.window:
            read_from = np.array([item.read_from for item in kept], dtype=np.int64)
        _check_stored(lookup, group, starts, own_from, read_from)
        lengths = np.array([len(table.block_ids) for table in tables], dtype=np.int64)
        table_starts = num_ids + np.cumsum(lengths) - lengths
        bases = np.array([table.base for table in tables], dtype=np.int64)
        blocks = lookup.find_blocks(request_of_row, positions)
        blocks[positions < own_from[request_of_row]] = 0
        slots = blocks * group.rows_per_block + lookup.find_rows(positions)
        return [own_from, read_from, table_starts, bases], np.where(blocks == 0, -1, slots)

    def _make_tiles(
        self, counts: np.ndarray, num_padding: int
    ) -> tuple[tuple[TileClass, ...], np.ndarray, np.ndarray]:
        """Returns the classes, and each tile's request and first query."""
        few, many = _MAX_FEW_QUERIES, self._prefill_queries
        few_queries = min(few, many)
        choices = (
            (counts == 1, 1, _SPLITS),
            ((counts > 1) & (counts <= few), few_queries, _SPLITS),
            (counts > few, many, 1),
        )
        classes: list[TileClass] = []
        owners: list[np.ndarray] = []
        firsts: list[np.ndarray] = []
        num_tiles = 0
        for is_ours, num_queries, num_splits in choices:
            requests = np.flatnonzero(is_ours)
            tiles = -(-counts[requests] // num_queries)
            owner = np.repeat(requests, tiles)
            first = ragged_arange(np.zeros(len(tiles), dtype=np.int64), tiles) * num_queries
            if num_queries == 1 and num_padding:
                owner = np.concatenate([owner, np.full(num_padding, -1)])
                first = np.concatenate([first, np.zeros(num_padding, dtype=np.int64)])
            if not len(owner):
                continue
            part = slice(num_tiles, num_tiles + len(owner))
            classes.append(TileClass(part, num_queries, num_splits))
            owners.append(owner)
            firsts.append(first)
            num_tiles = part.stop
        if not classes:
            nothing = np.zeros(0, dtype=np.int64)
            return (), nothing, nothing
        return tuple(classes), np.concatenate(owners), np.concatenate(firsts)

    def _upload(
        self,
        parts: Sequence[np.ndarray],
        sizes: Sequence[int],
        ids: Sequence[np.ndarray],
        classes: tuple[TileClass, ...],
        is_decode: bool,
        drafts: tuple[GuessedRows, ...],
    ) -> PagedTables:
        """Fills the buffers; padding is -1 in tiles and slots, and of no matter elsewhere."""
        num_fixed = sum(sizes)
        num_values = num_fixed + sum(map(len, ids)) + 1
        self.reserve(num_values)
        staged = self._staging.take()
        host = staged.numpy()
        first = 0
        for part, size in zip(parts, sizes, strict=True):
            host[first : first + len(part)] = part
            host[first + len(part) : first + size] = -1
            first += size
        for table in ids:
            host[first : first + len(table)] = table
            first += len(table)
        host[first] = 0
        self._staging.send(staged[:num_values], self._device_buffer[:num_values])
        views = torch.split(self._device_buffer[:num_fixed], list(sizes))
        starts, counts, row_starts = views[:3]
        found = 3 + sum(_NUM_BOUNDS[group.kind] for group in self._layout.groups)
        tiles, queries = views[found : found + 2]
        slots = iter(views[found + 2 :])
        row_requests = views[-1]
        block_ids = self._device_buffer[num_fixed:]
        groups, states = {}, {}
        found = 3
        for group_id, group in enumerate(self._layout.groups):
            own = views[found : found + _NUM_BOUNDS[group.kind]]
            found += len(own)
            if group.state is not None:
                sources, store_firsts, store_counts, store_ends, store_tables = own
                tables = StateTables(
                    row_requests,
                    row_starts,
                    counts,
                    sources,
                    store_firsts,
                    store_counts,
                    store_ends,
                    store_tables,
                    block_ids,
                )
                states[group_id] = (tables, group.state)
                continue
            own_from, read_from, table_starts, bases = own
            requests = tuple(
                PagedRequests(
                    tiles[part.tiles],
                    queries[part.tiles],
                    starts,
                    counts,
                    row_starts,
                    own_from,
                    read_from,
                    table_starts,
                    bases,
                    block_ids,
                )
                for part in classes
            )
            groups[group_id] = GroupTables(requests, next(slots), group.window)
        return PagedTables(
            num_tokens=sizes[-1],
            classes=classes,
            groups=groups,
            states=states,
            group_of=self._layout.group_of,
            kv_caches=self._kv_caches,
            is_decode=is_decode,
            drafts=drafts,
        )


def _check_stored(
    lookup: BlockLookup,
    group: GroupLayout,
    starts: np.ndarray,
    own_from: np.ndarray,
    read_from: np.ndarray,
) -> None:
    """Sees that every row below ``own_from`` that some query sees has a block.

    Raises:
        InvariantError: One has none (I5).
    """
    low = np.zeros_like(starts)
    if group.window:
        if (read_from > starts).any():
            raise InvariantError(f"window rows are read from {read_from} in steps from {starts}")
        low = np.maximum(read_from, starts - (group.window - 1))
    # One position a block is enough.
    first = low // group.block_size
    counts = np.where(own_from > low, -(-own_from // group.block_size) - first, 0)
    requests = np.repeat(np.arange(len(starts)), counts)
    positions = np.maximum(ragged_arange(first, counts) * group.block_size, low[requests])
    lookup.locate(requests, positions)
