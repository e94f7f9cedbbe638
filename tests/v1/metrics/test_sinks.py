"""Which metrics there are."""

from prometheus_client import CollectorRegistry

from tests.v1.metrics.values import values_of
from vllm.config.observability import ObservabilityConfig
from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.reader import Histogram, Metric, get_metrics_snapshot
from vllm.v1.metrics.sinks import make_sinks
from vllm.v1.metrics.stats import KVCacheEvictionEvent, PrefixCacheStats, SchedulerStats


def _snapshot(observability: ObservabilityConfig) -> list[Metric]:
    registry = CollectorRegistry()
    default, others = make_sinks(registry, "m", 1000, observability)
    events = [KVCacheEvictionEvent(3.0, 1.5, (0.25, 0.5))]
    stats = SchedulerStats(
        kv_cache_usage=0.5,
        prefix_cache_stats=PrefixCacheStats(requests=1, queries=9, hits=4),
        kv_cache_eviction_events=events,
    )
    for sink in (default, *others):
        sink.record(stats, IterationStats(inter_token_latencies_iter=[0.02]))
        sink.log()
    return get_metrics_snapshot(registry)


def test_by_default_neither_blocks_nor_old_names() -> None:
    names = {metric.name for metric in _snapshot(ObservabilityConfig())}
    assert "vllm:kv_cache_usage_perc" in names
    assert "vllm:prompt_tokens_by_source" in names
    assert not [name for name in names if "kv_block" in name or "gpu_" in name]


def test_lives_of_blocks() -> None:
    metrics = _snapshot(ObservabilityConfig(kv_cache_metrics=True))
    found = {m.name: (m.count, m.sum) for m in metrics if isinstance(m, Histogram)}
    assert found["vllm:kv_block_lifetime_seconds"] == (1, 3.0)
    assert found["vllm:kv_block_idle_before_evict_seconds"] == (1, 1.5)
    assert found["vllm:kv_block_reuse_gap_seconds"] == (2, 0.75)


def test_old_names_repeat_todays_values() -> None:
    metrics = _snapshot(ObservabilityConfig(show_hidden_metrics=True))
    values = values_of(metrics)
    assert values["vllm:gpu_cache_usage_perc"] == values["vllm:kv_cache_usage_perc"] == 0.5
    assert values["vllm:gpu_prefix_cache_queries"] == 9
    assert values["vllm:gpu_prefix_cache_hits"] == 4
    (between,) = [m for m in metrics if m.name == "vllm:time_per_output_token_seconds"]
    assert isinstance(between, Histogram)
    assert between.count == 1
