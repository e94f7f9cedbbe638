"""Which engine cores live."""

from prometheus_client import CollectorRegistry

from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.prometheus_sink import PrometheusSink
from vllm.v1.metrics.stats import SchedulerStats


class CoreMetrics(PrometheusSink):
    """A StatLogger of the life of one engine core.

    Owns: its metrics in ``registry``.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, engine_index: int = 0) -> None:
        super().__init__(registry, model_name, engine_index)
        self._up = self._gauge("engine_core_up", "1 while the engine core serves, else 0.")
        self._up.set(1)
        self._deaths = self._counter(
            "engine_core_deaths", "How often the engine core died while others went on."
        )
        self._pulled = {
            field: self._counter(f"warm_pull_{name}", text)
            for field, name, text in (
                ("num_prefixes", "prefixes", "Prefixes pulled of other cores' caches."),
                ("num_tokens", "tokens", "Tokens of prefixes pulled of other cores' caches."),
                ("num_bytes", "bytes", "Bytes pulled of other cores' caches."),
                ("num_failed", "failures", "Prefixes that were to be pulled and did not come."),
                ("seconds", "seconds", "Seconds that pulls took."),
            )
        }

    def record(
        self, scheduler_stats: SchedulerStats | None, _iteration_stats: IterationStats | None
    ) -> None:
        """Take in one step, or a death."""
        if scheduler_stats is None:
            return
        self._show(self._up, 0 if scheduler_stats.is_lost else 1)
        if scheduler_stats.is_lost:
            self._deaths.inc()
        if scheduler_stats.pulled is not None:
            for field, counter in self._pulled.items():
                counter.inc(getattr(scheduler_stats.pulled, field))
