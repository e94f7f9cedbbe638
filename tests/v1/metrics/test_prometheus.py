"""The ``vllm:`` metrics."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm.v1.messages import FinishReason
from vllm.v1.metrics.iteration_stats import FinishedRequestStats, IterationStats
from vllm.v1.metrics.prometheus import PrometheusStatLogger, add_process_metrics, token_buckets
from vllm.v1.metrics.stats import (
    CachePolicyStats,
    PrefixCacheStats,
    SchedulerStats,
    SpecDecodingStats,
)

LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def stats(registry: CollectorRegistry) -> PrometheusStatLogger:
    return PrometheusStatLogger(registry, "m", 16384)


def _value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"vllm:{name}", {**LABELS, **labels})


def test_gauges_follow_every_change(
    registry: CollectorRegistry, stats: PrometheusStatLogger
) -> None:
    for num_running in (0, 2, 2, 1, 2, 0):
        stats.record(SchedulerStats(num_running_reqs=num_running), None)
        assert _value(registry, "num_requests_running") == num_running


def test_scheduler_stats(registry: CollectorRegistry, stats: PrometheusStatLogger) -> None:
    cache = PrefixCacheStats(
        requests=1,
        queries=100,
        hits=64,
        miss_tokens={"first_seen": 33, "evicted": 1, "window_rebuilt": 2},
        rebuild_saved_tokens=32,
    )
    for _ in range(2):
        stats.record(SchedulerStats(2, 3, 1, 0.25, cache), None)
    assert _value(registry, "num_requests_running") == 2
    assert _value(registry, "num_requests_waiting") == 4
    assert _value(registry, "num_requests_waiting_by_reason", reason="deferred") == 1
    assert _value(registry, "kv_cache_usage_perc") == 0.25
    assert _value(registry, "prefix_cache_queries_total") == 200
    assert _value(registry, "prefix_cache_hits_total") == 128
    assert _value(registry, "prefix_cache_miss_tokens_total", reason="first_seen") == 66
    assert _value(registry, "prefix_cache_miss_tokens_total", reason="evicted") == 2
    assert _value(registry, "prefix_cache_miss_tokens_total", reason="window_evicted") == 0
    assert _value(registry, "prefix_cache_rebuilt_tokens_total") == 4
    assert _value(registry, "prefix_cache_rebuild_saved_tokens_total") == 64


def test_iteration_stats(registry: CollectorRegistry, stats: PrometheusStatLogger) -> None:
    iteration = IterationStats(
        num_generation_tokens=3,
        num_prompt_tokens=10,
        num_cached_prompt_tokens=8,
        num_preemptions=1,
        time_to_first_tokens_iter=[0.02],
        inter_token_latencies_iter=[0.01, 0.3],
        max_num_generation_tokens_iter=[3],
        n_params_iter=[2],
    )
    iteration.finished_requests.append(
        FinishedRequestStats(
            finish_reason=FinishReason.ABORT,
            e2e_latency=1.0,
            num_prompt_tokens=10,
            num_cached_tokens=8,
            num_generation_tokens=3,
            max_tokens=100,
            queued_time=0.5,
            n=2,
            open_part="text",
        )
    )
    stats.record(None, iteration)
    expected = {
        "prompt_tokens_total": 10,
        "prompt_tokens_cached_total": 8,
        "generation_tokens_total": 3,
        "num_preemptions_total": 1,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_sum": 0.31,
        "e2e_request_latency_seconds_sum": 1.0,
        "request_queue_time_seconds_sum": 0.5,
        "request_prompt_tokens_sum": 10,
        "request_generation_tokens_sum": 3,
        "request_prefill_kv_computed_tokens_sum": 2,
        "request_params_max_tokens_sum": 100,
        "request_params_n_sum": 2,
        "request_max_num_generation_tokens_sum": 3,
        "iteration_tokens_total_sum": 5,
    }
    for name, value in expected.items():
        assert _value(registry, name) == pytest.approx(value), name
    assert _value(registry, "request_success_total", finished_reason="abort") == 1
    assert _value(registry, "unfinished_json_total", part="text") == 1
    assert _value(registry, "unfinished_json_total", part="list") == 0


def test_every_reason_reads_zero_from_the_start(
    registry: CollectorRegistry, stats: PrometheusStatLogger
) -> None:
    for reason in ("stop", "length", "abort", "error", "repetition"):
        assert _value(registry, "request_success_total", finished_reason=reason) == 0


def test_an_idle_step_observes_nothing(
    registry: CollectorRegistry, stats: PrometheusStatLogger
) -> None:
    stats.record(SchedulerStats(), IterationStats())
    stats.log()
    assert _value(registry, "iteration_tokens_total_count") == 0


def test_cache_labels_are_labels(registry: CollectorRegistry, stats: PrometheusStatLogger) -> None:
    stats.set_cache_config({"block_size": 32, "num_gpu_blocks": 7, "x": None})
    labels = {"block_size": "32", "num_gpu_blocks": "7", "x": "None"}
    assert _value(registry, "cache_config_info", **labels) == 1


def test_process_metrics(registry: CollectorRegistry) -> None:
    add_process_metrics(registry)
    assert b"process_resident_memory_bytes" in generate_latest(registry)


@pytest.mark.parametrize(
    ("limit", "last"), [(1, 1.0), (7, 5.0), (16384, 10000.0), (1 << 20, 1e6), (131072, 1e5)]
)
def test_token_buckets(limit: int, last: float) -> None:
    buckets = token_buckets(limit)
    assert buckets[-1] == last
    assert list(buckets) == sorted(set(buckets))


def test_draft_tokens(registry: CollectorRegistry, stats: PrometheusStatLogger) -> None:
    for num_accepted in (0, 2, 3):
        drafted = SpecDecodingStats.new(3)
        drafted.observe_draft(3, num_accepted)
        stats.record(SchedulerStats(spec_decoding_stats=drafted), None)
    stats.record(SchedulerStats(), None)
    assert _value(registry, "spec_decode_num_drafts_total") == 3
    assert _value(registry, "spec_decode_num_draft_tokens_total") == 9
    assert _value(registry, "spec_decode_num_accepted_tokens_total") == 5
    per_pos = [
        _value(registry, "spec_decode_num_accepted_tokens_per_pos_total", position=str(i))
        for i in range(3)
    ]
    assert per_pos == [2, 2, 1]


def test_the_policy_in_force_is_one_series_and_says_since_when() -> None:
    registry = CollectorRegistry()
    stats = PrometheusStatLogger(registry, "m", 1000)
    for rule, interval, spare in (("lru", 16_384, 0.5), ("residents", 0, 0.25)):
        policy = CachePolicyStats(rule, interval, spare, 0.75)
        stats.record(SchedulerStats(cache_policy=policy), None)
    found = [
        sample.labels
        for metric in registry.collect()
        if metric.name == "vllm:prefix_cache_policy_info"
        for sample in metric.samples
    ]
    assert [(labels["rule"], labels["interval"]) for labels in found] == [("residents", "0")]
    labels = {"model_name": "m", "engine": "0"}
    value = registry.get_sample_value
    assert value("vllm:prefix_cache_spare_perc", labels) == 0.25
    assert value("vllm:prefix_cache_proven_perc", labels) == 0.75
    since = value("vllm:prefix_cache_policy_since_seconds", labels)
    assert since is not None
    assert since > 1.6e9
