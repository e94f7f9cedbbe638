"""When silence means death: the engine core's heartbeats, and judging the core by them."""

import time
from collections.abc import Callable

from vllm.utils.liveness import COMPUTING_SHARE, LONG_STEP_TIMEOUTS, Effort, family_effort_clock
from vllm.v1.engine.core_loop import Progress
from vllm.v1.engine.wire import Heartbeat


class Pulse:
    """Makes the core's heartbeats. Lives in the core's process, in the heartbeat thread.

    Args:
        progress: Of the step loop, which runs in the main thread.
        timeout_s: Seconds of silence that mean death.
        clock: Monotonic seconds.
        effort_clock: Of the loop's thread and its workers; None: this process's.
    """

    def __init__(
        self,
        progress: Progress,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        effort_clock: Callable[[], Effort] | None = None,
    ) -> None:
        self._progress = progress
        self._long_step_s = timeout_s * LONG_STEP_TIMEOUTS
        self._clock = clock
        self._effort_clock = effort_clock or family_effort_clock()
        self._count = -1
        self._num_grace_beats = 0
        # Of the time since the step began, what nobody could help: its threads had no core.
        self._queued_s = 0.0
        self._step_began = self._last_beat = clock()
        self._last_effort = self._effort_clock()

    def take_beat(self) -> Heartbeat:
        """Return the beat to send now."""
        now, effort, count = self._clock(), self._effort_clock(), self._progress.count
        elapsed = now - self._last_beat
        self._queued_s += min(elapsed, max(0.0, effort.queued_s - self._last_effort.queued_s))
        if count != self._count:
            self._count, self._step_began, self._queued_s = count, now, 0.0
        elif self._is_computing(effort, elapsed) and self._step_s(now) < self._long_step_s:
            self._num_grace_beats += 1
        self._last_beat, self._last_effort = now, effort
        return Heartbeat(count + self._num_grace_beats, self._progress.busy)

    def _is_computing(self, effort: Effort, elapsed: float) -> bool:
        return effort.total_s - self._last_effort.total_s >= COMPUTING_SHARE * elapsed

    def _step_s(self, now: float) -> float:
        """What the step has taken of its own."""
        return now - self._step_began - self._queued_s


class HeartbeatMonitor:
    """Tells a core that hangs from one that works or idles.

    Two clocks run: one since the last message of any kind (the whole process is stuck), one since
    the step loop last got on while it had work (only the loop is stuck).

    Args:
        timeout_s: Seconds of silence that mean death.
        clock: Monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._last_message = self._last_progress = clock()
        self._progress = -1

    def saw_message(self) -> None:
        """Note a message other than a heartbeat: outputs are progress."""
        self._last_message = self._last_progress = self._clock()

    def saw_beat(self, beat: Heartbeat) -> None:
        """Note a heartbeat."""
        now = self._clock()
        self._last_message = now
        if not beat.busy or beat.progress != self._progress:
            self._last_progress = now
        self._progress = beat.progress

    def find_fault(self) -> str | None:
        """Return what is wrong, or None. Ask only when no message waits to be read."""
        now = self._clock()
        if now - self._last_message > self._timeout_s:
            return f"the engine core sent no heartbeat for {self._timeout_s:g} s"
        if now - self._last_progress > self._timeout_s:
            return (
                f"the engine core's step loop made no progress for {self._timeout_s:g} s "
                "with work pending (VLLM_ENGINE_HEARTBEAT_TIMEOUT)"
            )
        return None
