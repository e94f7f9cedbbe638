"""A thread that runs a tower beside the steps, one picture after another."""

import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from vllm.model_executor.towers.tower import Tower
from vllm.utils.thread_priority import lower_priority
from vllm.v1.worker.picture_store import PictureStore, make_rows

# Where a step wants the processor, it gets three times as much of it as a tower.
_NICE = 5


class TowerDropped(Exception):
    """Nobody waits for the picture any more."""


def _begin(num_threads: int) -> None:
    """Set the thread up, before it starts others."""
    lower_priority(_NICE)
    torch.set_num_threads(num_threads)


def _wake_nobody() -> None:
    """Wakes nobody: whoever waits asks again by himself."""


class TowerThread:
    """Makes rows of pictures in the order in which they come.

    Owns: its thread, and the rows until they are taken.

    Args:
        tower: Makes them.
        num_threads: Threads of one product: as many as elsewhere, so that the bits are the same.
        store: Rows on a disk; None: there are none.
    """

    def __init__(self, tower: Tower, num_threads: int, store: PictureStore | None = None) -> None:
        self._tower, self._store = tower, store
        self._pool = ThreadPoolExecutor(1, "tower", initializer=_begin, initargs=(num_threads,))
        self._pending: dict[str, Future[torch.Tensor]] = {}
        self._wake: Callable[[], None] = _wake_nobody
        self._dropped: set[str] = set()
        self._seconds: dict[str, float] = {}

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, in any thread, when something is done."""
        self._wake = wake

    def start(self, key: str, pixels: np.ndarray) -> None:
        """Make the rows of a picture, uint8 ``[H, W, 3]``, some time."""
        # Asked for again before it was given up.
        self._dropped.discard(key)
        if key not in self._pending:
            future = self._pool.submit(self._make, key, pixels)
            self._pending[key] = future
            future.add_done_callback(lambda _: self._wake())

    def _make(self, key: str, pixels: np.ndarray) -> torch.Tensor:
        def keep_going() -> None:
            if key in self._dropped:
                raise TowerDropped

        keep_going()
        begin = time.perf_counter()
        try:
            return make_rows(self._tower, self._store, key, pixels, keep_going)
        finally:
            self._seconds[key] = time.perf_counter() - begin

    def drop(self, key: str) -> None:
        """Give a picture up, between two layers if it has begun."""
        if key in self._pending:
            self._dropped.add(key)

    def take(self) -> list[tuple[str, torch.Tensor | None]]:
        """Drain what is done: rows by key; None: the picture was given up.

        Raises:
            CheckpointError: The tower's files cannot be read.
        """
        done = [(key, future) for key, future in self._pending.items() if future.done()]
        taken: list[tuple[str, torch.Tensor | None]] = []
        for key, future in done:
            del self._pending[key]
            self._dropped.discard(key)
            try:
                taken.append((key, future.result()))
            except TowerDropped:
                taken.append((key, None))
        return taken

    def wait(self, key: str) -> None:
        """Wait until a picture that was begun, and not given up, is done.

        The first of several workers says when; the others may be behind.
        """
        future = self._pending.get(key)
        if future is not None and key not in self._dropped:
            futures.wait([future])

    def take_seconds(self) -> dict[str, float]:
        """Drain the seconds that the tower ran for pictures that were taken, or given up."""
        ended = [key for key in self._seconds if key not in self._pending]
        return {key: self._seconds.pop(key) for key in ended}

    def close(self) -> None:
        """Give everything up, and wait for the layer that runs."""
        self._dropped.update(self._pending)
        self._pool.shutdown(cancel_futures=True)
