"""Where prompt tokens come from."""

from prometheus_client import CollectorRegistry

from tests.v1.metrics.values import values_of
from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.prometheus_sources import SourceMetrics
from vllm.v1.metrics.reader import get_metrics_snapshot
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats


def _values(*records: tuple[SchedulerStats | None, IterationStats | None]) -> dict[str, float]:
    registry = CollectorRegistry()
    sink = SourceMetrics(registry, "m")
    for record in records:
        sink.record(*record)
    return values_of(get_metrics_snapshot(registry))


def test_sources_add_up_to_the_prompts() -> None:
    stats = IterationStats(
        num_prompt_tokens=100, num_cached_prompt_tokens=60, num_external_prompt_tokens=20
    )
    values = _values((None, stats), (None, stats))
    assert values["vllm:prompt_tokens_by_source:local_compute"] == 80
    assert values["vllm:prompt_tokens_by_source:local_cache_hit"] == 80
    assert values["vllm:prompt_tokens_by_source:external_kv_transfer"] == 40
    assert values["vllm:prompt_tokens_cached_by_source:device"] == 80
    assert values["vllm:prompt_tokens_cached_by_source:external_unspecified"] == 40


def test_lookups_through_a_connector() -> None:
    external = PrefixCacheStats(requests=1, queries=50, hits=32)
    values = _values((SchedulerStats(connector_prefix_cache_stats=external), None))
    assert values["vllm:external_prefix_cache_queries"] == 50
    assert values["vllm:external_prefix_cache_hits"] == 32


def test_a_rejection_counts_under_its_limit() -> None:
    values = _values((None, IterationStats(rejection_reason="max_num_queued_reqs")))
    assert values["vllm:admission_rejections:max_num_queued_reqs"] == 1
    assert values["vllm:admission_rejections:max_num_queued_tokens"] == 0


def test_pictures_are_counted() -> None:
    values = _values((SchedulerStats(num_item_queries=3, num_item_hits=2, encoder_s=1.5), None))
    assert (values["vllm:mm_cache_queries"], values["vllm:mm_cache_hits"]) == (3, 2)
    assert values["vllm:encoder_seconds"] == 1.5


def test_what_never_came_reads_zero() -> None:
    values = _values()
    assert values["vllm:prompt_tokens_cached_by_source:disk"] == 0
    assert values["vllm:mm_cache_queries"] == 0
    assert values["vllm:engine_sleep_state:awake"] == 1
    assert values["vllm:engine_sleep_state:discard_all"] == 0
