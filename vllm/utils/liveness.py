"""What tells a process that computes from one that hangs: numbers and clocks."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# Beats per timeout: a few may be late without harm.
BEATS_PER_TIMEOUT = 8
_MAX_INTERVAL_S = 1.0
# A step that computes may take this many timeouts (a first big prefill on a slow machine) ...
LONG_STEP_TIMEOUTS = 4
# ... where computing means that it uses a core, or waits for one, for at least this share of the
# time. One that waits for a lock or a dead device does neither.
COMPUTING_SHARE = 0.2


def beat_interval_s(timeout_s: float) -> float:
    """Return the seconds between two beats for a given timeout."""
    return min(_MAX_INTERVAL_S, timeout_s / BEATS_PER_TIMEOUT)


class Effort(NamedTuple):
    """What threads have spent so far.

    A machine that is busy with something else lets a healthy thread wait for a core, so that alone
    tells nothing of a thread that hangs: that one waits for a lock or a device, in no queue.

    Attributes:
        used_s: CPU seconds.
        queued_s: Seconds in which they could have run and had no core; 0 where the system does not
            tell.
    """

    used_s: float = 0.0
    queued_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of wanting to compute."""
        return self.used_s + self.queued_s


def family_effort_clock() -> Callable[[], Effort]:
    """Return a clock of who computes a step, with the main thread of this process.

    These are the threads that Python did not start (those of kernels) and the processes that this
    one started: a thread that waits for workers computes as long as they do. Where the system does
    not tell of others (it is not Linux), the main thread alone.
    """
    main_thread = threading.main_thread()
    own_clock = thread_effort_clock(main_thread)
    threads = Path("/proc/self/task")
    started = threads / str(os.getpid()) / "children"

    def read() -> Effort:
        pythons = {thread.native_id for thread in threading.enumerate()}
        others = [task for task in _list(threads) if int(task.name) not in pythons]
        others += [task for child in _read_words(started) for task in _list_threads(child)]
        efforts = [own_clock(), *map(_read_effort, others)]
        return Effort(sum(e.used_s for e in efforts), sum(e.queued_s for e in efforts))

    return read


def thread_effort_clock(thread: threading.Thread) -> Callable[[], Effort]:
    """Return a clock of one running thread; any thread may ask."""
    told = Path(f"/proc/self/task/{thread.native_id}")
    if (told / "schedstat").exists():
        return lambda: _read_effort(told)
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return Effort
    clock_id = time.pthread_getcpuclockid(thread.ident)
    return lambda: Effort(time.clock_gettime(clock_id))


def _list_threads(process_id: str) -> list[Path]:
    return _list(Path(f"/proc/{process_id}/task"))


def _list(folder: Path) -> list[Path]:
    """Return what a folder holds; nothing if it is gone, as its process is."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read_words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _read_effort(thread: Path) -> Effort:
    """Return what a thread has spent: nanoseconds on a core, and in its queue."""
    spent = _read_words(thread / "schedstat")
    return Effort(int(spent[0]) / 1e9, int(spent[1]) / 1e9) if len(spent) > 1 else Effort()
