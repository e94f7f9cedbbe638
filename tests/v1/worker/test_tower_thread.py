"""A tower beside the steps."""

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vllm.exceptions import CheckpointError
from vllm.v1.worker.tower_thread import TowerThread

PIXELS = np.zeros((2, 2, 3), dtype=np.uint8)


class SlowTower:
    """Runs layers until it is told to end."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def encode(self, pixels: torch.Tensor, keep_going: Callable[[], None]) -> torch.Tensor:
        self.begun.set()
        while not self.may_end.wait(0.001):
            keep_going()
        if self.error is not None:
            raise self.error
        return pixels.float().flatten(0, 1)


def wait_for(thread: TowerThread) -> list[tuple[str, Any]]:
    for future in list(thread._pending.values()):
        future.exception(timeout=30)
    return thread.take()


def test_rows_come_when_they_are_done_and_in_order() -> None:
    tower = SlowTower()
    thread = TowerThread(tower, 1)
    woken = threading.Semaphore(0)
    thread.bind_wake(woken.release)
    thread.start("a", PIXELS)
    thread.start("b", PIXELS)
    thread.start("a", PIXELS)
    assert thread.take() == []
    tower.may_end.set()
    made = wait_for(thread)
    assert [key for key, _ in made] == ["a", "b"]
    assert [rows.shape for _, rows in made] == [(4, 3)] * 2
    assert thread.take() == []
    assert all(woken.acquire(timeout=30) for _ in "ab")
    thread.close()


def test_what_is_given_up_ends_between_layers_or_never_begins() -> None:
    tower = SlowTower()
    thread = TowerThread(tower, 1)
    thread.start("a", PIXELS)
    thread.start("b", PIXELS)
    assert tower.begun.wait(30)
    thread.drop("a")
    thread.drop("b")
    thread.drop("unknown")
    assert wait_for(thread) == [("a", None), ("b", None)]
    tower.may_end.set()
    thread.start("a", PIXELS)
    (made,) = wait_for(thread)
    assert made[1] is not None
    thread.close()


def test_errors_are_those_of_whoever_takes_the_rows() -> None:
    tower = SlowTower()
    tower.error = CheckpointError("gone")
    tower.may_end.set()
    thread = TowerThread(tower, 1)
    thread.start("a", PIXELS)
    with pytest.raises(CheckpointError, match="gone"):
        wait_for(thread)
    thread.close()


def test_the_end_waits_for_no_picture() -> None:
    tower = SlowTower()
    thread = TowerThread(tower, 1)
    thread.start("a", PIXELS)
    assert tower.begun.wait(30)
    thread.close()


def test_a_tower_goes_behind_the_steps() -> None:
    seen: list[int] = []

    class Tower:
        def encode(self, pixels: torch.Tensor, keep_going: Callable[[], None]) -> torch.Tensor:
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return pixels.float().flatten(0, 1)

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread: Any = TowerThread(Tower(), 1)  # type: ignore[arg-type]
    thread.start("a", PIXELS)
    wait_for(thread)
    assert seen[0] > own or own == 19
    thread.close()
