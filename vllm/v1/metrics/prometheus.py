"""The ``vllm:`` metrics, fed step by step.

Names, labels and buckets are those that dashboards and routers for vLLM read.
"""

import time
from collections.abc import Mapping

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

from vllm.utils.open_json import KINDS
from vllm.v1.messages import MISS_REASONS, WINDOW_REBUILT, FinishReason
from vllm.v1.metrics.iteration_stats import FinishedRequestStats, IterationStats
from vllm.v1.metrics.prometheus_sink import PrometheusSink
from vllm.v1.metrics.stats import CachePolicyStats, PrefixCacheStats, SchedulerStats

# Seconds.
LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
ITERATION_BUCKETS = tuple(float(2**i) for i in range(15))  # 1..16384 tokens
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


def token_buckets(max_value: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to ``max_value`` tokens."""
    buckets: list[float] = []
    decade = 1
    while decade <= max_value:
        buckets += [float(decade * step) for step in (1, 2, 5) if decade * step <= max_value]
        decade *= 10
    return tuple(buckets)


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Add ``process_*`` and ``python_*``."""
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)


class PrometheusStatLogger(PrometheusSink):
    """A StatLogger that keeps Prometheus metrics of one engine.

    Owns: its metrics in ``registry``.

    Args:
        registry: Where the metrics are registered.
        model_name: Of the label ``model_name``.
        max_model_len: In tokens; the largest bucket of token histograms.
        engine_index: Of the label ``engine``.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        max_model_len: int,
        engine_index: int = 0,
    ) -> None:
        super().__init__(registry, model_name, engine_index)
        self._counters = {
            name: self._counter(name, text)
            for name, text in (
                ("prefix_cache_queries", "Tokens of admitted prompts: hits plus all misses."),
                ("prefix_cache_hits", "Tokens of admitted prompts found in the prefix cache."),
                (
                    "prefix_cache_rebuilt_tokens",
                    "Tokens computed again for window rows above a hit on dense rows alone.",
                ),
                (
                    "prefix_cache_rebuild_saved_tokens",
                    "Tokens hit beyond the deepest checkpoint because window rows were rebuilt.",
                ),
                ("prompt_tokens", "Tokens of prompts whose prefill ended."),
                ("prompt_tokens_cached", "Of those, tokens read from the prefix cache."),
                ("generation_tokens", "Tokens generated."),
                ("num_preemptions", "Requests set back to make room."),
                ("spec_decode_num_drafts", "Drafts verified."),
                ("spec_decode_num_draft_tokens", "Draft tokens verified."),
                ("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
            )
        }
        self._misses = self._labelled_counter(
            "prefix_cache_miss_tokens",
            "Tokens of admitted prompts that had to be computed, by reason.",
            "reason",
        )
        self._predictions = self._labelled_counter(
            "prefix_cache_predictions",
            "Requests whose hit a router had foretold, by how it came out.",
            "outcome",
        )
        self._prediction_errors = self._labelled_counter(
            "prefix_cache_prediction_error_tokens",
            "Tokens between the hit foretold and the one that came, by reason.",
            "outcome",
        )
        self._accepted_per_pos = self._labelled_counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            "position",
        )
        for miss_reason in MISS_REASONS:
            self._misses.labels(*self._labels, miss_reason)
        self._success = self._labelled_counter(
            "request_success", "Requests that ended, by reason.", "finished_reason"
        )
        for reason in FinishReason:
            # A reason that never came must read 0, not be absent.
            self._success.labels(*self._labels, str(reason))
        self._open_parts = self._labelled_counter(
            "unfinished_json", "Answers in JSON without an end, by the part that went on.", "part"
        )
        for kind in KINDS:
            self._open_parts.labels(*self._labels, kind)
        self._make_gauges()
        self._make_histograms(token_buckets(max_model_len))

    def _make_gauges(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests being computed.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting to be computed.")
        self._usage = self._gauge(
            "kv_cache_usage_perc", "Share of the KV cache that running requests hold, 0 to 1."
        )
        self._policy_info = self._labelled_gauge(
            "prefix_cache_policy_info",
            "The eviction rule and the interval in force, in labels.",
            "rule",
            "interval",
        )
        self._policy_in_force: tuple[str, str] | None = None
        self._policy_since = self._gauge(
            "prefix_cache_policy_since_seconds", "When they came into force, in Unix time."
        )
        self._spare = self._gauge(
            "prefix_cache_spare_perc", "Share of the KV cache in spare checkpoints, 0 to 1."
        )
        self._proven = self._gauge(
            "prefix_cache_proven_perc", "Share of reusable free blocks that were hit, 0 to 1."
        )
        by_reason = self._labelled_gauge(
            "num_requests_waiting_by_reason", "Requests waiting, by reason.", "reason"
        )
        self._waiting_capacity = by_reason.labels(*self._labels, "capacity")
        self._waiting_deferred = by_reason.labels(*self._labels, "deferred")

    def _make_histograms(self, tokens: tuple[float, ...]) -> None:
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", ITL_BUCKETS
        )
        self._iteration = self._histogram(
            "iteration_tokens_total", "Tokens of a step.", ITERATION_BUCKETS
        )
        self._num_max_generated = self._histogram(
            "request_max_num_generation_tokens", "Longest answer of a request.", tokens
        )
        self._n = self._histogram("request_params_n", "n of requests.", N_BUCKETS)
        # Field of FinishedRequestStats -> histogram.
        seconds = {
            "e2e_latency": ("e2e_request_latency_seconds", "Arrival to end."),
            "queued_time": ("request_queue_time_seconds", "Time spent waiting."),
            "prefill_time": ("request_prefill_time_seconds", "Time of the prefill."),
            "decode_time": ("request_decode_time_seconds", "First to last token."),
            "inference_time": ("request_inference_time_seconds", "Prefill and decode."),
        }
        counts = {
            "num_prompt_tokens": ("request_prompt_tokens", "Prompt tokens of requests."),
            "num_generation_tokens": ("request_generation_tokens", "Tokens of answers."),
        }
        self._finished: Mapping[str, Histogram] = {
            **{f: self._histogram(*name, LATENCY_BUCKETS) for f, name in seconds.items()},
            **{f: self._histogram(*name, tokens) for f, name in counts.items()},
            "mean_time_per_output_token": self._histogram(
                "request_time_per_output_token_seconds", "Mean after the first token.", ITL_BUCKETS
            ),
            "num_preemptions": self._histogram(
                "request_num_preemptions", "Times a request was set back.", N_BUCKETS
            ),
        }
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens of requests.", tokens
        )
        self._prefill_computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed of requests.", tokens
        )

    def set_cache_config(self, facts: Mapping[str, object]) -> None:
        """Publish ``cache_config_info``; its labels are the facts."""
        info = self._labelled_gauge(
            "cache_config_info", "The KV cache's configuration, in labels.", *facts
        )
        info.labels(*self._labels, *(str(value) for value in facts.values())).set(1)

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        """Take in one step."""
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats)
        if iteration_stats is not None:
            self._record_iteration(iteration_stats)

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        self._show(self._running, stats.num_running_reqs)
        self._show(self._waiting, stats.num_waiting_reqs + stats.num_skipped_waiting_reqs)
        self._show(self._waiting_capacity, stats.num_waiting_reqs)
        self._show(self._waiting_deferred, stats.num_skipped_waiting_reqs)
        self._show(self._usage, stats.kv_cache_usage)
        if stats.cache_policy is not None:
            self._record_policy(stats.cache_policy)
        cache: PrefixCacheStats | None = stats.prefix_cache_stats
        if cache is not None and cache.queries:
            self._counters["prefix_cache_queries"].inc(cache.queries)
            self._counters["prefix_cache_hits"].inc(cache.hits)
            # From the same record, so that queries are hits plus misses at any time.
            for reason, num_tokens in cache.miss_tokens.items():
                self._misses.labels(*self._labels, reason).inc(num_tokens)
            num_rebuilt = cache.miss_tokens.get(WINDOW_REBUILT, 0)
            self._counters["prefix_cache_rebuilt_tokens"].inc(num_rebuilt)
            self._counters["prefix_cache_rebuild_saved_tokens"].inc(cache.rebuild_saved_tokens)
        drafted = stats.spec_decoding_stats
        if drafted is not None:
            self._counters["spec_decode_num_drafts"].inc(drafted.num_drafts)
            self._counters["spec_decode_num_draft_tokens"].inc(drafted.num_draft_tokens)
            self._counters["spec_decode_num_accepted_tokens"].inc(drafted.num_accepted_tokens)
            for position, count in enumerate(drafted.num_accepted_tokens_per_pos):
                self._accepted_per_pos.labels(*self._labels, str(position)).inc(count)

    def _record_policy(self, policy: CachePolicyStats) -> None:
        self._show(self._spare, policy.spare_share)
        self._show(self._proven, policy.proven_share)
        in_force = (policy.rule, str(policy.interval))
        if in_force == self._policy_in_force:
            return
        if self._policy_in_force is not None:
            self._policy_info.remove(*self._labels, *self._policy_in_force)
        self._policy_info.labels(*self._labels, *in_force).set(1)
        self._policy_since.set(time.time())
        self._policy_in_force = in_force

    def _record_iteration(self, stats: IterationStats) -> None:
        for name, count in (
            ("prompt_tokens", stats.num_prompt_tokens),
            ("prompt_tokens_cached", stats.num_cached_prompt_tokens),
            ("generation_tokens", stats.num_generation_tokens),
            ("num_preemptions", stats.num_preemptions),
        ):
            if count:
                self._counters[name].inc(count)
        num_tokens = stats.num_computed_prompt_tokens + stats.num_generation_tokens
        if num_tokens:
            self._iteration.observe(num_tokens)
        for outcome, off in stats.predictions_iter:
            self._predictions.labels(*self._labels, outcome).inc()
            self._prediction_errors.labels(*self._labels, outcome).inc(off)
        for seconds in stats.time_to_first_tokens_iter:
            self._ttft.observe(seconds)
        for seconds in stats.inter_token_latencies_iter:
            self._itl.observe(seconds)
        for count in stats.max_num_generation_tokens_iter:
            self._num_max_generated.observe(count)
        for n in stats.n_params_iter:
            self._n.observe(n)
        for request in stats.finished_requests:
            self._record_finished(request)

    def _record_finished(self, request: FinishedRequestStats) -> None:
        self._success.labels(*self._labels, str(request.finish_reason)).inc()
        if request.open_part is not None:
            self._open_parts.labels(*self._labels, request.open_part).inc()
        for name, histogram in self._finished.items():
            histogram.observe(getattr(request, name))
        self._prefill_computed.observe(request.num_prompt_tokens - request.num_cached_tokens)
        if request.max_tokens is not None:
            self._max_tokens.observe(request.max_tokens)
