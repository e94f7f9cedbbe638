"""Decode steps of models with windows, compressor states and entries, at fixed addresses.

So are those of models with keys that are chosen, and recurrent states beside them (GLM 5.3 Flash).

    host: starts, first rows to read, tokens | by group: bases, block ids    one buffer, one upload
    device, in the captured step:    addresses, masks, windows               from the buffer alone

What a step uploads are its requests' block tables; the index tables that layers read are computed
from them on the device, so that a captured step computes those of whatever was uploaded last. Their
shapes follow from the number of requests, the tokens that each may have in the step and those that
a context may have, the step's ``DecodeShape``. Rows that a request does not have are addressed in
the null block, which kernels read as zeros and never write: a window that the step does not
complete is computed all the same, and goes nowhere.

A request with fewer tokens than others is filled up with its last one, whose copies are written
nowhere and seen by nobody:

    flat rows      | a0 a1 a2 | b0 | c0 c1 |
    captured step  | a0 a1 a2 | b0 b0 b0 | c0 c1 c1 | of no request |
    its results    | a0 a1 a2 | b0 | c0 c1 | what nobody reads |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm.utils.math_utils import cdiv
from vllm.utils.uploads import StagingBuffers
from vllm.v1.attention.block_lookup import BlockLookup
from vllm.v1.attention.draft_states import DraftStates
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.ops.triton.recurrent import StateTables
from vllm.v1.attention.recurrent_tables import find_states
from vllm.v1.attention.state_runner import StateRunner
from vllm.v1.attention.step_batch import MAX_DECODE_QUERIES
from vllm.v1.attention.step_rules import (
    count_entries,
    count_rows_read,
    find_block_index,
    find_entry_start,
    find_first_prior,
    find_first_read,
    find_reach,
    find_row,
    is_first_entry,
    sees_entry,
    sees_row,
)
from vllm.v1.attention.step_tables import (
    AttentionPlan,
    DecodeBatch,
    DenseMetadata,
    KeyMetadata,
    PaddedRows,
    PageRows,
    RequestSlice,
    RowWrites,
    StateMetadata,
    StepMetadata,
    WindowMetadata,
)
from vllm.v1.kv_cache_specs.layouts import StateLayout

_HOST = torch.device("cpu")
# Contexts up to this length share a shape; then there is one for each doubling.
_LEAST_LIMIT = 4096
# Tokens that a step reads at most, its requests all taken for the longest: about 1 GiB of what
# DeepSeek-V4 chooses entries by.
_MOST_REACH = 1 << 24
# Before the groups' tables, of each request: its first position of the step (negative: no request),
# the first whose window rows are stored, and its tokens.
_NUM_BOUNDS = 3


@dataclass(frozen=True, slots=True, order=True)
class DecodeShape:
    """What fixes the shapes of a decode step.

    Attributes:
        num_queries: Tokens of each request, with those of padding.
        num_requests: Requests, with those of padding.
        limit: Most tokens of a context, the step's own among them.
    """

    num_queries: int
    num_requests: int
    limit: int

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return self.num_queries * self.num_requests


@dataclass(frozen=True, slots=True)
class LaidOutStep:
    """A decode step whose block tables are on the device; stands where ``StepMetadata`` does."""

    shape: DecodeShape


@dataclass(frozen=True, slots=True)
class ExpandedStep:
    """The tables of a captured step.

    Attributes:
        meta: What layers read; rows are its requests' in order, each filled up.
        sources: Of each of these rows its flat row, int64; None: they are the flat rows.
        places: Of each flat row the first of these rows that holds it, int64; behind the step's
            tokens some row. None likewise.
    """

    meta: StepMetadata
    sources: torch.Tensor | None
    places: torch.Tensor | None


def choose_limits(max_tokens: int, coarsest: int = 1) -> tuple[int, ...]:
    """Return the lengths of contexts that have shapes of their own, the longest last.

    Args:
        max_tokens: Of a context.
        coarsest: Most tokens of an entry: the longest is a multiple of it.
    """
    longest = cdiv(max_tokens, coarsest) * coarsest
    limits = [min(_LEAST_LIMIT, longest)]
    while limits[-1] < longest:
        limits.append(min(2 * limits[-1], longest))
    return tuple(limits)


def choose_reaches(
    sizes: Sequence[int], max_tokens: int, coarsest: int = 1
) -> tuple[tuple[int, int], ...]:
    """Return numbers of requests and lengths of contexts that steps have shapes for.

    A step reads as if every request were as long as its shape: many requests of which one may be
    very long have none, and are better run in batches of like lengths.

    Args:
        sizes: Numbers of requests.
        max_tokens: Of a context.
        coarsest: Most tokens of an entry.
    """
    limits = choose_limits(max_tokens, coarsest)
    return tuple(
        (size, limit)
        for size in sizes
        for limit in limits
        if limit == limits[0] or size * min(limit, max_tokens) <= max(_MOST_REACH, max_tokens)
    )


class EntryTables:
    """Lays decode steps out.

    Args:
        layout: The KV groups; of "keys" those without a window.
        kv_caches: Cache name -> pages.
        shapes: Of the steps; all tokens of a request but the first are drafts where there are
            recurrent states.
        device: Where the tables are used.
        drafts: What keeps them for recurrent states; None: there are none of either.

    Owns: the buffer on the device, and those of the host that it is filled from.
    """

    def __init__(
        self,
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        shapes: Sequence[DecodeShape],
        device: torch.device,
        drafts: DraftStates | None = None,
    ) -> None:
        self._layout, self._kv_caches, self._drafts = layout, kv_caches, drafts
        self._max_queries = max(shape.num_queries for shape in shapes)
        size = max(shape.num_requests * self._find_width(shape) for shape in shapes)
        # A shape's tables lie side by side at its beginning.
        self.buffer = torch.zeros(size, dtype=torch.int64, device=device)
        self._staging = StagingBuffers((size,), torch.int64, device)

    def _find_widths(self, shape: DecodeShape) -> list[int]:
        """Returns the block ids that each group has of a request."""
        return [
            _most_blocks(group, self._max_queries, shape.limit) for group in self._layout.groups
        ]

    def _find_width(self, shape: DecodeShape) -> int:
        """Returns the numbers that a shape has of a request."""
        return _NUM_BOUNDS + sum(1 + width for width in self._find_widths(shape))

    def lay_out(self, slices: Sequence[RequestSlice], shape: DecodeShape) -> LaidOutStep:
        """Upload the tables of requests with few tokens, filled up with rows of no request.

        Raises:
            InvariantError: A row that attention must read is not stored (I5).
        """
        if slices:
            self._check_stored(slices)
        used = self._staging.take()[: shape.num_requests * self._find_width(shape)]
        host = used.numpy().reshape(shape.num_requests, -1)
        host[:] = 0
        host[len(slices) :, 0] = -1
        widths = self._find_widths(shape)
        for row, item in zip(host, slices, strict=False):
            row[:_NUM_BOUNDS] = item.start, item.read_from, item.num_tokens
            first = _NUM_BOUNDS
            for group_id, (group, width) in enumerate(
                zip(self._layout.groups, widths, strict=True)
            ):
                if group.state is not None:
                    _put_states(row[first : first + 1 + width], item, group, group_id)
                    first += 1 + width
                    continue
                table = item.tables[self._layout.find_table(group_id)]
                # Only the blocks that the step reads and writes.
                reach = find_reach(group)
                lowest = 0 if reach is None else max(0, item.start - reach) // group.block_size
                skipped = max(0, lowest - table.base)
                ids = table.block_ids[skipped : skipped + width]
                row[first] = table.base + skipped
                row[first + 1 : first + 1 + len(ids)] = ids
                first += 1 + width
        self._staging.send(used, self.buffer[: len(used)])
        return LaidOutStep(shape)

    def _check_stored(self, slices: Sequence[RequestSlice]) -> None:
        """Sees that every row that the step reads has a block.

        Raises:
            InvariantError: One has none (I5).
        """
        starts = np.array([item.start for item in slices], dtype=np.int64)
        read_from = np.array([item.read_from for item in slices], dtype=np.int64)
        ends = starts + np.array([item.num_tokens for item in slices], dtype=np.int64)
        for group_id, group in enumerate(self._layout.groups):
            if group.state is not None:
                continue
            low = find_first_read(group, starts, read_from)
            high = starts
            if group.kind in ("dense", "keys"):
                high = find_entry_start(count_entries(ends, group.ratio), group.ratio)
            elif group.kind == "state":
                completes = count_entries(ends, group.ratio) > count_entries(starts, group.ratio)
                high = np.where(completes, starts, low)
            table_id = self._layout.find_table(group_id)
            tables = [item.tables[table_id] for item in slices]
            BlockLookup(tables, group, _HOST).check_stored(low, high)

    def expand(self, shape: DecodeShape) -> ExpandedStep:
        """Return the tables that layers read, computed on the device."""
        size = shape.num_requests * self._find_width(shape)
        rows = self.buffer[:size].view(shape.num_requests, -1)
        step = _Rows(rows[:, :1], rows[:, 1:2], rows[:, 2:3], shape)
        windows: dict[int, WindowMetadata] = {}
        states: dict[int, StateMetadata] = {}
        entries: dict[int, DenseMetadata] = {}
        keys: dict[int, KeyMetadata] = {}
        recurrent: dict[int, tuple[StateTables, StateLayout]] = {}
        first = _NUM_BOUNDS
        for group_id, (group, width) in enumerate(
            zip(self._layout.groups, self._find_widths(shape), strict=True)
        ):
            table = _Table(group, rows[:, first : first + 1], rows[:, first + 1 :][:, :width])
            first += 1 + width
            if group.state is not None:
                recurrent[group_id] = _expand_recurrent(table, step), group.state
            elif group.kind == "keys":
                keys[group_id] = KeyMetadata(_own_rows(table, step), (), (), (_StoredKeys(table),))
            elif group.kind == "window":
                windows[group_id] = _expand_window(table, step)
            elif group.kind == "state":
                states[group_id] = _expand_state(table, step)
            else:
                entries[group_id] = _expand_dense(table, step)
        meta = StepMetadata(
            num_tokens=shape.num_rows,
            decodes=(DecodeBatch(None, shape.num_requests, shape.num_queries),),
            chunks=(),
            plans=self._make_plans(step),
            windows=windows,
            states=states,
            entries=entries,
            group_of=self._layout.group_of,
            keys=keys,
            state_runner=self._make_runner(recurrent, step),
        )
        if shape.num_queries == 1:
            return ExpandedStep(meta, None, None)
        return ExpandedStep(meta, step.find_sources(), step.find_places())

    def _make_runner(
        self, tables: Mapping[int, tuple[StateTables, StateLayout]], step: "_Rows"
    ) -> StateRunner:
        slots = None
        if self._drafts is not None and step.shape.num_queries > 1:
            slots = step.find_draft_slots().to(torch.int32)
        return StateRunner(tables, self._layout.group_of, self._kv_caches, self._drafts, slots)

    def _make_plans(self, step: "_Rows") -> Mapping[tuple[int, int], AttentionPlan]:
        groups = self._layout.groups
        lengths = sorted({group.window for group in groups if group.kind == "window"})
        ratios = sorted({group.ratio for group in groups if group.kind == "dense"})
        device = step.starts.device
        # [B, Q, 1] of the queries, from the request's start on.
        offsets = step.offsets[:, :, None]
        plans = {}
        for window in lengths:
            keys = torch.arange(1 - window, MAX_DECODE_QUERIES, device=device)
            # The query's own key is seen in padding too: a row without keys is no number.
            is_there = (keys >= 0) | (keys + step.starts >= step.read_from)
            sees_rows = is_there[:, None] & sees_row(keys, offsets, window)
            for ratio in (0, *ratios):
                parts = [sees_rows]
                if ratio:
                    numbers = torch.arange(step.shape.limit // ratio, device=device)
                    parts.append(sees_entry(numbers, step.positions[:, :, None], ratio))
                seen = torch.cat(parts, 2)
                mask = torch.zeros(seen.shape, dtype=torch.float32, device=device)
                mask = mask.masked_fill(~seen, float("-inf"))
                plans[window, ratio] = AttentionPlan((mask[:, :, None],), ())
        return plans


@dataclass(frozen=True, slots=True)
class _Rows:
    """The requests of a step on the device.

    Attributes:
        starts: Their first positions, int64 [B, 1]; negative: no request.
        read_from: The first positions whose window rows are stored [B, 1].
        counts: Their tokens [B, 1]; of no request 0.
        shape: B requests of Q rows each.
    """

    starts: torch.Tensor
    read_from: torch.Tensor
    counts: torch.Tensor
    shape: DecodeShape

    @property
    def _queries(self) -> torch.Tensor:
        return torch.arange(self.shape.num_queries, device=self.starts.device)

    @property
    def offsets(self) -> torch.Tensor:
        """Of each row [B, Q], from its request's start on; of padding the last one's."""
        return torch.minimum(self._queries, (self.counts - 1).clamp(min=0))

    @property
    def positions(self) -> torch.Tensor:
        """Of each row [B, Q]; of no request negative."""
        return self.starts + self.offsets

    @property
    def ends(self) -> torch.Tensor:
        """Positions behind the step [B, 1]; of no request negative."""
        return self.starts + self.counts

    @property
    def are_there(self) -> torch.Tensor:
        """Which rows [B, Q] are no padding."""
        return self._queries < self.counts

    def find_sources(self) -> torch.Tensor:
        """Returns the flat row of each row [B * Q]."""
        flat = (self.counts.cumsum(0) - self.counts + self.offsets).flatten()
        return flat.clamp(max=self.shape.num_rows - 1)

    def find_draft_slots(self) -> torch.Tensor:
        """Returns each row's number among the drafts [B * Q]; of first rows and padding -1."""
        counts = (self.counts - 1).clamp(min=0)
        numbers = counts.cumsum(0) - counts + self._queries - 1
        return numbers.masked_fill(~self.are_there | (self._queries == 0), -1).flatten()

    def find_places(self) -> torch.Tensor:
        """Returns the row of each flat row [B * Q]; for those behind the step's some row."""
        ends = self.counts.cumsum(0)
        flat = torch.arange(self.shape.num_rows, device=ends.device)
        requests = (flat >= ends).sum(0).clamp(max=self.shape.num_requests - 1)
        offsets = flat - (ends - self.counts).flatten()[requests]
        return requests * self.shape.num_queries + offsets.clamp(0, self.shape.num_queries - 1)


@dataclass(frozen=True, slots=True)
class _Table:
    """Block tables of one group on the device: bases [B, 1] and ids [B, M], 0 where none is."""

    group: GroupLayout
    bases: torch.Tensor
    block_ids: torch.Tensor

    def locate(self, positions: torch.Tensor, is_there: torch.Tensor) -> PageRows:
        """Returns addresses of positions [B, L]; the null block's where they are not stored."""
        num_blocks, stored = self.block_ids.shape[1], positions.clamp(min=0)
        index = find_block_index(self.group, stored) - self.bases
        is_inside = is_there & (positions >= 0) & (index >= 0) & (index < num_blocks)
        blocks = self.block_ids.gather(1, index.clamp(0, num_blocks - 1))
        return PageRows(blocks.masked_fill(~is_inside, 0), find_row(self.group, stored))


@dataclass(frozen=True, slots=True)
class _StoredKeys:
    """A decode batch's keys, all of them stored; a ``PicksKeys``."""

    table: _Table

    def pick_rows(
        self, positions: torch.Tensor, own: torch.Tensor, read: Callable[[PageRows], torch.Tensor]
    ) -> torch.Tensor:
        """See ``PicksKeys``."""
        del own
        return read(self.table.locate(positions, positions >= 0))


def _put_states(row: np.ndarray, item: RequestSlice, group: GroupLayout, group_id: int) -> None:
    """Writes whether a request begins with a state, its blocks, and those of the state it leaves.

    Raises:
        InvariantError: It has no blocks (I5).
    """
    assert group.state is not None
    num_blocks = group.state.num_blocks
    _, ids = find_states([item], group, group_id, 0)
    row[0] = len(ids) == 2
    row[1 : 1 + num_blocks] = ids[0]
    row[1 + num_blocks :] = ids[-1]


def _expand_recurrent(table: _Table, step: _Rows) -> StateTables:
    ids, counts = table.block_ids, step.counts[:, 0]
    width = ids.shape[1]
    numbers = torch.arange(len(ids), device=ids.device)
    begins = (counts > 0) & (table.bases[:, 0] > 0)
    owners = numbers[:, None].expand(step.are_there.shape)
    # Every request leaves the state behind its first token.
    columns = [
        owners.masked_fill(~step.are_there, -1).flatten(),
        numbers * step.shape.num_queries,
        counts,
        (numbers * width).masked_fill(~begins, -1),
        numbers,
        counts > 0,
        torch.ones_like(numbers),
        numbers * width + width // 2,
        ids.flatten(),
    ]
    return StateTables(*(column.to(torch.int32) for column in columns))


def _own_rows(table: _Table, step: _Rows) -> RowWrites:
    own = table.locate(step.positions, step.are_there)
    return RowWrites(None, PageRows(own.blocks.flatten(), own.rows.flatten()))


def _expand_window(table: _Table, step: _Rows) -> WindowMetadata:
    window, starts = table.group.window, step.starts
    positions = torch.arange(1 - window, 0, device=starts.device) + starts
    source = table.locate(positions, (starts >= 0) & (positions >= step.read_from))
    lengths = (starts - find_first_prior(starts, step.read_from, window)).flatten()
    return WindowMetadata(
        writes=_own_rows(table, step),
        decode_reads=(PaddedRows(source, lengths, 0, None),),
        chunk_reads=(),
    )


def _find_window_ends(step: _Rows, ratio: int) -> torch.Tensor:
    """Returns where the windows [B, N] end that the step may complete, the open one first."""
    number = torch.arange(cdiv(step.shape.num_queries, ratio), device=step.starts.device)
    opened = count_entries(step.starts.clamp(min=0), ratio)
    return find_entry_start(opened + 1 + number, ratio)


def _expand_state(table: _Table, step: _Rows) -> StateMetadata:
    """Every request's windows, as if this step completed them: entries of others go nowhere.

    The rows before the step's own are read from pages; a window that the step leaves open has its
    last row again where it lacks some.
    """
    group, starts = table.group, step.starts
    num_rows, ratio = count_rows_read(group), group.ratio
    num_requests, num_queries = step.shape.num_requests, step.shape.num_queries
    num_prior = num_rows - 1
    prior = table.locate(torch.arange(-num_prior, 0, device=starts.device) + starts, starts >= 0)
    ends = _find_window_ends(step, ratio)
    entry_starts = ends - ratio
    requests = torch.arange(num_requests, device=starts.device)[:, None, None]

    def index_rows(first: int) -> torch.Tensor:
        """Returns the rows [B * N, ratio] from ``first`` on behind the windows' ends."""
        offsets = (
            torch.arange(first, first + ratio, device=starts.device) + (ends - starts)[..., None]
        )
        own = num_requests * num_prior + requests * num_queries + offsets.clamp(0, num_queries - 1)
        before = requests * num_prior + (offsets + num_prior).clamp(0, num_prior - 1)
        return torch.where(offsets < 0, before, own).flatten(0, 1)

    previous, no_previous = None, None
    if group.has_overlap:
        previous = index_rows(-2 * ratio)
        no_previous = is_first_entry(entry_starts).view(-1, 1, 1)
    return StateMetadata(
        writes=_own_rows(table, step),
        phases=(step.positions.clamp(min=0) % ratio).flatten(),
        prior=PageRows(prior.blocks.flatten(), prior.rows.flatten()),
        windows=index_rows(-ratio),
        previous_windows=previous,
        no_previous=no_previous,
        entry_positions=entry_starts.flatten(),
    )


def _expand_dense(table: _Table, step: _Rows) -> DenseMetadata:
    ratio = table.group.ratio
    lengths = count_entries(step.ends, ratio)
    entries = torch.arange(step.shape.limit // ratio, device=lengths.device)
    positions = find_entry_start(entries, ratio).expand(len(lengths), -1)
    source = table.locate(positions, entries < lengths)
    ends = _find_window_ends(step, ratio)
    target = table.locate(ends - ratio, ends <= step.ends)
    return DenseMetadata(
        target=PageRows(target.blocks.flatten(), target.rows.flatten()),
        decode_reads=(PaddedRows(source, lengths.flatten(), 0, None),),
        chunk_reads=(),
    )


def _most_blocks(group: GroupLayout, max_queries: int, max_tokens: int) -> int:
    """Returns the most blocks of a request that a decode step reads or writes."""
    if group.state is not None:
        # Those of the state that a request begins with, and of the one that it leaves.
        return 2 * group.state.num_blocks
    reach = find_reach(group)
    if reach is None:
        return cdiv(max_tokens, group.block_size)
    return (reach + max_queries - 1) // group.block_size + 2
