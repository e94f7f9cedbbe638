"""Counters of tokens served: fair, work-conserving, without credit for idle times."""

import hypothesis.strategies as st
from hypothesis import given, settings

from vllm.config.tenants import Tenant, TenantsConfig, TokenWeights
from vllm.v1.core.sched.fair_shares import FairShares


def make(*tenants: Tenant, max_lag: float = 0.0) -> FairShares:
    config = TenantsConfig.of(*tenants, token_weights=TokenWeights(1, 0.1, 2))
    return FairShares(config, max_lag)


def first(shares: FairShares, *names: str) -> str:
    return min(names, key=shares.rank)


@given(
    weights=st.lists(st.sampled_from((0.5, 1.0, 2.0, 5.0)), min_size=2, max_size=4),
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=50),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_who_always_wants_more_gets_by_weight(weights: list[float], sizes: list[int]) -> None:
    """At any time shares differ by no more than the largest request."""
    names = [f"t{i}" for i in range(len(weights))]
    shares = make(*(Tenant(n, w) for n, w in zip(names, weights, strict=True)))
    for name in names:
        shares.arrive(name)
    served = dict.fromkeys(names, 0)
    for number in range(400):
        name = first(shares, *names)
        size = sizes[number % len(sizes)]
        shares.charge(name, num_input=size)
        served[name] += size
        levels = [served[n] / w for n, w in zip(names, weights, strict=True)]
        assert max(levels) - min(levels) <= max(sizes) / min(weights) + 1e-6


def test_tokens_count_by_what_was_done_for_them():
    shares = make(Tenant("a", 4.0))
    shares.charge("a", num_input=10, num_cached=100, num_output=5)
    assert shares.counter("a") == (10 + 10 + 10) / 4


def test_an_idle_time_is_no_credit():
    shares = make(Tenant("a"), Tenant("b"))
    shares.arrive("b")
    shares.charge("b", num_input=1000)
    shares.arrive("a")
    assert shares.counter("a") == 1000
    # Of equals the one that was not served last goes first.
    assert first(shares, "a", "b") == "a"


def test_nor_is_one_when_nobody_else_is_there():
    shares = make(Tenant("a"), Tenant("b"))
    shares.arrive("b")
    shares.charge("b", num_input=1000)
    shares.leave("b")
    shares.arrive("a")
    assert shares.counter("a") == 1000


def test_one_with_requests_under_way_is_behind_by_the_lag_at_most():
    shares = make(Tenant("a"), Tenant("b"), max_lag=100)
    shares.arrive("a")
    shares.arrive("b")
    shares.charge("b", num_input=1000)
    shares.arrive("a")
    assert shares.counter("a") == 900


def test_classes_go_before_shares():
    shares = make(Tenant("a"), Tenant("b", 100, priority=-1))
    for name in ("a", "b"):
        shares.arrive(name)
    shares.charge("b", num_output=10_000)
    assert first(shares, "a", "b") == "b"
    # Another class's counter lifts nobody.
    shares.leave("a")
    shares.arrive("a")
    assert shares.counter("a") == 0


def test_unknown_tenants_count_as_the_default():
    shares = make(Tenant("a"))
    assert shares.name_of(None) == shares.name_of("gone") == "default"
    assert shares.name_of("a") == "a"
