"""Prefix-cache counts, hit rates, and that everything crosses msgspec."""

import msgspec
import pytest

from vllm.v1.metrics.stats import (
    CachingMetrics,
    PrefixCacheStats,
    SchedulerStats,
    SpecDecodingStats,
)


def stats(requests: int, queries: int, hits: int, reset: bool = False) -> PrefixCacheStats:
    return PrefixCacheStats(reset=reset, requests=requests, queries=queries, hits=hits)


def test_record_keeps_preempted_apart() -> None:
    counts = PrefixCacheStats()
    counts.record(num_tokens=100, num_hits=60, preempted=False)
    counts.record(num_tokens=10, num_hits=8, preempted=True)
    assert counts == PrefixCacheStats(False, 1, 100, 60, 1, 10, 8)


def test_hit_rate_over_recent_requests() -> None:
    metrics = CachingMetrics(max_recent_requests=5)
    assert metrics.hit_rate == 0.0
    assert metrics.empty
    metrics.observe(stats(1, 20, 9))
    metrics.observe(stats(1, 20, 4))
    metrics.observe(stats(1, 20, 2))
    assert metrics.hit_rate == pytest.approx(15 / 60)
    metrics.observe(stats(4, 10, 5))
    # 7 requests: the two oldest intervals go.
    assert metrics.aggregated_requests == 5
    assert metrics.aggregated_query_total == 30
    assert metrics.aggregated_query_hit == 7
    assert metrics.hit_rate == pytest.approx(7 / 30)


def test_the_newest_interval_always_stays() -> None:
    metrics = CachingMetrics(max_recent_requests=5)
    metrics.observe(stats(3, 30, 3))
    metrics.observe(stats(100, 10, 5))
    assert list(metrics.query_queue) == [(100, 10, 5)]
    assert metrics.aggregated_requests == 100


def test_empty_intervals_are_ignored_and_reset_is_not() -> None:
    metrics = CachingMetrics()
    metrics.observe(stats(1, 10, 5))
    metrics.observe(stats(0, 0, 0))
    assert len(metrics.query_queue) == 1
    metrics.observe(stats(0, 0, 0, reset=True))
    assert metrics.empty
    assert not metrics.query_queue
    metrics.observe(stats(1, 10, 5))
    metrics.observe(stats(2, 8, 2, reset=True))
    assert metrics.hit_rate == pytest.approx(0.25)


def test_drafts() -> None:
    drafts = SpecDecodingStats.new(3)
    drafts.observe_draft(num_draft_tokens=3, num_accepted_tokens=2)
    drafts.observe_draft(num_draft_tokens=1, num_accepted_tokens=0)
    assert drafts == SpecDecodingStats(3, 2, 4, 2, [1, 1, 0])
    with pytest.raises(AssertionError):
        drafts.observe_draft(4, 4)


def test_scheduler_stats_cross_msgspec() -> None:
    full = SchedulerStats(
        num_running_reqs=1,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=3,
        kv_cache_usage=0.5,
        prefix_cache_stats=stats(1, 2, 1),
        connector_prefix_cache_stats=stats(1, 1, 0),
        spec_decoding_stats=SpecDecodingStats.new(2),
    )
    for value in (full, SchedulerStats()):
        data = msgspec.msgpack.encode(value)
        assert msgspec.msgpack.decode(data, type=SchedulerStats) == value
