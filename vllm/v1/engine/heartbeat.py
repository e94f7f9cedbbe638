"""When silence means death: judging the engine core by its heartbeats."""

import time
from collections.abc import Callable

from vllm.v1.engine.wire import Heartbeat

# Beats per timeout: a few may be late without harm.
_BEATS_PER_TIMEOUT = 8
_MAX_INTERVAL_S = 1.0


def beat_interval_s(timeout_s: float) -> float:
    """Return the seconds between two beats for a given timeout."""
    return min(_MAX_INTERVAL_S, timeout_s / _BEATS_PER_TIMEOUT)


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
