"""How many requests, and tokens of theirs, may wait before new ones are sent away."""

from collections.abc import Callable

from vllm.config import SchedulerConfig
from vllm.exceptions import QueueFullError
from vllm.v1.metrics.stats import SchedulerStats


class QueueLimit:
    """Estimates how many requests wait and refuses more than the limit.

    The front end does not see the scheduler's queue. It knows that at most ``max_num_seqs``
    requests run, so that all others wait, and how many waited after the last step (more, when
    memory is what lacks). The larger number counts.

    Args:
        max_num_queued: The limit; None: none.
        max_num_running: Requests that run at a time at most, in a core.
        max_num_tokens: Tokens of prompts that may wait for their first token; None: any number.
        num_cores: Engine cores that share what comes.
    """

    def __init__(
        self,
        max_num_queued: int | None,
        max_num_running: int,
        max_num_tokens: int | None = None,
        num_cores: int = 1,
    ) -> None:
        self._max_num_queued = max_num_queued
        self._max_num_tokens = max_num_tokens
        self._max_num_running = max_num_running * num_cores
        # By engine core, as it said last.
        self._waiting = [0] * num_cores
        # Let in since any of them said so.
        self._num_new = 0

    @classmethod
    def from_config(cls, config: SchedulerConfig, num_cores: int = 1) -> "QueueLimit":
        """Take the limits of a configuration; each of several cores runs as many."""
        return cls(
            config.max_num_queued_reqs,
            config.max_num_seqs,
            config.max_num_queued_tokens,
            num_cores,
        )

    def observe(self, stats: SchedulerStats | None, engine_index: int = 0) -> None:
        """Note how many waited in a core after a step."""
        if stats is not None:
            self._waiting[engine_index] = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
            self._num_new = 0

    def admit(self, num_new: int, num_unfinished: int) -> None:
        """Let ``num_new`` requests in.

        Raises:
            QueueFullError: Too many would wait.
        """
        limit = self._max_num_queued
        if limit is None:
            return
        by_slots = num_unfinished + num_new - self._max_num_running
        reported = sum(self._waiting)
        by_report = reported + self._num_new + num_new if reported else 0
        # What has finished since the last report cannot wait any more.
        num_waiting = max(by_slots, min(by_report, num_unfinished + num_new))
        if num_waiting > limit:
            raise QueueFullError(
                f"The queue is full: {num_waiting} requests would wait, at most {limit} may "
                "(--max-num-queued-reqs). Retry later."
            )
        if reported:
            self._num_new += num_new

    def admit_tokens(self, num_new: int, count_waiting: Callable[[], int]) -> None:
        """Let a prompt of ``num_new`` tokens in; one that no other waits with is always let in.

        Args:
            num_new: Tokens of the new prompt.
            count_waiting: Counts those of prompts that have no token yet.

        Raises:
            QueueFullError: Too many would wait.
        """
        limit = self._max_num_tokens
        if limit is None:
            return
        num_waiting = count_waiting()
        if num_waiting and num_waiting + num_new > limit:
            raise QueueFullError(
                f"The queue is full: prompts of {num_waiting + num_new} tokens would wait, at most "
                f"{limit} may (--max-num-queued-tokens). Retry later.",
                limit="max_num_queued_tokens",
            )
