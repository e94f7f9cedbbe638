"""Where statistics go: the Protocol, and the line in the log every few seconds."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from vllm.logger import init_logger
from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.stats import CachePolicyStats, CachingMetrics, SchedulerStats

logger = init_logger(__name__)


class StatLogger(Protocol):
    """A sink of statistics; called from the front end's thread only."""

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        """Take in one step. Either part is None when there is no news of it."""

    def log(self) -> None:
        """Report what was gathered; called every ``VLLM_LOG_STATS_INTERVAL`` seconds."""


class LoggingStatLogger:
    """Writes throughput and cache use to the log; at DEBUG level when nothing happened.

    Args:
        engine_index: Number of the engine in the line.
        clock: Monotonic seconds.
    """

    def __init__(self, engine_index: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine_index = engine_index
        self._clock = clock
        self._last_log = clock()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_preemptions = 0
        self._drafts = self._draft_tokens = self._accepted_tokens = 0
        self._scheduler_stats: SchedulerStats | None = None
        self._caching = CachingMetrics()
        # The rule and the interval that were told last.
        self._told_policy: tuple[str, int] | None = None
        self._was_idle = True

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        """Add a step's counts."""
        if iteration_stats is not None:
            self._num_prompt_tokens += iteration_stats.num_computed_prompt_tokens
            self._num_generation_tokens += iteration_stats.num_generation_tokens
            self._num_preemptions += iteration_stats.num_preemptions
        if scheduler_stats is not None:
            self._scheduler_stats = scheduler_stats
            drafted = scheduler_stats.spec_decoding_stats
            if drafted is not None:
                self._drafts += drafted.num_drafts
                self._draft_tokens += drafted.num_draft_tokens
                self._accepted_tokens += drafted.num_accepted_tokens
            if scheduler_stats.prefix_cache_stats is not None:
                self._caching.observe(scheduler_stats.prefix_cache_stats)

    def log(self) -> None:
        """Write the line and start the next interval."""
        now = self._clock()
        elapsed = max(now - self._last_log, 1e-9)
        prompt_rate = self._num_prompt_tokens / elapsed
        generation_rate = self._num_generation_tokens / elapsed
        stats = self._scheduler_stats
        num_running = stats.num_running_reqs if stats else 0
        num_waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs if stats else 0
        is_idle = not (prompt_rate or generation_rate or num_running or num_waiting)
        # The first idle line still shows: it tells that the work is over.
        level = logging.DEBUG if is_idle and self._was_idle else logging.INFO
        preemptions = f"Preemptions: {self._num_preemptions}, " if self._num_preemptions else ""
        logger.log(
            level,
            "Engine %03d: Avg prompt throughput: %.1f tokens/s, "
            "Avg generation throughput: %.1f tokens/s, Running: %d reqs, Waiting: %d reqs, "
            "%sKV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            self._engine_index,
            prompt_rate,
            generation_rate,
            num_running,
            num_waiting,
            preemptions,
            (stats.kv_cache_usage if stats else 0.0) * 100,
            self._caching.hit_rate * 100,
        )
        self._log_policy(stats.cache_policy if stats else None)
        if self._draft_tokens:
            logger.info(
                "Engine %03d: Drafted: %d tokens, accepted: %d (%.1f%%), "
                "mean accepted length: %.2f",
                self._engine_index,
                self._draft_tokens,
                self._accepted_tokens,
                self._accepted_tokens / self._draft_tokens * 100,
                1 + self._accepted_tokens / self._drafts,
            )
        self._drafts = self._draft_tokens = self._accepted_tokens = 0
        self._was_idle = is_idle
        self._last_log = now
        self._num_prompt_tokens = self._num_generation_tokens = self._num_preemptions = 0

    def _log_policy(self, policy: CachePolicyStats | None) -> None:
        """Tell what the prefix cache does, when that is something else than before."""
        if policy is None or self._told_policy == (policy.rule, policy.interval):
            return
        self._told_policy = (policy.rule, policy.interval)
        every = f"every {policy.interval} tokens" if policy.interval else "at ends and branches"
        logger.info(
            "Engine %03d: Prefix cache: eviction rule %s, checkpoints %s, "
            "spare: %.1f%%, proven: %.1f%%",
            self._engine_index,
            policy.rule,
            every,
            policy.spare_share * 100,
            policy.proven_share * 100,
        )
