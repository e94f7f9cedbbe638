"""When silence of a rank means death."""

import time
from collections.abc import Callable, Collection

from vllm.v1.executor.messages import Beat

# A thread that waits for another rank neither uses a core nor waits for one.
_COMPUTING_SHARE = 0.02
OWN_SHARE = 0.75
"""The front end judges by the whole timeout: a fault found by this share of it names the rank."""


class RankWatch:
    """Tells ranks that hang from ranks that work; made anew for each step.

    Two clocks run: per rank one since its last sign of life (the process is stuck), and one since
    any rank computed (all of them wait: for each other, or for a device).

    Args:
        ranks: Those that owe an answer.
        timeout_s: Seconds of silence that mean death.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        ranks: Collection[int],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        now = clock()
        self._pending = set(ranks)
        self._last_sign = dict.fromkeys(ranks, now)
        self._last_effort: dict[int, float] = {}
        self._last_work = now

    def saw_beat(self, rank: int, beat: Beat) -> None:
        """Note a sign of life."""
        now = self._clock()
        used = beat.effort_s - self._last_effort.get(rank, beat.effort_s)
        if used > _COMPUTING_SHARE * (now - self._last_sign[rank]):
            self._last_work = now
        self._last_effort[rank] = beat.effort_s
        self._last_sign[rank] = now

    def saw_answer(self, rank: int) -> None:
        """Note that a rank is done."""
        self._pending.discard(rank)
        self._last_work = self._clock()

    def find_fault(self) -> str | None:
        """Return what is wrong, or None. Ask only when no message waits to be read."""
        now = self._clock()
        for rank in sorted(self._pending):
            if now - self._last_sign[rank] > self._timeout_s:
                return f"rank {rank} gave no sign of life for {self._timeout_s:g} s"
        if self._pending and now - self._last_work > self._timeout_s:
            waiting = ", ".join(map(str, sorted(self._pending)))
            return f"no rank computed for {self._timeout_s:g} s, while {waiting} owed an answer"
        return None
