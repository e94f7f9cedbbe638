"""What tells a process that computes from one that hangs: numbers and clocks."""

import threading
import time
from collections.abc import Callable

# Beats per timeout: a few may be late without harm.
BEATS_PER_TIMEOUT = 8
_MAX_INTERVAL_S = 1.0
# A step that computes may take this many timeouts (a first big prefill on a slow machine) ...
LONG_STEP_TIMEOUTS = 4
# ... where computing means that the thread uses at least this share of a core. One that waits for a
# lock or a dead device uses none.
COMPUTING_SHARE = 0.2


def beat_interval_s(timeout_s: float) -> float:
    """Return the seconds between two beats for a given timeout."""
    return min(_MAX_INTERVAL_S, timeout_s / BEATS_PER_TIMEOUT)


def main_thread_cpu_clock() -> Callable[[], float]:
    """Return a clock of the CPU seconds that this process's main thread has used."""
    thread_id = threading.main_thread().ident
    if thread_id is None or not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    clock_id = time.pthread_getcpuclockid(thread_id)
    return lambda: time.clock_gettime(clock_id)
