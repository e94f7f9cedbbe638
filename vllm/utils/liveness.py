"""What tells a process that computes from one that hangs: numbers and clocks."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

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


def family_cpu_clock() -> Callable[[], float]:
    """Return a clock of what the main thread and the processes it started have used.

    Of the latter only where the system tells (Linux): a thread that waits for workers in processes
    of their own computes as long as they do.
    """
    own_clock = main_thread_cpu_clock()
    started = Path(f"/proc/self/task/{os.getpid()}/children")

    def read() -> float:
        try:
            children = started.read_text().split()
        except OSError:
            children = []
        return own_clock() + sum(map(_read_cpu_s, children))

    return read


def _read_cpu_s(pid: str) -> float:
    """Return the CPU seconds of a process; 0 of one that is gone."""
    try:
        # The name, in parentheses, may hold spaces: fields count from behind it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main_thread_cpu_clock() -> Callable[[], float]:
    """Return a clock of the CPU seconds that this process's main thread has used."""
    return thread_cpu_clock(threading.main_thread())


def thread_cpu_clock(thread: threading.Thread) -> Callable[[], float]:
    """Return a clock of the CPU seconds that a running thread has used; any thread may ask."""
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    clock_id = time.pthread_getcpuclockid(thread.ident)
    return lambda: time.clock_gettime(clock_id)
