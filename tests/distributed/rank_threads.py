"""Ranks as threads of one process: the collectives without the processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
_TIMEOUT_S = 60.0


class Meeting:
    """Owns: what the threads hand each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadGroup:
    """One thread's side of a ``TensorParallelGroup``; counts its collectives."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, len(meeting.tensors)
        self.num_calls = 0
        self._meeting = meeting

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.num_calls += 1
        self._meeting.tensors[self.rank] = tensor.clone()
        self._meeting.barrier.wait()
        found = list(self._meeting.tensors)
        self._meeting.barrier.wait()
        return found

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum, in rank order on every rank."""
        parts = self._exchange(tensor)
        assert all(part.shape == tensor.shape for part in parts)
        return torch.stack(parts).sum(0)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate along the last axis."""
        return torch.cat(self._exchange(tensor), -1)

    def close(self) -> None:
        """Nothing."""


def run_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Call ``work`` once per rank, at the same time; the results in rank order."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadGroup(rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for f in futures if (error := f.exception()) is not None]
        broken = threading.BrokenBarrierError
        for error in sorted(errors, key=lambda e: isinstance(e, broken)):
            raise error
        return [future.result() for future in futures]
