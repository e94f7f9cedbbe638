"""Choosing a running prefill to wait for, against a brute force."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.core.prefix.unit_caches import h
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.retention.donors import Donor, find_donor, max_wait_steps, num_shared_units


def chain(units: str) -> list[BlockHash]:
    """Return chained hashes: equal ones mean equal prefixes."""
    return [h(units[: i + 1]) for i in range(len(units))]


def brute_force(
    donors: list[tuple[str, int, int]], mine: str, first: int, limit: int
) -> tuple[int | None, int]:
    """Try every length with every donor, the longest first."""
    for units in range(limit, first, -1):
        for i, (theirs, num_published, num_units) in enumerate(donors):
            is_theirs = units <= num_units and theirs[:units] == mine[:units]
            if num_published == first and is_theirs:
                return i, units
    return None, 0


UNITS = st.text("ab", max_size=6)


@pytest.mark.slow
@given(data=st.data(), mine=UNITS, theirs=st.lists(UNITS, max_size=4))
@settings(max_examples=200, deadline=None)
def test_the_donor_that_shares_most_is_found(
    data: st.DataObject, mine: str, theirs: list[str]
) -> None:
    limit = data.draw(st.integers(0, len(mine)))
    first = data.draw(st.integers(0, limit))
    donors = [
        (units, data.draw(st.integers(0, len(units))), data.draw(st.integers(0, len(units))))
        for units in theirs
    ]
    found = find_donor([Donor(chain(u), p, n) for u, p, n in donors], chain(mine), first, limit)
    assert found == brute_force(donors, mine, first, limit)


def test_who_published_other_than_what_is_cached_gives_nothing() -> None:
    # One that is behind recomputes what is cached; one that is ahead has nothing more to share.
    prompt = chain("aaaa")
    for num_published in (0, 2):
        assert find_donor([Donor(prompt, num_published, 4)], prompt, 1, 3) == (None, 0)
    assert find_donor([Donor(prompt, 1, 4)], prompt, 1, 3) == (0, 3)


@pytest.mark.parametrize(("gain", "steps"), [(128, 4), (255, 4), (256, 5), (2560, 14)])
def test_longer_gains_are_waited_for_longer(gain: int, steps: int) -> None:
    assert max_wait_steps(gain) == steps


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_shared_units_are_those_of_the_longest_common_beginning(one: str, other: str) -> None:
    most = max(i for i in range(10) if one[:i] == other[:i] and i <= min(len(one), len(other)))
    assert num_shared_units(chain(one), chain(other)) == most
