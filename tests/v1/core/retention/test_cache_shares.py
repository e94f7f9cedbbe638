"""Whose cached blocks are given up for whom: the rule, against what it promises."""

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from vllm.config.tenants import Tenant, TenantsConfig
from vllm.exceptions import ConfigError
from vllm.v1.core.retention.cache_shares import (
    COMMON,
    MAX_PARTITIONS,
    CacheShares,
    Owned,
    choose_giver,
    num_kept,
)


@given(data=st.data(), num=st.integers(2, 4))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_what_is_guaranteed_is_never_given_to_others(data: st.DataObject, num: int) -> None:
    sizes = st.integers(0, 12)
    owned = [Owned(data.draw(sizes), data.draw(sizes)) for _ in range(num)]
    guaranteed = [0, *(data.draw(sizes) for _ in range(num - 1))]
    at_most = [1000, *(data.draw(st.integers(g, 30)) for g in guaranteed[1:])]
    taker = data.draw(st.integers(0, num - 1))
    shares = CacheShares({}, guaranteed, at_most)
    giver = choose_giver(shares, owned, taker)
    others = [i for i in range(num) if i != taker]
    kept = sum(num_kept(guaranteed[i], owned[i]) for i in others)
    num_free = sum(o.free for o in owned)
    # What is not kept for others can be had, to the last block, and nothing else.
    assert (giver is None) == (num_free - kept == 0)
    if giver is None:
        return
    assert owned[giver].free > 0
    if giver != taker:
        assert sum(owned[giver]) > guaranteed[giver]
    over = [i for i, o in enumerate(owned) if o.free and sum(o) > at_most[i]]
    assume(over)
    assert giver in over


def test_one_at_its_most_replaces_what_it_has():
    shares = CacheShares({"a": 1}, (0, 0), (100, 10))
    assert choose_giver(shares, [Owned(0, 50), Owned(5, 5)], taker=1) == 1
    assert choose_giver(shares, [Owned(0, 50), Owned(5, 4)], taker=1) == 0
    assert choose_giver(shares, [Owned(0, 50), Owned(5, 6)], taker=0) == 1


def test_without_shares_there_are_no_partitions():
    assert CacheShares.of(TenantsConfig.of(Tenant("a")), 100) is None
    shares = CacheShares.of(TenantsConfig.of(Tenant("a"), Tenant("b", cache_guaranteed=0.5)), 9)
    assert shares is not None
    assert shares.find("b") == 1
    assert shares.find("a") == shares.find(None) == shares.find("gone") == COMMON
    assert shares.guaranteed == (0, 4)
    assert shares.at_most == (9, 9)


def test_there_are_not_too_many():
    tenants = TenantsConfig.of(*(Tenant(f"t{i}", cache_at_most=0.5) for i in range(MAX_PARTITIONS)))
    with pytest.raises(ConfigError, match="at most 63 may"):
        CacheShares.of(tenants, 100)
