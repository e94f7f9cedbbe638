"""Engines beside each other, each with its share of the cores.

A small model gains little from a second thread in a decode step, so two engines of one thread each
answer more than one of two. No bit depends on the number of threads.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from benchmarks.real_weights.progress import tell
from vllm import envs
from vllm.platforms.host_cpus import count_usable_cores

T = TypeVar("T")

_THREADS = "OMP_NUM_THREADS"


def run_side_by_side(jobs: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Run jobs that open engines of their own, as many at a time as there are cores.

    One behind the other where engines run in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``).

    Args:
        jobs: By name, the longest ones first. Each is told when it ends, with its seconds.

    Returns:
        What each returned, in the order of the jobs.
    """
    cores = count_usable_cores()
    num_lanes = min(cores, len(jobs)) if envs.VLLM_ENABLE_V1_MULTIPROCESSING else 1

    def run(name: str) -> T:
        begin = time.monotonic()
        result = jobs[name]()
        tell(f"{name}: {time.monotonic() - begin:.0f} s")
        return result

    if num_lanes == 1:
        return {name: run(name) for name in jobs}
    with _threads_each(cores // num_lanes), ThreadPoolExecutor(num_lanes) as pool:
        return dict(zip(jobs, pool.map(run, jobs), strict=True))


@contextmanager
def _threads_each(count: int) -> Iterator[None]:
    """Have engines that start meanwhile take so many threads, unless the user said how many."""
    if os.environ.get(_THREADS):
        yield
        return
    os.environ[_THREADS] = str(count)
    try:
        yield
    finally:
        del os.environ[_THREADS]
