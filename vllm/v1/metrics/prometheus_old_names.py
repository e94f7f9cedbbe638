"""Metrics under the names that earlier versions of vLLM gave them, for dashboards of that time."""

from prometheus_client import CollectorRegistry

from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.prometheus import ITL_BUCKETS
from vllm.v1.metrics.prometheus_sink import PrometheusSink
from vllm.v1.metrics.stats import SchedulerStats


class OldNames(PrometheusSink):
    """A StatLogger that repeats today's values under old names.

    Owns: its metrics in ``registry``.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, engine_index: int = 0) -> None:
        super().__init__(registry, model_name, engine_index)
        self._usage = self._gauge("gpu_cache_usage_perc", "Now kv_cache_usage_perc.")
        self._queries = self._counter("gpu_prefix_cache_queries", "Now prefix_cache_queries.")
        self._hits = self._counter("gpu_prefix_cache_hits", "Now prefix_cache_hits.")
        self._between_tokens = self._histogram(
            "time_per_output_token_seconds", "Now inter_token_latency_seconds.", ITL_BUCKETS
        )

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        """Take in one step."""
        if scheduler_stats is not None:
            self._usage.set(scheduler_stats.kv_cache_usage)
            self._queries.inc(scheduler_stats.prefix_cache_stats.queries)
            self._hits.inc(scheduler_stats.prefix_cache_stats.hits)
        for seconds in (
            () if iteration_stats is None else iteration_stats.inter_token_latencies_iter
        ):
            self._between_tokens.observe(seconds)
