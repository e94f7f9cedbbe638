"""Index tables of recurrent states: which state a request's step begins with, which it leaves.

    unit of 32, a step over tokens 40 .. 99     read       the state in the blocks of 32 .. 63
                                                           (after token 39)
                                                leaves     after token 63, if the request was given
                                                           blocks for it besides (the same ones)
                                                           after token 95, if it was given blocks
                                                           after token 99, always, in those of 96 ..

A state is stored wherever a unit ends whose blocks the request holds, so a chunk leaves several.
A step with drafts leaves the state behind its last certain token. Once it is known which drafts
stand, these are run again from there, so that whatever is published then is stored.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from vllm.exceptions import InvariantError
from vllm.utils.math_utils import cdiv
from vllm.utils.uploads import upload
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.step_batch import StepBatch
from vllm.v1.attention.step_tables import (
    BlockTableView,
    RecurrentRows,
    RequestSlice,
    StoredState,
)

NUM_BY_REQUEST = 3
"""Columns that ``find_states`` gives by request; the others are by state that is left."""


def build_recurrent_rows(
    batch: StepBatch, group: GroupLayout, group_id: int, device: torch.device
) -> tuple[RecurrentRows, ...]:
    """Builds one group's tables, one entry a request.

    Raises:
        InvariantError: The state that a request begins with, or the one that it ends with, has no
            blocks (I5).
    """
    found = []
    for number, item in enumerate(batch.slices):
        row = int(batch.row_starts[number])
        found.append(_build_request(number, item, row, group, group_id, device))
    return tuple(found)


def find_states(
    slices: Sequence[RequestSlice], group: GroupLayout, group_id: int, num_ids: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Finds one group's states for kernels that read block ids themselves.

    Args:
        slices: The step's requests with tokens.
        group: The group.
        group_id: Its number.
        num_ids: Block ids that stand before these.

    Returns:
        The columns of ``StateTables`` from ``sources`` to ``store_tables``, and the block ids. The
        first three have one value a request, the others one for each state that is left.

    Raises:
        InvariantError: As ``build_recurrent_rows``.
    """
    columns: list[list[int]] = [[] for _ in range(5)]
    sources, firsts, counts, ends, tables = columns
    ids: list[np.ndarray] = []

    def place(blocks: np.ndarray) -> int:
        nonlocal num_ids
        ids.append(blocks)
        num_ids += len(blocks)
        return num_ids - len(blocks)

    for number, item in enumerate(slices):
        source, stores = _find_request(number, item, group, group_id)
        sources.append(-1 if source is None else place(source))
        firsts.append(len(ends))
        counts.append(len(stores))
        for end, blocks in stores:
            ends.append(end)
            tables.append(place(blocks))
    return [np.array(column, dtype=np.int64) for column in columns], ids


def count_stores(num_tokens: int, unit: int) -> int:
    """Return how many states a request leaves at most, at ends of units and behind its last token.

    Args:
        num_tokens: Of a step.
        unit: Tokens of a unit.
    """
    return 1 + cdiv(num_tokens - 1, unit)


def build_settled_rows(
    slices: Sequence[RequestSlice],
    num_accepted: Sequence[int],
    layout: CacheLayout,
    device: torch.device,
) -> tuple[RecurrentRows | None, ...]:
    """Builds the tables by which a step's accepted drafts are run again, for what they leave.

    Args:
        slices: The step's requests.
        num_accepted: Of each, how many of its drafts stand.
        layout: The groups, of which one keeps states.
        device: Where the tables are used.

    Returns:
        One entry for each request with tokens that had drafts, in order; None: none stands. Rows
        count from a request's first draft.

    Raises:
        InvariantError: As ``build_recurrent_rows``.
    """
    group_id = next(i for i, group in enumerate(layout.groups) if group.kind == "recurrent")
    group = layout.groups[group_id]
    found: list[RecurrentRows | None] = []
    for number, (item, accepted) in enumerate(zip(slices, num_accepted, strict=True)):
        if not item.num_tokens or not item.num_drafts:
            continue
        start = item.start + item.num_tokens - item.num_drafts
        own = replace(item, start=start, num_tokens=accepted, num_drafts=0)
        rows = _build_request(number, own, 0, group, group_id, device) if accepted else None
        found.append(rows)
    return tuple(found)


def _build_request(
    number: int,
    item: RequestSlice,
    row: int,
    group: GroupLayout,
    group_id: int,
    device: torch.device,
) -> RecurrentRows:
    source, stores = _find_request(number, item, group, group_id)
    return RecurrentRows(
        slice(row, row + item.num_tokens),
        None if source is None else upload(source, device),
        tuple(StoredState(end, upload(blocks, device)) for end, blocks in stores),
        item.num_drafts,
    )


def _find_request(
    number: int, item: RequestSlice, group: GroupLayout, group_id: int
) -> tuple[np.ndarray | None, list[tuple[int, np.ndarray]]]:
    """Returns the blocks of the state that a request begins with, and (end, blocks) of those that
    it leaves."""
    assert group.state is not None
    unit, num_pieces, table = group.block_size, group.state.num_blocks, item.tables[group_id]
    start, end = item.start, item.start + item.num_tokens - item.num_drafts
    source = None
    if start:
        source = _find_state(table, start, unit, num_pieces)
        if source is None:
            raise _missing(number, start, table)
    stores = []
    for boundary in range((start // unit + 1) * unit, end, unit):
        ids = _find_state(table, boundary, unit, num_pieces)
        if ids is not None:
            stores.append((boundary - start, ids))
    ids = _find_state(table, end, unit, num_pieces)
    if ids is None:
        raise _missing(number, end, table)
    stores.append((end - start, ids))
    return source, stores


def _find_state(
    table: BlockTableView, position: int, unit: int, num_pieces: int
) -> np.ndarray | None:
    """Returns the blocks of the state behind ``position`` tokens; None: there are none."""
    first = (position - 1) // unit * num_pieces - table.base
    if first < 0 or first + num_pieces > len(table.block_ids):
        return None
    ids: np.ndarray = table.block_ids[first : first + num_pieces]
    return ids if ids.all() else None


def _missing(number: int, position: int, table: BlockTableView) -> InvariantError:
    return InvariantError(
        f"I5: the step's request {number} needs the recurrent state behind {position} tokens, but "
        f"its table ({len(table.block_ids)} blocks from number {table.base}) stores no block there"
    )
