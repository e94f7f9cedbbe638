"""Decode steps of models with windows, compressor states and entries, at fixed addresses.

    host: starts, first rows to read | by group: bases, block ids     one buffer, one upload
    device, in the captured step:    addresses, masks, windows        from the buffer alone

What a step uploads are its requests' block tables; the index tables that layers read are computed
from them on the device, so that a captured step computes those of whatever was uploaded last. Their
shapes follow from the number of requests and the tokens that a context may have, the step's
``DecodeShape``. Rows that a request does not have are addressed in the null block, which kernels
read as zeros and never write: a window that the step does not complete is computed all the same,
and goes nowhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm.utils.math_utils import cdiv
from vllm.utils.uploads import StagingBuffers
from vllm.v1.attention.block_lookup import BlockLookup
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.step_batch import ragged_arange
from vllm.v1.attention.step_tables import (
    AttentionPlan,
    DecodeBatch,
    DenseMetadata,
    PaddedRows,
    PageRows,
    RequestSlice,
    RowWrites,
    StateMetadata,
    StepMetadata,
    WindowMetadata,
)

_HOST = torch.device("cpu")
# Contexts up to this length share a shape; then there is one for each doubling.
_LEAST_LIMIT = 4096
# Before the groups' tables, of each request: its first position of the step (negative: no request),
# and the first whose window rows are stored.
_NUM_BOUNDS = 2


@dataclass(frozen=True, slots=True, order=True)
class DecodeShape:
    """What fixes the shapes of a decode step.

    Attributes:
        num_requests: Requests, with those of padding.
        limit: Most tokens of a context.
    """

    num_requests: int
    limit: int


@dataclass(frozen=True, slots=True)
class LaidOutStep:
    """A decode step whose block tables are on the device; stands where ``StepMetadata`` does."""

    shape: DecodeShape


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


class EntryTables:
    """Lays decode steps out.

    Args:
        layout: The KV groups, of kinds "window", "state" and "dense".
        max_requests: Of a step.
        max_tokens: Of a context.
        device: Where the tables are used.

    Owns: the buffer on the device, and those of the host that it is filled from.
    """

    def __init__(
        self, layout: CacheLayout, max_requests: int, max_tokens: int, device: torch.device
    ) -> None:
        self._layout = layout
        self._widths = [_most_blocks(group, max_tokens) for group in layout.groups]
        width = _NUM_BOUNDS + sum(1 + width for width in self._widths)
        self.buffer = torch.zeros((max_requests, width), dtype=torch.int64, device=device)
        self._staging = StagingBuffers((max_requests, width), torch.int64, device)

    def lay_out(self, slices: Sequence[RequestSlice], shape: DecodeShape) -> LaidOutStep:
        """Upload the tables of requests with a token each, filled up with rows of no request.

        Raises:
            InvariantError: A row that attention must read is not stored (I5).
        """
        if slices:
            self._check_stored(slices)
        buffer = self._staging.take()[: shape.num_requests]
        host = buffer.numpy()
        host[:] = 0
        host[len(slices) :, 0] = -1
        for row, item in zip(host, slices, strict=False):
            row[0], row[1] = item.start, item.read_from
            first = _NUM_BOUNDS
            for group, table, width in zip(
                self._layout.groups, item.tables, self._widths, strict=True
            ):
                # Only the blocks that the step reads and writes.
                reach = _find_reach(group)
                lowest = 0 if reach is None else max(0, item.start - reach) // group.block_size
                skipped = max(0, lowest - table.base)
                ids = table.block_ids[skipped : skipped + width]
                row[first] = table.base + skipped
                row[first + 1 : first + 1 + len(ids)] = ids
                first += 1 + width
        self._staging.send(buffer, self.buffer[: shape.num_requests])
        return LaidOutStep(shape)

    def _check_stored(self, slices: Sequence[RequestSlice]) -> None:
        """Sees that every row that the step reads has a block.

        Raises:
            InvariantError: One has none (I5).
        """
        starts = np.array([item.start for item in slices], dtype=np.int64)
        read_from = np.array([item.read_from for item in slices], dtype=np.int64)
        ends = starts + 1
        for group_id, group in enumerate(self._layout.groups):
            if group.kind == "window":
                low, high = np.maximum(read_from, starts - (group.window - 1)), starts
            elif group.kind == "dense":
                low, high = np.zeros_like(starts), ends // group.ratio * group.ratio
            else:
                rows = _rows_read(group)
                low = np.maximum(ends - rows, 0)
                high = np.where(ends % group.ratio == 0, starts, low)
            # One position a block is enough.
            size = group.block_size
            first = low // size
            counts = np.where(high > low, -(-high // size) - first, 0)
            requests = np.repeat(np.arange(len(starts)), counts)
            positions = np.maximum(ragged_arange(first, counts) * size, low[requests])
            tables = [item.tables[group_id] for item in slices]
            BlockLookup(tables, group, _HOST).locate(requests, positions)

    def expand(self, shape: DecodeShape) -> StepMetadata:
        """Return the tables that layers read, computed on the device."""
        rows = self.buffer[: shape.num_requests]
        starts, read_from = rows[:, :1], rows[:, 1:2]
        windows: dict[int, WindowMetadata] = {}
        states: dict[int, StateMetadata] = {}
        entries: dict[int, DenseMetadata] = {}
        first = _NUM_BOUNDS
        for group_id, (group, width) in enumerate(
            zip(self._layout.groups, self._widths, strict=True)
        ):
            table = _Table(group, rows[:, first : first + 1], rows[:, first + 1 :][:, :width])
            first += 1 + width
            if group.kind == "window":
                windows[group_id] = _expand_window(table, starts, read_from)
            elif group.kind == "state":
                states[group_id] = _expand_state(table, starts)
            else:
                entries[group_id] = _expand_dense(table, starts, shape.limit)
        return StepMetadata(
            num_tokens=shape.num_requests,
            decodes=(DecodeBatch(None, shape.num_requests),),
            chunks=(),
            plans=self._make_plans(starts, read_from, shape.limit),
            windows=windows,
            states=states,
            entries=entries,
            group_of=self._layout.group_of,
            keys={},
        )

    def _make_plans(
        self, starts: torch.Tensor, read_from: torch.Tensor, limit: int
    ) -> Mapping[tuple[int, int], AttentionPlan]:
        groups = self._layout.groups
        lengths = sorted({group.window for group in groups if group.kind == "window"})
        ratios = sorted({group.ratio for group in groups if group.kind == "dense"})
        device = starts.device
        plans = {}
        for window in lengths:
            before = torch.arange(1 - window, 1, device=device) + starts
            sees_rows = before >= read_from
            # The last key is the query's own, of padding too: a row without keys is no number.
            sees_rows[:, -1].fill_(True)
            for ratio in (0, *ratios):
                parts = [sees_rows]
                if ratio:
                    numbers = torch.arange(limit // ratio, device=device)
                    parts.insert(0, numbers < (starts + 1) // ratio)
                mask = torch.zeros(
                    (len(starts), sum(part.shape[1] for part in parts)),
                    dtype=torch.float32,
                    device=device,
                )
                mask = mask.masked_fill(~torch.cat(parts, 1), float("-inf"))
                plans[window, ratio] = AttentionPlan((mask[:, None, None],), ())
        return plans


@dataclass(frozen=True, slots=True)
class _Table:
    """Block tables of one group on the device: bases [B, 1] and ids [B, M], 0 where none is."""

    group: GroupLayout
    bases: torch.Tensor
    block_ids: torch.Tensor

    def locate(self, positions: torch.Tensor, is_there: torch.Tensor) -> PageRows:
        """Returns addresses of positions [B, L]; the null block's where they are not stored."""
        size, num_blocks = self.group.block_size, self.block_ids.shape[1]
        index = positions.clamp(min=0) // size - self.bases
        is_inside = is_there & (positions >= 0) & (index >= 0) & (index < num_blocks)
        blocks = self.block_ids.gather(1, index.clamp(0, num_blocks - 1))
        rows = positions.clamp(min=0) % size // (size // self.group.rows_per_block)
        return PageRows(blocks.masked_fill(~is_inside, 0), rows)


def _own_rows(table: _Table, starts: torch.Tensor) -> RowWrites:
    own = table.locate(starts, starts >= 0)
    return RowWrites(None, PageRows(own.blocks.flatten(), own.rows.flatten()))


def _expand_window(table: _Table, starts: torch.Tensor, read_from: torch.Tensor) -> WindowMetadata:
    window = table.group.window
    positions = torch.arange(1 - window, 0, device=starts.device) + starts
    source = table.locate(positions, (starts >= 0) & (positions >= read_from))
    lengths = torch.minimum(starts - read_from, torch.full_like(starts, window - 1)).flatten()
    return WindowMetadata(
        writes=_own_rows(table, starts),
        decode_reads=(PaddedRows(source, lengths, 0, None),),
        chunk_reads=(),
    )


def _rows_read(group: GroupLayout) -> int:
    """Returns how many rows a window of a compressor reads."""
    return group.ratio * (2 if group.has_overlap else 1)


def _expand_state(table: _Table, starts: torch.Tensor) -> StateMetadata:
    """Every request's window, as if this step completed it: entries of others go nowhere.

    The last row of a window is the step's own, the others are read from pages.
    """
    group, device = table.group, starts.device
    num_requests, num_rows, ratio = len(starts), _rows_read(table.group), table.group.ratio
    positions = torch.arange(1 - num_rows, 1, device=device) + starts
    prior = table.locate(positions, starts >= 0)
    index = torch.arange(num_requests * num_rows, device=device).view(num_requests, num_rows)
    own = torch.arange(num_requests, device=device)[:, None] + num_requests * num_rows
    windows = torch.cat([index[:, num_rows - ratio : -1], own], 1)
    previous, no_previous = None, None
    if group.has_overlap:
        previous = index[:, :ratio]
        no_previous = (starts < 2 * ratio - 1)[:, :, None]
    return StateMetadata(
        writes=_own_rows(table, starts),
        phases=(starts.clamp(min=0) % ratio).flatten(),
        prior=PageRows(prior.blocks.flatten(), prior.rows.flatten()),
        windows=windows,
        previous_windows=previous,
        no_previous=no_previous,
        entry_positions=(starts + 1 - ratio).clamp(min=0).flatten(),
    )


def _expand_dense(table: _Table, starts: torch.Tensor, limit: int) -> DenseMetadata:
    ratio = table.group.ratio
    lengths = (starts + 1) // ratio
    entries = torch.arange(limit // ratio, device=starts.device)
    source = table.locate((entries * ratio).expand(len(starts), -1), entries < lengths)
    target = table.locate(starts + 1 - ratio, (starts >= 0) & ((starts + 1) % ratio == 0))
    return DenseMetadata(
        target=PageRows(target.blocks.flatten(), target.rows.flatten()),
        decode_reads=(PaddedRows(source, lengths.flatten(), 0, None),),
        chunk_reads=(),
    )


def _find_reach(group: GroupLayout) -> int | None:
    """Returns how many positions before its own a query reads; None: all of them."""
    if group.kind == "window":
        return group.window - 1
    return _rows_read(group) - 1 if group.kind == "state" else None


def _most_blocks(group: GroupLayout, max_tokens: int) -> int:
    """Returns the most blocks of a request that a decode step reads or writes."""
    reach = _find_reach(group)
    if reach is None:
        return cdiv(max_tokens, group.block_size)
    return reach // group.block_size + 2
