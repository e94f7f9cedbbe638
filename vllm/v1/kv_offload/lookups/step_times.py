"""How long steps take that compute prompts, for the choice between restoring and computing."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class StepTime(NamedTuple):
    """A step that has ended.

    Attributes:
        context: Tokens before those of the request with the most tokens in the step.
        num_tokens: Tokens of all its requests.
        seconds: From its beginning to its results.
    """

    context: int
    num_tokens: int
    seconds: float


class StepTimes:
    """Times steps, of which one may be scheduled while another one runs.

    Owns: the steps whose results have not come yet.
    """

    def __init__(self) -> None:
        # When it was scheduled, its context and its tokens; None: it computes nothing.
        self._running: deque[tuple[float, int, int] | None] = deque()
        self._last_end = 0.0

    def begin(self, output: SchedulerOutput, now: float) -> None:
        """Take note that a step was scheduled."""
        counts = output.num_scheduled_tokens
        if not counts:
            self._running.append(None)
            return
        longest = max(counts, key=lambda name: counts[name])
        cached = output.scheduled_cached_reqs
        begun = ((data.req_id, data.num_computed_tokens) for data in output.scheduled_new_reqs)
        known = chain(begun, zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        context = next((count for name, count in known if name == longest), 0)
        self._running.append((now, context, sum(counts.values())))

    def end(self, now: float) -> StepTime | None:
        """Take note of the first running step's results; None: it computed nothing."""
        step = self._running.popleft() if self._running else None
        # A step that was scheduled while another one ran began when that one ended.
        last_end, self._last_end = self._last_end, now
        if step is None:
            return None
        scheduled, context, num_tokens = step
        return StepTime(context, num_tokens, now - max(scheduled, last_end))
