"""Threads that let others go first."""

import os
import threading

from vllm.utils.thread_priority import lower_priority


def _own() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_thread_and_what_it_starts_go_behind_others_and_nobody_else_does() -> None:
    before, seen = _own(), []

    def run() -> None:
        lower_priority(3)
        child = threading.Thread(target=lambda: seen.append(_own()))
        child.start()
        child.join()
        seen.append(_own())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [min(before + 3, 19)] * 2
    assert _own() == before
