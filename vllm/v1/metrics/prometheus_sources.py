"""Where prompt tokens come from, and which requests were turned away."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter

from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.prometheus_sink import PrometheusSink
from vllm.v1.metrics.stats import SchedulerStats

_PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_CACHE_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
_REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class SourceMetrics(PrometheusSink):
    """A StatLogger of prompt tokens by source, lookups through a KV connector, and rejections.

    Owns: its metrics in ``registry``.

    Args:
        registry: Where the metrics are registered.
        model_name: Of the label ``model_name``.
        engine_index: Of the label ``engine``.
        external_source: Where tokens lay that a KV connector loaded.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        engine_index: int = 0,
        external_source: str = "external_unspecified",
    ) -> None:
        super().__init__(registry, model_name, engine_index)
        self._external_source = external_source
        self._by_source = self._series(
            "prompt_tokens_by_source", "Prompt tokens by source.", "source", _PROMPT_SOURCES
        )
        self._cached_by_source = self._series(
            "prompt_tokens_cached_by_source",
            "Prompt tokens that were not computed, by where they lay.",
            "source",
            _CACHE_SOURCES,
        )
        self._rejections = self._series(
            "admission_rejections",
            "Requests turned away with 503, by the limit they met.",
            "reason",
            _REJECTIONS,
        )
        self._external_queries = self._counter(
            "external_prefix_cache_queries", "Prompt tokens asked of a KV connector."
        )
        self._external_hits = self._counter(
            "external_prefix_cache_hits", "Of those, tokens that it had."
        )
        self._item_queries = self._counter(
            "mm_cache_queries", "Pictures whose rows were looked up among those of towers."
        )
        self._item_hits = self._counter("mm_cache_hits", "Of those, pictures found.")
        self._encoder_s = self._counter(
            "encoder_seconds", "Seconds that towers ran for pictures, beside the steps."
        )
        self._show_what_never_changes()

    def _series(self, name: str, text: str, label: str, values: Iterable[str]) -> Counter:
        """Register a labelled counter; a value that never came must read 0, not be absent."""
        counter = self._labelled_counter(name, text, label)
        for value in values:
            counter.labels(*self._labels, value)
        return counter

    def _show_what_never_changes(self) -> None:
        """Register what dashboards ask for and an engine that never sleeps cannot move."""
        state = self._labelled_gauge(
            "engine_sleep_state",
            "1 for the state the engine is in; it cannot sleep.",
            "sleep_state",
        )
        for name in _SLEEP_STATES:
            state.labels(*self._labels, name).set(name == "awake")

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        """Take in one step."""
        if scheduler_stats is not None:
            self._item_queries.inc(scheduler_stats.num_item_queries)
            self._item_hits.inc(scheduler_stats.num_item_hits)
            self._encoder_s.inc(scheduler_stats.encoder_s)
            external = scheduler_stats.connector_prefix_cache_stats
            if external is not None:
                self._external_queries.inc(external.queries)
                self._external_hits.inc(external.hits)
        if iteration_stats is not None:
            self._record_iteration(iteration_stats)

    def _record_iteration(self, stats: IterationStats) -> None:
        if stats.rejection_reason is not None:
            self._rejections.labels(*self._labels, stats.rejection_reason).inc()
        if not stats.num_prompt_tokens:
            return  # most steps end no prefill
        num_external = stats.num_external_prompt_tokens
        num_local = stats.num_cached_prompt_tokens - num_external
        for source, num_tokens in (
            ("local_compute", stats.num_computed_prompt_tokens),
            ("local_cache_hit", num_local),
            ("external_kv_transfer", num_external),
        ):
            self._by_source.labels(*self._labels, source).inc(num_tokens)
        self._cached_by_source.labels(*self._labels, "device").inc(num_local)
        for source, num_tokens in stats.external_sources.items():
            self._cached_by_source.labels(*self._labels, source).inc(num_tokens)
        num_untold = num_external - sum(stats.external_sources.values())
        self._cached_by_source.labels(*self._labels, self._external_source).inc(num_untold)
