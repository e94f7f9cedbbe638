"""Which rows a step reads and writes of each kind of group: one rule for host and device.

The host lays a step out with numpy, its requests as they are. A captured step lays itself out on
the device with torch, filled up to its shape. How the tables lie differs; what is in them is said
here once, in operators that arrays of either have. Positions count from a prompt's start:

    window W      the query at p sees the rows (p - W, p]
    entries       of ratio r: number n is made of rows [n r, (n + 1) r), with overlap of the r rows
                  before them too; the step that computes (n + 1) r - 1 writes it, and queries
                  from there on see it

    step          ........ start . . . . end - 1        r = 4, step of tokens 6..12
    position      0 1 2 3|4 5 6 7|8 9 10 11|12
    entry         0      |1      |2        |            1 and 2 are written: ends // r = 3 of them
    overlap       entry 1 reads rows 0..7, entry 2 rows 4..11; of entry 0 there is nothing before

Index arithmetic only; no table, no device.
"""

from typing import TypeVar

import numpy as np
import torch

from vllm.v1.kv_cache_specs.layouts import GroupLayout

Positions = TypeVar("Positions", np.ndarray, torch.Tensor)


# ---- where a position lies ---------------------------------------------------------------------


def find_block_index(group: GroupLayout, positions: Positions) -> Positions:
    """Return the number of the block of a request that holds a position's row."""
    index: Positions = positions // group.block_size
    return index


def find_row(group: GroupLayout, positions: Positions) -> Positions:
    """Return a position's row inside its block; a row may stand for several tokens."""
    row: Positions = positions % group.block_size // (group.block_size // group.rows_per_block)
    return row


# ---- what queries see --------------------------------------------------------------------------


def sees_row(keys: Positions, queries: Positions, window: int) -> Positions:
    """Tell whether queries see rows; positions may count from anywhere.

    Args:
        keys: Positions of rows.
        queries: Positions of queries; the shapes broadcast.
        window: Tokens that a query attends to, itself included; 0: all up to itself.
    """
    seen: Positions = keys <= queries
    if window:
        seen &= keys > queries - window
    return seen


def count_entries(ends: Positions, ratio: int) -> Positions:
    """Return how many entries there are once the tokens below ``ends`` are computed."""
    counts: Positions = ends // ratio
    return counts


def sees_entry(numbers: Positions, queries: Positions, ratio: int) -> Positions:
    """Tell whether queries see entries: those that are whole with the query's own token."""
    seen: Positions = numbers < count_entries(queries + 1, ratio)
    return seen


# ---- what entries are made of ------------------------------------------------------------------


def find_entry_start(numbers: Positions, ratio: int) -> Positions:
    """Return the first of an entry's own rows: its position, by which it is stored."""
    first: Positions = numbers * ratio
    return first


def count_rows_read(group: GroupLayout) -> int:
    """Return how many rows an entry of a compressor is made of."""
    return group.ratio * (2 if group.has_overlap else 1)


def is_first_entry(entry_starts: Positions) -> Positions:
    """Tell whether there are no rows before an entry's own."""
    first: Positions = entry_starts == 0
    return first


# ---- what a step reads of what was stored before it ----------------------------------------------


def find_first_prior(starts: Positions, read_from: Positions, window: int) -> Positions:
    """Return the first row of a window that a step reads of those before its own.

    Args:
        starts: First positions of the step.
        read_from: The first positions whose window rows are stored.
        window: Tokens that a query attends to, itself included.
    """
    first: Positions = (starts - (window - 1)).clip(min=read_from)
    return first


def find_first_read(group: GroupLayout, starts: Positions, read_from: Positions) -> Positions:
    """Return the first stored row of a group that a step may read.

    Args:
        group: Of any kind but recurrent.
        starts: First positions of the step; of a compressor, that it writes entries from.
        read_from: The first positions whose window rows are stored.
    """
    if group.kind == "state":
        # The first window that the step may complete is the longest open one.
        first_end = find_entry_start(count_entries(starts, group.ratio) + 1, group.ratio)
        first: Positions = (first_end - count_rows_read(group)).clip(min=0)
        return first
    if group.window:
        return find_first_prior(starts, read_from, group.window)
    return starts * 0


def find_reach(group: GroupLayout) -> int | None:
    """Return how many positions before a query's own a step may read; None: all of them."""
    if group.kind == "window":
        return group.window - 1
    return count_rows_read(group) - 1 if group.kind == "state" else None
