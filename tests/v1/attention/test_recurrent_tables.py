"""Which states a step reads and leaves."""

import numpy as np
import pytest
import torch

from vllm.exceptions import InvariantError
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.metadata import build_step_metadata
from vllm.v1.attention.recurrent_tables import build_settled_rows
from vllm.v1.attention.step_tables import BlockTableView, RecurrentRows, RequestSlice
from vllm.v1.kv_cache_interface import StateLayout, StateShape

UNIT = 32
# Two blocks of heads and one of columns.
STATE = StateLayout(StateShape(1, 2, 4, 4, 5, 3), 16)
LAYOUT = CacheLayout((GroupLayout("recurrent", UNIT, 1, state=STATE),), {"states": 0})
CPU = torch.device("cpu")


def request(
    start: int, num_tokens: int, held: set[int], num_drafts: int = 0, base: int = 0
) -> RequestSlice:
    """A request that holds the states of some units; the blocks of unit u are 3u + 1 .. 3u + 3."""
    last = max(held, default=-1) + 1
    ids = [3 * u + i + 1 if u in held else 0 for u in range(base, last) for i in range(3)]
    view = BlockTableView(3 * base, np.array(ids, dtype=np.int64))
    return RequestSlice(start, num_tokens, (view,), num_drafts=num_drafts)


def build(*slices: RequestSlice) -> tuple[RecurrentRows, ...]:
    return build_step_metadata(slices, LAYOUT, CPU).recurrent[0]


def units(item: RecurrentRows) -> tuple[int | None, list[tuple[int, int]]]:
    """The unit whose state is read, and (tokens, unit) of each state that is left."""

    def unit_of(blocks: torch.Tensor) -> int:
        first = int(blocks[0])
        assert blocks.tolist() == [first, first + 1, first + 2]
        return (first - 1) // 3

    source = None if item.source is None else unit_of(item.source)
    return source, [(store.end, unit_of(store.blocks)) for store in item.stores]


def test_a_first_chunk_reads_nothing_and_leaves_what_it_was_given_blocks_for() -> None:
    (item,) = build(request(0, 100, {1, 3}))
    assert units(item) == (None, [(64, 1), (100, 3)])
    assert item.rows == slice(0, 100)


def test_a_step_within_a_unit_writes_the_state_that_it_read() -> None:
    (item,) = build(request(40, 5, {1}))
    assert units(item) == (1, [(5, 1)])


def test_a_step_from_a_boundary_leaves_that_state_alone() -> None:
    (item,) = build(request(64, 1, {1, 2}))
    assert units(item) == (1, [(1, 2)])


def test_tables_may_begin_later() -> None:
    (item,) = build(request(64, 40, {1, 2, 3}, base=1))
    assert units(item) == (1, [(32, 2), (40, 3)])


def test_drafts_are_left_out_until_they_are_settled() -> None:
    slices = [
        request(60, 8, {1, 2}, num_drafts=7),
        request(0, 3, {0}),
        request(94, 4, {2, 3}, num_drafts=3),
    ]
    first, second, third = build(*slices)
    assert (units(first), first.num_drafts) == ((1, [(1, 1)]), 7)
    assert (units(second), second.num_drafts) == ((None, [(3, 0)]), 0)
    assert (units(third), third.num_drafts) == ((2, [(1, 2)]), 3)
    assert third.rows == slice(11, 15)
    # Of the first one's drafts 66 - 61 stand, which complete a unit; of the third one's none.
    settled = build_settled_rows(slices, [5, 0, 0], LAYOUT, CPU)
    assert len(settled) == 2
    assert settled[0] is not None
    assert (units(settled[0]), settled[0].rows) == ((1, [(3, 1), (5, 2)]), slice(0, 5))
    assert settled[1] is None


@pytest.mark.parametrize(
    "item", [request(40, 5, {0}), request(32, 5, {1}), request(0, 33, {0}), request(64, 1, {1})]
)
def test_a_state_without_blocks_is_found_out(item: RequestSlice) -> None:
    with pytest.raises(InvariantError, match="I5: the step's request 0 needs the recurrent state"):
        build(item)
