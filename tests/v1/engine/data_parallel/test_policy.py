"""The choice of a replica, as a function of numbers."""

from dataclasses import dataclass, fields, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.engine.data_parallel.policy import (
    Loads,
    choose,
    costs,
    find_eviction_price,
    find_eviction_prices,
    find_limit,
    find_order,
    find_standing_cost,
)

MAX_SEQS = 16


@dataclass(frozen=True)
class One:
    """What is known of one replica."""

    cached_tokens: int = 0
    num_requests: int = 0
    backlog_tokens: int = 0
    unused_tokens: int = 0
    recent_tokens: float = 0.0
    serves: bool = True


def mean_recent(replicas: list[One]) -> float:
    recent = [one.recent_tokens for one in replicas if one.serves]
    return sum(recent) / len(recent)


def arrays(replicas: list[One]) -> tuple[Loads, np.ndarray]:
    columns = {
        field.name: np.array([getattr(one, field.name) for one in replicas])
        for field in fields(One)
    }
    cached = columns.pop("cached_tokens")
    backlog = columns.pop("backlog_tokens")
    standing = [*map(find_standing_cost, columns["num_requests"], backlog)]
    prices = find_eviction_prices(columns["recent_tokens"], mean_recent(replicas))
    return Loads(**columns, standing_costs=np.array(standing), eviction_prices=prices), cached


def chosen(replicas: list[One], num_tokens: int, key: int | None = None) -> int:
    loads, cached = arrays(replicas)
    return choose(loads, cached, num_tokens, MAX_SEQS, key=key)


def all_costs(replicas: list[One], num_tokens: int) -> list[float]:
    """As the documentation says it."""
    prices = arrays(replicas)[0].eviction_prices.tolist()
    return [cost(one, num_tokens, price) for one, price in zip(replicas, prices, strict=True)]


def cost(one: One, num_tokens: int, price: float) -> float:
    work = num_tokens - one.cached_tokens
    evicted = max(0, work - one.unused_tokens)
    # Summed as the function does, for equal floats.
    return price * evicted + (2 * work + one.backlog_tokens + 32 * one.num_requests)


def is_overloaded(one: One, least: int) -> bool:
    """As the documentation says it."""
    lead = one.num_requests - least
    return (lead >= 8 and one.num_requests >= 2 * least) or one.num_requests >= MAX_SEQS > least


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[One], int]:
    num_tokens = draw(st.integers(1, 5000))
    numbers = st.integers(0, 5000)
    replicas = [
        One(
            draw(st.integers(0, num_tokens - 1)),
            draw(st.integers(0, 3 * MAX_SEQS)),
            draw(numbers),
            draw(numbers),
            draw(st.floats(0, 1e9, allow_subnormal=False)),
            draw(st.booleans()),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]
    if not any(one.serves for one in replicas):
        replicas[0] = replace(replicas[0], serves=True)
    return replicas, num_tokens


@given(situations())
def test_the_choice_is_the_documented_one(situation) -> None:
    replicas, num_tokens = situation
    serving = [rank for rank, one in enumerate(replicas) if one.serves]
    least = min(replicas[rank].num_requests for rank in serving)
    able = [rank for rank in serving if not is_overloaded(replicas[rank], least)]
    loads, cached = arrays(replicas)
    limit = find_limit(loads, MAX_SEQS)
    assert [rank for rank in serving if replicas[rank].num_requests < limit] == able
    expected = all_costs(replicas, num_tokens)
    assert costs(loads, cached, num_tokens).tolist() == expected
    best = min(
        able,
        key=lambda rank: (
            expected[rank],
            -replicas[rank].cached_tokens,
            replicas[rank].recent_tokens,
            rank,
        ),
    )
    assert chosen(replicas, num_tokens) == best


@given(situations(), st.integers(1, 5000))
def test_a_longer_prefix_never_loses_a_replica_its_request(situation, more) -> None:
    replicas, num_tokens = situation
    rank = chosen(replicas, num_tokens)
    better = list(replicas)
    longer = min(num_tokens - 1, replicas[rank].cached_tokens + more)
    better[rank] = replace(replicas[rank], cached_tokens=longer)
    assert chosen(better, num_tokens) == rank


def test_a_common_beginning_does_not_draw_every_conversation() -> None:
    """A replica whose memory is full gives way to one with room, for a prompt mostly new."""
    full = One(cached_tokens=500)
    empty = One(unused_tokens=100_000)
    assert chosen([full, empty], 4000) == 1
    # A conversation's next turn stays.
    assert chosen([replace(full, cached_tokens=3500), empty], 4000) == 0


def test_who_fills_its_memory_faster_gets_fewer_new_conversations() -> None:
    """What it evicts is younger; memory that is not full costs nothing, and rows stay in use."""
    busy, calm = One(recent_tokens=1500.0), One(recent_tokens=500.0)
    assert chosen([busy, calm], 4000) == 1
    assert chosen([replace(busy, cached_tokens=1000), calm], 4000) == 1
    assert chosen([replace(busy, cached_tokens=3500), calm], 4000) == 0
    assert chosen([replace(busy, unused_tokens=5000), replace(calm, num_requests=1)], 4000) == 0


def test_one_price_is_that_of_all() -> None:
    recent = np.array([0.0, 10.0, 35.0, 500.0])
    for mean in (0.0, 20.0):
        expected = [find_eviction_price(float(one), mean) for one in recent]
        assert find_eviction_prices(recent, mean).tolist() == expected


def test_siblings_of_a_prompt_in_the_making_stay_together_until_it_costs_more() -> None:
    roomy = 10**6
    making = One(999, num_requests=1, backlog_tokens=1000, unused_tokens=roomy)
    idle = One(unused_tokens=roomy)
    assert chosen([making, idle], 1000) == 0
    assert chosen([replace(making, backlog_tokens=9000), idle], 1000) == 1


def test_what_a_tier_has_is_cheaper_than_computing_and_dearer_than_having_it() -> None:
    loads, cached = arrays([One(unused_tokens=10**6)] * 3)
    cached = np.array([0, 0, 3200])
    restorable = np.array([0, 3200, 0])
    prices = costs(loads, cached, 4000, restorable)
    assert prices[2] < prices[1] < prices[0]
    assert choose(loads, cached, 4000, MAX_SEQS, restorable) == 2
    assert choose(loads, np.zeros(3, np.int64), 4000, MAX_SEQS, restorable) == 1


KEYS = st.integers(0, 2**64 - 1)


@given(situations(), KEYS)
def test_a_key_chooses_among_those_that_are_about_as_good(situation, key) -> None:
    replicas, num_tokens = situation
    prices = all_costs(replicas, num_tokens)
    cheapest = chosen(replicas, num_tokens)
    without = replicas[cheapest]
    serving = [one for one in replicas if one.serves]
    least = min(one.num_requests for one in serving)
    slack = 4 * 32 + (num_tokens - without.cached_tokens) // 4
    suits = [
        rank
        for rank, one in enumerate(replicas)
        if one.serves
        and not is_overloaded(one, least)
        and one.cached_tokens >= without.cached_tokens
        and prices[rank] <= prices[cheapest] + slack
    ]
    order = find_order(key, np.arange(len(replicas)))
    assert chosen(replicas, num_tokens, key) == max(suits, key=lambda rank: order[rank])


@given(KEYS, st.integers(2, 40), st.data())
def test_a_key_keeps_its_replica_when_another_comes_or_goes(key, num_replicas, data) -> None:
    replicas = [One()] * num_replicas
    home = chosen(replicas, 1000, key)
    assert chosen([*replicas, One()], 1000, key) in (home, num_replicas)
    gone = data.draw(st.integers(0, num_replicas - 1))
    without = [replace(one, serves=rank != gone) for rank, one in enumerate(replicas)]
    assert (chosen(without, 1000, key) == home) == (gone != home)


def test_keys_spread_over_replicas() -> None:
    counts = np.bincount([chosen([One()] * 8, 1000, key) for key in range(4000)], minlength=8)
    assert counts.min() > 400
    assert counts.max() < 600


def test_a_key_never_costs_a_prefix_or_a_queue() -> None:
    for key in range(50):
        # A unit more of the prompt is cached there.
        assert chosen([One(cached_tokens=32), One()], 4000, key) == 0
        assert chosen([One(num_requests=7), One(unused_tokens=0)], 100, key) == 1
        assert chosen([One(backlog_tokens=2000), One()], 4000, key) == 1
    homes = {chosen([One(num_requests=3), One()], 1000, key) for key in range(50)}
    assert homes == {0, 1}
