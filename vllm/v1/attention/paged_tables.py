"""One step's tables for kernels that read pages themselves, in one buffer and one upload.

    requests: starts, counts, first rows | by group: bounds, tables | tiles | slots | rows'
    requests and drafts' places, where there are states | block ids

All of a step is int32 in one buffer at a fixed address. Steps of one ``StepShape`` always lie the
same way, so a graph that was captured for such a step finds the next one's tables where it found
the last one's; only block ids, at the end, vary in number:

    shape    4 requests, 8 rows, up to 2 tokens of a request
    step     | a a | b | c c |             its own rows first, one request behind the other
             | a a | b | c c | - - - |     rows of no token: they read and write no pages
    tiles    of one query  b - - -         of several  a c - -

Requests fall into classes by their own number of tokens, which fixes the shape of their tiles and
the splits of their contexts: a row's bits then depend on its request alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm.exceptions import InvariantError
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.block_lookup import BlockLookup
from vllm.v1.attention.draft_states import DraftStates
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.ops.triton.launch import IS_INTERPRETED
from vllm.v1.attention.ops.triton.paged_attention import PagedRequests, ScorePlan, attend_pages
from vllm.v1.attention.ops.triton.pages import write_slots
from vllm.v1.attention.ops.triton.recurrent import StateTables
from vllm.v1.attention.recurrent_tables import NUM_BY_REQUEST, count_stores, find_states
from vllm.v1.attention.state_runner import StateRunner
from vllm.v1.attention.step_batch import ragged_arange
from vllm.v1.attention.step_rules import find_first_read
from vllm.v1.attention.step_tables import RequestSlice
from vllm.v1.attention.table_buffer import TableBuffer, TableColumns

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


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """What fixes how the tables of a step lie. It serves steps of at most so much of each.

    Attributes:
        most_tokens: Of one request.
        num_rows: Of all, with those of no token.
        num_requests: With those of padding.
    """

    most_tokens: int
    num_rows: int
    num_requests: int

    def count_stores(self, unit: int) -> int:
        """Return how many recurrent states a step may leave."""
        return self.num_requests * count_stores(self.most_tokens, unit)


def count_split_bytes(shape: StepShape, width: int) -> int:
    """Return what the parts of split contexts take while a layer of a step attends.

    Args:
        shape: Of the step.
        width: Values of all heads' outputs of a token.
    """
    places = min(shape.num_rows, shape.num_requests * min(shape.most_tokens, _MAX_FEW_QUERIES))
    return _SPLITS * places * width * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class TileClass:
    """Tiles of one shape.

    Attributes:
        tiles: Where they stand among all tiles.
        queries_per_tile: Queries of each.
        places_per_tile: Of these, what a tile of this step may have.
        num_splits: Parts of each context.
    """

    tiles: slice
    queries_per_tile: int
    places_per_tile: int
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
        state_runner: Takes the states of groups that keep recurrent ones through the step.
        group_of: Cache name -> group id.
        kv_caches: Cache name -> pages.
        shape: What it was filled up to; None: it has no rows of no token.
    """

    num_tokens: int
    classes: tuple[TileClass, ...]
    groups: Mapping[int, GroupTables]
    state_runner: StateRunner
    group_of: Mapping[str, int]
    kv_caches: Mapping[str, torch.Tensor]
    shape: StepShape | None = None

    @property
    def pages(self) -> "PagedTables":
        """Itself: layers attend by ``attend``."""
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
        # Rows of no token are in no tile, and must be numbers all the same.
        make = torch.empty if self.shape is None else torch.zeros
        into = (
            make((num_rows, heads, width), dtype=queries.dtype, device=queries.device),
            torch.empty((num_rows, heads), dtype=torch.float32, device=queries.device),
        )
        for tiles, requests in zip(self.classes, group.requests, strict=True):
            plan = ScorePlan(
                scale,
                soft_cap,
                group.window,
                tiles.queries_per_tile,
                tiles.num_splits,
                latent_dim,
                tiles.places_per_tile,
            )
            attend_pages(queries, rows, cache, requests, plan, sinks, into)
        return into[0]


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
        drafts: What keeps drafts, where there are recurrent layers.

    Owns: the buffer that tables lie in.
    """

    def __init__(
        self,
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        group_size: int,
        width: int,
        device: torch.device,
        drafts: DraftStates | None = None,
    ) -> None:
        self._layout, self._kv_caches = layout, kv_caches
        rows = min(_PREFILL_ROWS, max(_MIN_PREFILL_ROWS, _PREFILL_VALUES // width))
        self._prefill_queries = max(1, rows // group_size)
        self._has_states = any(group.state is not None for group in layout.groups)
        self._drafts = drafts
        self._buffer = TableBuffer(device)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Where tables lie on the device, and what is kept of drafts."""
        kept = () if self._drafts is None else (self._drafts.kept,)
        return (self._buffer.values, *kept)

    def fix(self, shapes: Sequence[StepShape], max_blocks: int) -> None:
        """Make the buffers hold any step of some shapes, at addresses that stay.

        Args:
            shapes: The shapes.
            max_blocks: Block ids of one request.
        """
        for shape in shapes:
            columns, _ = self._lay_out([], shape)
            self._buffer.reserve(columns.count_values(shape.num_requests * max_blocks))
        self._buffer.fix()
        if self._drafts is not None:
            self._drafts.fix()

    def __call__(
        self,
        slices: Sequence[RequestSlice],
        layout: CacheLayout,
        shape: StepShape | None = None,
    ) -> PagedTables:
        """Lays a step out and uploads it.

        Args:
            slices: The requests in flat-batch order; those without tokens are ignored.
            layout: As at construction.
            shape: What it is filled up to, with requests and rows that are none; None: nothing.

        Raises:
            InvariantError: A row that attention must read is not stored (I5).
        """
        del layout
        columns, classes = self._lay_out([item for item in slices if item.num_tokens], shape)
        views, block_ids = self._buffer.upload(columns)
        return self._make_tables(views, block_ids, classes, shape)

    def _lay_out(
        self, kept: Sequence[RequestSlice], shape: StepShape | None
    ) -> tuple[TableColumns, tuple[TileClass, ...]]:
        """Returns a step's columns, and the shapes of its tiles.

        Raises:
            InvariantError: A row that attention must read is not stored (I5).
        """
        starts = np.array([item.start for item in kept], dtype=np.int64)
        counts = np.array([item.num_tokens for item in kept], dtype=np.int64)
        request_of_row = np.repeat(np.arange(len(kept)), counts)
        num_requests, num_rows = len(kept), len(request_of_row)
        if shape is not None:
            num_requests, num_rows = shape.num_requests, shape.num_rows
        columns = TableColumns()
        for values in (starts, counts, np.cumsum(counts) - counts):
            columns.add(values, num_requests)
        rows = _Rows(starts, counts, ragged_arange(starts, counts))
        slots: list[np.ndarray] = []
        for group_id, group in enumerate(self._layout.groups):
            if group.state is not None:
                found, ids = find_states(kept, group, group_id, columns.num_ids)
                num_stores = len(found[-1])
                if shape is not None:
                    num_stores = shape.count_stores(group.block_size)
                for values in found[:NUM_BY_REQUEST]:
                    columns.add(values, num_requests)
                for values in found[NUM_BY_REQUEST:]:
                    columns.add(values, num_stores)
                columns.add_ids(ids)
                continue
            bounds, own = self._read_keys(
                kept, group, group_id, columns.num_ids, request_of_row, rows
            )
            for values in bounds:
                columns.add(values, num_requests)
            slots.append(own)
            columns.add_ids([item.tables[group_id].block_ids for item in kept])
        classes, tile_requests, tile_queries = self._make_tiles(counts, shape)
        for values in (tile_requests, tile_queries):
            columns.add(values, len(values))
        if self._has_states:
            slots.append(request_of_row)
            if draft_slots := self._place_drafts(kept, shape):
                slots += draft_slots
        for values in slots:
            columns.add(values, num_rows)
        return columns, classes

    def _place_drafts(
        self, kept: Sequence[RequestSlice], shape: StepShape | None
    ) -> list[np.ndarray]:
        """Returns where each row is kept as a draft, if some may be."""
        counts = np.array([item.num_drafts for item in kept], dtype=np.int64)
        total = int(counts.sum())
        has_drafts = shape.most_tokens > 1 if shape is not None else total > 0
        if self._drafts is None or not has_drafts:
            return []
        if shape is not None:
            # Each request has a token that is none.
            total = min(shape.num_rows, shape.num_requests * (shape.most_tokens - 1))
        self._drafts.reserve(total)
        ends = np.cumsum([item.num_tokens for item in kept], dtype=np.int64)
        places = np.full(int(ends[-1]) if len(ends) else 0, -1, dtype=np.int64)
        places[ragged_arange(ends - counts, counts)] = np.arange(int(counts.sum()))
        return [places]

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
        self, counts: np.ndarray, shape: StepShape | None
    ) -> tuple[tuple[TileClass, ...], np.ndarray, np.ndarray]:
        """Returns the classes, and each tile's request and first query."""
        few, many = _MAX_FEW_QUERIES, self._prefill_queries
        most_tokens = shape.most_tokens if shape is not None else int(counts.max(initial=0))
        # Fewest and most tokens of a request, queries of a tile, parts of a context.
        choices = (
            (1, 1, 1, _SPLITS),
            (2, few, min(few, many), _SPLITS),
            (few + 1, most_tokens, many, 1),
        )
        classes: list[TileClass] = []
        owners: list[np.ndarray] = []
        firsts: list[np.ndarray] = []
        num_tiles = 0
        for fewest, most, num_queries, num_splits in choices:
            most = min(most, most_tokens)
            if fewest > most:
                continue
            requests = np.flatnonzero((counts >= fewest) & (counts <= most))
            tiles = -(-counts[requests] // num_queries)
            owner = np.repeat(requests, tiles)
            first = ragged_arange(np.zeros(len(tiles), dtype=np.int64), tiles) * num_queries
            if shape is not None:
                # So many requests of this class may there be.
                num_owners = min(shape.num_requests, shape.num_rows // fewest)
                num_padding = num_owners * cdiv(most, num_queries) - len(owner)
                owner = np.concatenate([owner, np.full(num_padding, -1)])
                first = np.concatenate([first, np.zeros(num_padding, dtype=np.int64)])
            if not len(owner):
                continue
            part = slice(num_tiles, num_tiles + len(owner))
            classes.append(TileClass(part, num_queries, min(num_queries, most), num_splits))
            owners.append(owner)
            firsts.append(first)
            num_tiles = part.stop
        if not classes:
            nothing = np.zeros(0, dtype=np.int64)
            return (), nothing, nothing
        return tuple(classes), np.concatenate(owners), np.concatenate(firsts)

    def _make_tables(
        self,
        views: tuple[torch.Tensor, ...],
        block_ids: torch.Tensor,
        classes: tuple[TileClass, ...],
        shape: StepShape | None,
    ) -> PagedTables:
        starts, counts, row_starts = views[:3]
        num_bounds = [_NUM_BOUNDS[group.kind] for group in self._layout.groups]
        tiles, queries, *by_row = views[3 + sum(num_bounds) :]
        slots = iter(by_row)
        groups, requests_and_stores = {}, {}
        found = 3
        for group_id, group in enumerate(self._layout.groups):
            own = views[found : found + num_bounds[group_id]]
            found += len(own)
            if group.state is not None:
                requests_and_stores[group_id] = own, group.state
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
        states = {}
        if self._has_states:
            row_requests = next(slots)
            for group_id, (own, state) in requests_and_stores.items():
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
                states[group_id] = (tables, state)
        return PagedTables(
            num_tokens=len(by_row[0]),
            classes=classes,
            groups=groups,
            state_runner=StateRunner(
                states, self._layout.group_of, self._kv_caches, self._drafts, next(slots, None)
            ),
            group_of=self._layout.group_of,
            kv_caches=self._kv_caches,
            shape=shape,
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
    if group.window and (read_from > starts).any():
        raise InvariantError(f"window rows are read from {read_from} in steps from {starts}")
    lookup.check_stored(find_first_read(group, starts, read_from), own_from)
