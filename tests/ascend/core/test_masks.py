"""Masks against queries: a row or a block is kept iff some request that goes on reads it."""

import random
from collections.abc import Iterable

import pytest

from vllm.v1.core.geometry import GroupGeometry
from vllm.v1.core.prefix.drafter_rows import can_rebuild
from vllm_ascend.core.masks import kept_block_mask, kept_rows, num_extra_rows


def window_group(window: int, block_size: int, *, mtp: bool, align: int = 1) -> GroupGeometry:
    """A group of sliding-window rows, or with ``align`` of a compressor's, as the core has it."""
    keep = window - 1
    return GroupGeometry(0, True, block_size, align=align, keep=keep, has_drafter_rows=mtp)


def rows_read_by_queries(group: GroupGeometry, window: int, boundary: int) -> set[int]:
    """The oracle: every stored row that some query reads which runs when a request goes on.

    The query at a position attends to the ``window`` last rows, its own included, which it makes
    itself. A drafter's row below the boundary is made anew by a query of its own.
    """
    queries = [boundary]
    if group.has_drafter_rows:
        queries.append(boundary - 1)
    read = {
        row for query in queries for row in range(query) if query - window < row and row < boundary
    }
    if group.has_drafter_rows:
        # In a private copy of its block, which starts as the block that is kept.
        read.add(boundary - 1)
    return read


def test_one_row_more_in_the_drafters_windows_alone() -> None:
    assert num_extra_rows(is_window=True, serves_drafter=True) == 1
    assert num_extra_rows(is_window=True, serves_drafter=False) == 0
    assert num_extra_rows(is_window=False, serves_drafter=True) == 0
    assert num_extra_rows(is_window=False, serves_drafter=False) == 0


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("window", range(2, 10))
def test_rows_are_kept_iff_a_query_reads_them(window: int, mtp: bool) -> None:
    group = window_group(window, 2, mtp=mtp)
    for boundary in range(1, 25):
        assert set(kept_rows(group, boundary)) == rows_read_by_queries(group, window, boundary)


def blocks_of(rows: Iterable[int], block_size: int) -> set[int]:
    return {row // block_size for row in rows}


def check_mask(group: GroupGeometry, window: int, boundaries: list[int], num_blocks: int) -> None:
    wanted: set[int] = set()
    for boundary in boundaries:
        rows = rows_read_by_queries(group, window, boundary)
        wanted |= blocks_of(rows, group.block_size)
    mask = kept_block_mask(group, boundaries, num_blocks)
    assert mask == tuple(index in wanted for index in range(num_blocks)), (group, boundaries)


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_blocks_are_kept_iff_a_row_in_them_is(block_size: int, mtp: bool) -> None:
    """All sets of boundaries in eight blocks, all windows up to five blocks."""
    for window in range(2, 5 * block_size + 2):
        group = window_group(window, block_size, mtp=mtp)
        for chosen in range(1 << 8):
            boundaries = [(i + 1) * block_size for i in range(8) if chosen >> i & 1]
            check_mask(group, window, boundaries, 8)


def test_long_prompts_at_random() -> None:
    rng = random.Random(7)
    for _ in range(300):
        block_size = rng.choice([1, 2, 8, 32, 64])
        window = rng.randrange(2, 6 * block_size + 3)
        group = window_group(window, block_size, mtp=rng.random() < 0.5)
        num_blocks = rng.randrange(1, 60)
        places = range(1, num_blocks + 1)
        boundaries = [
            i * block_size for i in rng.sample(places, rng.randint(0, min(6, num_blocks)))
        ]
        check_mask(group, window, boundaries, num_blocks)


def test_the_rulers_of_the_docstrings() -> None:
    def drawn(window: int, *, mtp: bool) -> str:
        mask = kept_block_mask(window_group(window, 2, mtp=mtp), (8, 16), 8)
        return "".join("#" if is_kept else "." for is_kept in mask)

    assert list(kept_rows(window_group(4, 2, mtp=False), 8)) == [5, 6, 7]
    assert list(kept_rows(window_group(4, 2, mtp=True), 8)) == [4, 5, 6, 7]
    assert drawn(4, mtp=False) == drawn(4, mtp=True) == "..##..##"
    assert drawn(5, mtp=False) == "..##..##"
    assert drawn(5, mtp=True) == ".###.###"


@pytest.mark.parametrize("unit", [32, 64, 128])
def test_the_published_window_costs_no_block_more(unit: int) -> None:
    plain, drafter = (window_group(128, unit, mtp=mtp) for mtp in (False, True))
    for boundary in range(unit, 1024, unit):
        assert kept_block_mask(plain, [boundary], 40) == kept_block_mask(drafter, [boundary], 40)
    plain, drafter = (window_group(129, unit, mtp=mtp) for mtp in (False, True))
    for boundary in range(256, 1024, unit):
        one, other = (kept_block_mask(group, [boundary], 40) for group in (plain, drafter))
        assert sum(other) == sum(one) + 1


@pytest.mark.parametrize(("align", "keep"), [(4, 4), (128, 0)])
def test_states_keep_the_open_entry(align: int, keep: int) -> None:
    """C4: the entry before and the open one; C128: the open one, nothing at its end."""
    group = window_group(keep + 1, 2, mtp=False, align=align)
    for boundary in range(1, 400):
        opened = boundary // align * align
        assert list(kept_rows(group, boundary)) == list(range(max(0, opened - keep), boundary))


def test_dense_groups_keep_every_row_and_nothing_is_read_below_a_prompts_start() -> None:
    dense = GroupGeometry(0, False, 4, ratio=4)
    assert kept_rows(dense, 16) == range(16)
    assert kept_block_mask(dense, [16], 6) == (True,) * 4 + (False,) * 2
    group = window_group(128, 32, mtp=True)
    assert kept_rows(group, 32) == range(32)
    assert kept_block_mask(group, [], 3) == (False,) * 3
    assert kept_rows(group, 0) == range(0)


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_with_the_row_more_the_drafters_last_row_can_always_be_made_anew(block_size: int) -> None:
    for window in range(2, 20):
        group = window_group(window, block_size, mtp=True)
        for boundary in range(block_size, 8 * block_size, block_size):
            first = kept_rows(group, boundary).start
            assert first <= max(0, group.first_read(boundary - 1))
            if can_rebuild(group, boundary):
                continue
            # The core alone keeps a block too few: the mask has it.
            mask = kept_block_mask(group, [boundary], boundary // block_size)
            assert mask[group.first_read(boundary - 1) // block_size]
