"""How long blocks of the KV cache live, on the sample that ``--kv-cache-metrics`` follows."""

from prometheus_client import CollectorRegistry

from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.prometheus_sink import PrometheusSink
from vllm.v1.metrics.stats import SchedulerStats

# Seconds: from a millisecond (a pool under pressure) to half an hour (a quiet one).
_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    *(10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)


class BlockMetrics(PrometheusSink):
    """A StatLogger of sampled blocks.

    Owns: its metrics in ``registry``.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, engine_index: int = 0) -> None:
        super().__init__(registry, model_name, engine_index)
        self._lifetime = self._histogram(
            "kv_block_lifetime_seconds", "Allocation of a block to its eviction.", _BUCKETS
        )
        self._idle = self._histogram(
            "kv_block_idle_before_evict_seconds", "Last use of a block to its eviction.", _BUCKETS
        )
        self._gaps = self._histogram(
            "kv_block_reuse_gap_seconds", "Between two uses of a block.", _BUCKETS
        )

    def record(
        self, scheduler_stats: SchedulerStats | None, _iteration_stats: IterationStats | None
    ) -> None:
        """Take in one step."""
        for event in () if scheduler_stats is None else scheduler_stats.kv_cache_eviction_events:
            self._lifetime.observe(event.lifetime_seconds)
            self._idle.observe(event.idle_seconds)
            for gap in event.reuse_gaps_seconds:
                self._gaps.observe(gap)
