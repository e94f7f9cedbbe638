"""The rules of a step, token by token, with arrays of the host's and of the device's kind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vllm.v1.attention import step_rules as rules
from vllm.v1.attention.layout import GroupLayout

Make = Callable[[Any], Any]
ENDS = 40


@pytest.fixture(params=["numpy", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes the arrays of a side."""
    return np.asarray if request.param == "numpy" else torch.as_tensor


def seen_by(query: int, window: int) -> set[int]:
    """The oracle: a query sees itself and what is before it, as many as its window has."""
    seen: list[int] = []
    for position in range(query, -1, -1):
        if not window or len(seen) < window:
            seen.append(position)
    return set(seen)


def rows_of_entry(number: int, ratio: int, *, has_overlap: bool) -> list[int]:
    """The oracle: the rows an entry is made of, found by counting them off."""
    own = [row for row in range(ENDS) if sum(1 for _ in range(0, row + 1, ratio)) - 1 == number]
    before = [row - ratio for row in own if row - ratio >= 0]
    return sorted(before + own) if has_overlap else own


@pytest.mark.parametrize("window", [0, 1, 2, 5, 64])
def test_a_query_sees_its_window(make: Make, window: int) -> None:
    keys, queries = make(np.arange(ENDS)), make(np.arange(ENDS)[:, None])
    seen = np.asarray(rules.sees_row(keys, queries, window))
    for query in range(ENDS):
        assert set(np.flatnonzero(seen[query])) == seen_by(query, window)
    # Positions may count from anywhere.
    shifted = rules.sees_row(keys - 7, queries - 7, window)
    assert np.array_equal(np.asarray(shifted), seen)


@pytest.mark.parametrize("ratio", [1, 3, 4, 16])
def test_an_entry_is_whole_with_its_last_row(make: Make, ratio: int) -> None:
    counts = np.asarray(rules.count_entries(make(np.arange(ENDS)), ratio))
    numbers, queries = make(np.arange(ENDS)), make(np.arange(ENDS - 1)[:, None])
    seen = np.asarray(rules.sees_entry(numbers, queries, ratio))
    starts = np.asarray(rules.find_entry_start(numbers, ratio))
    for end in range(1, ENDS):
        whole = {
            number
            for number in range(ENDS)
            if (rows := rows_of_entry(number, ratio, has_overlap=False))
            and len(rows) == ratio
            and max(rows) < end
        }
        assert counts[end] == len(whole)
        # The query of the last token computed sees them, and no other.
        assert set(np.flatnonzero(seen[end - 1])) == whole
        assert all(
            starts[number] == rows_of_entry(number, ratio, has_overlap=False)[0] for number in whole
        )


@pytest.mark.parametrize("has_overlap", [False, True])
@pytest.mark.parametrize("ratio", [2, 4, 16])
def test_what_entries_are_made_of(make: Make, ratio: int, has_overlap: bool) -> None:
    group = GroupLayout("state", 2, 2, ratio=ratio, has_overlap=has_overlap)
    first = np.asarray(rules.is_first_entry(rules.find_entry_start(make([0, 1]), ratio)))
    assert first.tolist() == [True, False]
    rows = rows_of_entry(1, ratio, has_overlap=has_overlap)
    assert rules.count_rows_read(group) == len(rows)
    # The query that writes it reads the others from pages, if it is alone in its step.
    assert rules.find_reach(group) == rows[-1] - rows[0]


def test_reach_of_other_groups() -> None:
    assert rules.find_reach(GroupLayout("window", 8, 8, window=12)) == 11
    assert rules.find_reach(GroupLayout("dense", 16, 4, ratio=4)) is None
    assert rules.find_reach(GroupLayout("keys", 8, 8)) is None


@pytest.mark.parametrize("window", [1, 2, 7])
@pytest.mark.parametrize("read_from", [0, 5])
def test_prior_rows_of_a_window(make: Make, window: int, read_from: int) -> None:
    starts = np.arange(read_from, ENDS)
    froms = np.full_like(starts, read_from)
    first = np.asarray(rules.find_first_prior(make(starts), make(froms), window))
    for start, found in zip(starts.tolist(), first.tolist(), strict=True):
        read = [p for p in seen_by(start, window) if read_from <= p < start]
        assert list(range(found, start)) == sorted(read)


@pytest.mark.parametrize(("block_size", "rows"), [(8, 8), (16, 4), (32, 2), (4, 4)])
def test_where_a_position_lies(make: Make, block_size: int, rows: int) -> None:
    group = GroupLayout("dense", block_size, rows, ratio=block_size // rows)
    positions = make(np.arange(3 * block_size))
    index = np.asarray(rules.find_block_index(group, positions))
    row = np.asarray(rules.find_row(group, positions))
    found = [(int(i), int(r)) for i, r in zip(index, row, strict=True)]
    # Blocks in order, their rows in order, each as often as it has tokens.
    places = [(block, place) for block in range(3) for place in range(rows)]
    assert found == [place for place in places for _ in range(block_size // rows)]
