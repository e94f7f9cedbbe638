"""Clocks of CPU seconds: of a thread, and of a process with those it started."""

import subprocess
import sys
import threading
import time

import pytest

from vllm.utils.liveness import (
    beat_interval_s,
    family_cpu_clock,
    main_thread_cpu_clock,
    thread_cpu_clock,
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
    main = main_thread_cpu_clock()
    before = main()
    done = threading.Event()
    asked = threading.Event()

    def work() -> None:
        _burn()
        done.set()
        asked.wait(120)

    thread = threading.Thread(target=work)
    thread.start()
    clock = thread_cpu_clock(thread)
    assert done.wait(120)
    assert clock() >= 0.02
    asked.set()
    thread.join()
    _burn()
    assert main() - before >= 0.02


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of other processes")
def test_a_familys_clock_counts_what_it_started() -> None:
    family, own = family_cpu_clock(), main_thread_cpu_clock()
    before = family() - own()  # processes of other tests may be there still
    process = subprocess.Popen(
        [sys.executable, "-c", _BURNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"done\n"
    # Ticks are 10 ms.
    assert family() - own() - before >= 0.25
    process.communicate()
    assert family() - own() - before < 0.25
