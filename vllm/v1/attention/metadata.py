"""Builds the index tables of one step from the requests' block tables.

The tables themselves are described in ``step_tables``; the names other packages use are
re-exported here.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm.exceptions import InvariantError
from vllm.utils.uploads import upload
from vllm.v1.attention.attention_plan import build_attention_plans
from vllm.v1.attention.block_lookup import BlockLookup
from vllm.v1.attention.key_tables import build_key_metadata
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.previous_tokens import find_previous
from vllm.v1.attention.recurrent_tables import build_recurrent_rows
from vllm.v1.attention.step_batch import StepBatch, ragged_arange
from vllm.v1.attention.step_rules import (
    count_entries,
    find_entry_start,
    find_first_read,
    is_first_entry,
)
from vllm.v1.attention.step_tables import (
    BlockTableView,
    DenseMetadata,
    KeyMetadata,
    PaddedRows,
    PageRows,
    RecurrentRows,
    RequestSlice,
    RowWrites,
    StateMetadata,
    StepMetadata,
    WindowMetadata,
)

__all__ = [
    "BlockTableView",
    "CacheLayout",
    "GroupLayout",
    "RequestSlice",
    "StepMetadata",
    "build_step_metadata",
]


def build_step_metadata(
    slices: Sequence[RequestSlice], layout: CacheLayout, device: torch.device | str
) -> StepMetadata:
    """Builds the tables of one step.

    Args:
        slices: The requests in flat-batch order; those without tokens are ignored.
        layout: Geometry of the groups.
        device: Where the tables are used.

    Raises:
        InvariantError: A row that attention must read is not stored (I5), or the bounds of what is
            written contradict each other.
    """
    torch_device = torch.device(device)
    reads_keys = any(group.kind == "keys" for group in layout.groups)
    batch = StepBatch.from_slices(slices, torch_device, reads_keys=reads_keys)
    entries_from = _find_entries_from(batch, layout)
    windows: dict[int, WindowMetadata] = {}
    states: dict[int, StateMetadata] = {}
    entries: dict[int, DenseMetadata] = {}
    keys: dict[int, KeyMetadata] = {}
    recurrent: dict[int, tuple[RecurrentRows, ...]] = {}
    for group_id, group in enumerate(layout.groups):
        if group.kind == "recurrent":
            recurrent[group_id] = build_recurrent_rows(batch, group, group_id, torch_device)
            continue
        table_id = layout.find_table(group_id)
        tables = [batch_slice.tables[table_id] for batch_slice in batch.slices]
        lookup = BlockLookup(tables, group, torch_device)
        if group.kind == "keys":
            write_from = batch.find_write_from(table_id)
            writes = _build_writes(batch, lookup, write_from)
            keys[group_id] = build_key_metadata(batch, group, lookup, writes, write_from)
        elif group.kind == "window":
            writes = _build_writes(batch, lookup, batch.find_write_from(table_id))
            windows[group_id] = _build_window(batch, group, lookup, writes)
        elif group.kind == "state":
            writes = _build_writes(batch, lookup, batch.find_write_from(table_id))
            states[group_id] = _build_state(batch, group, lookup, writes, entries_from[group.ratio])
        else:
            entries[group_id] = _build_dense(batch, group, lookup, entries_from[group.ratio])
    return StepMetadata(
        num_tokens=batch.num_tokens,
        decodes=batch.decodes,
        chunks=batch.chunks,
        plans=build_attention_plans(batch, layout, torch_device),
        windows=windows,
        states=states,
        entries=entries,
        group_of=layout.group_of,
        keys=keys,
        recurrent=recurrent,
        previous=find_previous(batch.slices, torch_device),
    )


def _find_entries_from(batch: StepBatch, layout: CacheLayout) -> dict[int, np.ndarray]:
    """Returns by ratio the position from which each request writes entries, int64 [R]."""
    found: dict[int, np.ndarray] = {}
    for group_id, group in enumerate(layout.groups):
        if group.kind == "dense":
            own = batch.find_write_from(layout.find_table(group_id))
            # Their compressors fill the same windows, so one list of windows serves them all.
            if not np.array_equal(found.setdefault(group.ratio, own), own):
                raise InvariantError(
                    f"dense groups of ratio {group.ratio} write from different positions: "
                    f"{found[group.ratio]} and {own} (group {group_id})"
                )
    return found


def _build_writes(batch: StepBatch, lookup: BlockLookup, write_from: np.ndarray) -> RowWrites:
    """Keeps the rows of this step that are to be written and whose block is stored."""
    blocks = lookup.find_blocks(batch.request_of_row, batch.position_of_row)
    rows = lookup.find_rows(batch.position_of_row)
    if write_from is not batch.starts:
        blocks[batch.position_of_row < write_from[batch.request_of_row]] = 0
    if blocks.all():
        return RowWrites(None, lookup.to_page_rows(blocks, rows))
    kept = np.flatnonzero(blocks)
    return RowWrites(upload(kept, lookup.device), lookup.to_page_rows(blocks[kept], rows[kept]))


def _build_window(
    batch: StepBatch, group: GroupLayout, lookup: BlockLookup, writes: RowWrites
) -> WindowMetadata:
    num_prior = batch.count_prior(group.window)
    decode_reads = []
    for requests in batch.decode_requests:
        starts = batch.starts[requests]
        lengths = num_prior[requests]
        # The last rows count: padding repeats each request's first row, which it has in its
        # window whenever it is short enough to be padded.
        positions = starts[:, None] - np.arange(int(lengths.max()), 0, -1)
        positions = np.maximum(positions, batch.read_from[requests, None])
        decode_reads.append(_locate_padded(lookup, requests, positions, lengths))
    chunk_reads = []
    for request in batch.chunk_requests:
        start = int(batch.starts[request])
        positions = np.arange(start - int(num_prior[request]), start)
        chunk_reads.append(lookup.locate(np.full(1, request), positions))
    return WindowMetadata(
        writes=writes,
        decode_reads=tuple(decode_reads),
        chunk_reads=tuple(chunk_reads),
    )


def _locate_padded(
    lookup: BlockLookup, requests: np.ndarray, positions: np.ndarray, lengths: np.ndarray
) -> PaddedRows:
    """Locates [B, L] positions, of which requests with length 0 have none."""
    min_length = int(lengths.min())
    empty = None
    owners = requests[:, None]
    if min_length == 0 and positions.shape[1]:
        # Some other request has rows, or L would be 0: borrow its addresses.
        donor = int(lengths.argmax())
        is_empty = lengths == 0
        owners = np.where(is_empty[:, None], requests[donor], owners)
        positions = np.where(is_empty[:, None], positions[donor], positions)
        empty = upload(np.flatnonzero(is_empty), lookup.device)
    return PaddedRows(
        source=lookup.locate(owners, positions),
        lengths=upload(lengths, lookup.device),
        min_length=min_length,
        empty_requests=empty,
    )


def _build_state(
    batch: StepBatch,
    group: GroupLayout,
    lookup: BlockLookup,
    writes: RowWrites,
    entries_from: np.ndarray,
) -> StateMetadata:
    """Lays out, for each window completed in this step, where its rows are.

    Of a request that starts at s and writes entries from there on, with its open window at
    o = s // ratio * ratio (one that writes them from later on has o there, and fewer prior rows):

        prior rows (from pages)                own rows (this step)
        | o - ratio .. o - 1 (overlap) | o .. s - 1 | s .. end - 1 |
    """
    ratio, device = group.ratio, lookup.device
    requests, first_positions = batch.find_completed(ratio, entries_from)
    phases = upload(batch.position_of_row % ratio, device)
    if not len(requests):
        # Most decode steps: three in four at ratio 4.
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return StateMetadata(
            writes, phases, PageRows(nothing, nothing), nothing, None, None, nothing
        )
    first_needed = find_first_read(group, entries_from, batch.read_from)
    has_completed = count_entries(batch.ends, ratio) > count_entries(entries_from, ratio)
    num_prior = np.where(has_completed, np.maximum(batch.starts - first_needed, 0), 0)
    total_prior = int(num_prior.sum())
    # Index of position p: p + prior_shift among the prior rows, p + own_shift among this step's.
    prior_shift = (np.cumsum(num_prior) - num_prior - first_needed)[requests, None]
    own_shift = (total_prior + batch.row_starts - batch.starts)[requests, None]

    def index_rows(positions: np.ndarray) -> torch.Tensor:
        is_own = positions >= batch.starts[requests, None]
        return upload(positions + np.where(is_own, own_shift, prior_shift), device)

    positions = first_positions[:, None] + np.arange(ratio)
    previous, no_previous = None, None
    if group.has_overlap:
        lacks_previous = is_first_entry(first_positions)
        previous = index_rows(np.where(lacks_previous[:, None], positions, positions - ratio))
        if lacks_previous.any():
            no_previous = upload(lacks_previous[:, None, None], device)
    return StateMetadata(
        writes=writes,
        phases=phases,
        prior=lookup.locate(
            np.repeat(np.arange(len(num_prior)), num_prior), ragged_arange(first_needed, num_prior)
        ),
        windows=index_rows(positions),
        previous_windows=previous,
        no_previous=no_previous,
        entry_positions=upload(first_positions, device),
    )


def _build_dense(
    batch: StepBatch, group: GroupLayout, lookup: BlockLookup, entries_from: np.ndarray
) -> DenseMetadata:
    ratio = group.ratio
    requests, first_positions = batch.find_completed(ratio, entries_from)
    decode_reads = []
    for batch_requests in batch.decode_requests:
        lengths = count_entries(batch.ends[batch_requests], ratio)
        entries = np.minimum(np.arange(int(lengths.max())), np.maximum(lengths - 1, 0)[:, None])
        positions = find_entry_start(entries, ratio)
        decode_reads.append(_locate_padded(lookup, batch_requests, positions, lengths))
    num_entries = count_entries(batch.ends, ratio)
    chunk_reads = tuple(
        lookup.locate(np.full(1, request), find_entry_start(np.arange(num_entries[request]), ratio))
        for request in batch.chunk_requests
    )
    sources = None
    if ratio == 1 and len(requests) < batch.num_tokens:
        shift = batch.row_starts - batch.starts
        sources = upload(first_positions + shift[requests], lookup.device)
    return DenseMetadata(
        target=lookup.locate(requests, first_positions),
        decode_reads=tuple(decode_reads),
        chunk_reads=chunk_reads,
        sources=sources,
    )
