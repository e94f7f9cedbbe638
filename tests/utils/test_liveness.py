"""Clocks of what a thread has spent, and a process with those it started."""

import os
import subprocess
import sys
import threading
import time

import pytest

from vllm.utils.liveness import (
    beat_interval_s,
    family_effort_clock,
    thread_effort_clock,
)

_BURNER = """
import sys, time
while time.process_time() < 0.3: pass
print("done", flush=True)
sys.stdin.read()
"""


def _burn() -> None:
    stop = time.thread_time() + 0.02
    while time.thread_time() < stop:
        pass


def test_a_beat_may_be_late_a_few_times_in_a_timeout() -> None:
    assert beat_interval_s(0.8) == 0.1
    assert beat_interval_s(1000.0) == 1.0


def test_a_threads_clock_is_its_own() -> None:
    main = thread_effort_clock(threading.main_thread())
    before = main().used_s
    done = threading.Event()
    asked = threading.Event()

    def work() -> None:
        _burn()
        done.set()
        asked.wait(120)

    thread = threading.Thread(target=work)
    thread.start()
    clock = thread_effort_clock(thread)
    assert done.wait(120)
    assert clock().used_s >= 0.02
    asked.set()
    thread.join()
    _burn()
    assert main().used_s - before >= 0.02


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of other processes")
def test_a_familys_clock_counts_what_it_started() -> None:
    family, own = family_effort_clock(), thread_effort_clock(threading.main_thread())

    def others() -> float:
        return family().used_s - own().used_s

    before = others()  # processes of other tests may be there still
    process = subprocess.Popen(
        [sys.executable, "-c", _BURNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"done\n"
    assert others() - before >= 0.25
    process.communicate()
    assert others() - before < 0.25


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of queues")
def test_a_thread_without_a_core_is_in_the_queue() -> None:
    """Two that burn on one core: each waits for about half of the time."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        clock = thread_effort_clock(threading.main_thread())
        while clock().queued_s < 0.05:
            _burn()
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, cores)
