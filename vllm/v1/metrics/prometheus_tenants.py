"""What each tenant got, and was refused."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.prometheus_sink import ENGINE_LABELS, PrometheusSink
from vllm.v1.metrics.stats import SchedulerStats

_LABELS = (*ENGINE_LABELS, "tenant")
TTFT_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
KINDS = ("input", "cached", "output")
TENANT_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_queued_requests")


class TenantMetrics(PrometheusSink):
    """A StatLogger of tenants.

    Owns: its metrics in ``registry``.

    Args:
        registry: Where the metrics are registered.
        model_name: Of the label ``model_name``.
        engine_index: Of the label ``engine``.
        tenants: All of their names: what did not come yet reads 0.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        engine_index: int,
        tenants: Iterable[str],
    ) -> None:
        super().__init__(registry, model_name, engine_index)
        self._tokens = self._counters_of(
            "tenant_tokens",
            "Tokens of a tenant: of prompts, computed (input) or cached, and of answers (output).",
            (*_LABELS, "kind"),
        )
        self._requests = self._counters_of(
            "tenant_requests", "Requests of a tenant that ended.", _LABELS
        )
        self._rejected = self._counters_of(
            "tenant_rejected", "Requests of a tenant refused, by its limit.", (*_LABELS, "limit")
        )
        self._ttft = self._histograms_of(
            "tenant_time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS, _LABELS
        )
        for name in tenants:
            labels = (*self._labels, name)
            self._requests.labels(*labels)
            self._ttft.labels(*labels)
            for kind in KINDS:
                self._tokens.labels(*labels, kind)
            for limit in TENANT_LIMITS:
                self._rejected.labels(*labels, limit)

    def record(
        self, _scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        """Take in what requests got."""
        if iteration_stats is None:
            return
        for name, seconds in iteration_stats.tenant_first_tokens_iter:
            self._ttft.labels(*self._labels, name).observe(seconds)
        for name, limit in iteration_stats.tenant_rejections_iter:
            self._rejected.labels(*self._labels, name, limit).inc()
        for request in iteration_stats.finished_requests:
            if request.tenant is None:
                continue
            labels = (*self._labels, request.tenant)
            self._requests.labels(*labels).inc()
            num_input = request.num_prompt_tokens - request.num_cached_tokens
            counts = (num_input, request.num_cached_tokens, request.num_generation_tokens)
            for kind, count in zip(KINDS, counts, strict=True):
                self._tokens.labels(*labels, kind).inc(count)
