"""Metrics as plain objects."""

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PrometheusCounter

from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.prometheus import PrometheusStatLogger
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Metric, Vector, get_metrics_snapshot
from vllm.v1.metrics.stats import SchedulerStats, SpecDecodingStats

LABELS = {"model_name": "m", "engine": "0"}


def _snapshot() -> list[Metric]:
    registry = CollectorRegistry()
    PrometheusCounter("other", "Somebody else's.", registry=registry).inc()
    sink = PrometheusStatLogger(registry, "m", 1000)
    drafted = SpecDecodingStats.new(2)
    drafted.observe_draft(2, 2)
    drafted.observe_draft(2, 1)
    stats = IterationStats(num_generation_tokens=3, time_to_first_tokens_iter=[0.03, 0.2])
    sink.record(SchedulerStats(kv_cache_usage=0.25, spec_decoding_stats=drafted), stats)
    return get_metrics_snapshot(registry)


def _named(metrics: list[Metric], name: str) -> Metric:
    (found,) = [metric for metric in metrics if metric.name == f"vllm:{name}"]
    return found


def test_each_kind_has_its_shape() -> None:
    metrics = _snapshot()
    assert _named(metrics, "generation_tokens") == Counter("vllm:generation_tokens", LABELS, 3)
    assert _named(metrics, "kv_cache_usage_perc") == Gauge("vllm:kv_cache_usage_perc", LABELS, 0.25)
    positions = _named(metrics, "spec_decode_num_accepted_tokens_per_pos")
    assert positions == Vector(positions.name, LABELS, [2, 1])
    first = _named(metrics, "time_to_first_token_seconds")
    assert isinstance(first, Histogram)
    assert (first.labels, first.count, round(first.sum, 6)) == (LABELS, 2, 0.23)
    assert (first.buckets["0.02"], first.buckets["0.04"], first.buckets["+Inf"]) == (0, 1, 2)


def test_other_programs_metrics_are_left_out() -> None:
    assert all(metric.name.startswith("vllm:") for metric in _snapshot())
