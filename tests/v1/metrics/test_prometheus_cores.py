"""Metrics of several engine cores in one registry."""

from tests.v1.metrics.values import values_of
from vllm.config.observability import ObservabilityConfig
from vllm.v1.metrics.prometheus_sink import SharedRegistry
from vllm.v1.metrics.reader import get_metrics_snapshot
from vllm.v1.metrics.sinks import make_sinks
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats


def test_each_core_has_series_of_its_own() -> None:
    registry = SharedRegistry()
    everything = ObservabilityConfig(kv_cache_metrics=True, show_hidden_metrics=True)
    sinks = [make_sinks(registry, "m", 1000, everything, index) for index in (0, 1)]
    for index, (default, others) in enumerate(sinks):
        cache = PrefixCacheStats(requests=1, queries=10, hits=index)
        for sink in (default, *others):
            sink.record(SchedulerStats(num_running_reqs=index + 1, prefix_cache_stats=cache), None)
    found = {
        (metric.name, metric.labels["engine"]): metric
        for metric in get_metrics_snapshot(registry)
        if metric.name in ("vllm:num_requests_running", "vllm:prefix_cache_hits")
    }
    assert {key: metric.value for key, metric in found.items()} == {
        ("vllm:num_requests_running", "0"): 1.0,
        ("vllm:num_requests_running", "1"): 2.0,
        ("vllm:prefix_cache_hits", "0"): 0,
        ("vllm:prefix_cache_hits", "1"): 1,
    }


def test_a_core_is_down_from_its_death_to_its_return() -> None:
    registry = SharedRegistry()
    default, others = make_sinks(registry, "m", 1000, ObservabilityConfig())

    def told(stats: SchedulerStats | None) -> tuple[float, float]:
        for sink in (default, *others):
            sink.record(stats, None)
        values = values_of(get_metrics_snapshot(registry))
        return values["vllm:engine_core_up"], values["vllm:engine_core_deaths"]

    assert told(None) == (1.0, 0)
    assert told(SchedulerStats(num_running_reqs=3)) == (1.0, 0)
    assert told(SchedulerStats(is_lost=True)) == (0.0, 1)
    assert told(SchedulerStats()) == (1.0, 1)
