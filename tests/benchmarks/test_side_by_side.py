"""Jobs beside each other: their threads, and what they find in the environment."""

import os
import threading
from collections.abc import Callable

import pytest

from benchmarks.real_weights import side_by_side
from benchmarks.real_weights.side_by_side import run_side_by_side


def read_threads() -> str | None:
    return os.environ.get("OMP_NUM_THREADS")


@pytest.mark.parametrize(("cores", "num_jobs", "threads"), [(2, 2, "1"), (2, 3, "1"), (5, 2, "2")])
def test_as_many_run_at_a_time_as_there_are_cores_and_share_these(
    cores: int, num_jobs: int, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setattr(side_by_side, "count_usable_cores", lambda: cores)
    # The first two wait for each other; one behind the other they would break it.
    both = threading.Barrier(2, timeout=30)

    def meet() -> str | None:
        both.wait()
        return read_threads()

    jobs: dict[str, Callable[[], str | None]] = {"a": meet, "b": meet, "c": read_threads}
    jobs = dict(list(jobs.items())[:num_jobs])
    assert run_side_by_side(jobs) == dict.fromkeys(jobs, threads)
    assert read_threads() is None


def test_what_the_user_said_of_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(side_by_side, "count_usable_cores", lambda: 2)
    jobs = {"a": read_threads, "b": read_threads}
    assert run_side_by_side(jobs) == {"a": "7", "b": "7"}
    assert read_threads() == "7"


def test_engines_of_this_process_run_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(side_by_side, "count_usable_cores", lambda: 2)
    here = threading.current_thread()

    def look() -> tuple[str | None, bool]:
        return read_threads(), threading.current_thread() is here

    assert run_side_by_side({"a": look, "b": look}) == dict.fromkeys("ab", (None, True))


def test_a_job_that_fails_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(side_by_side, "count_usable_cores", lambda: 2)

    def fail() -> str | None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_side_by_side({"a": fail, "b": read_threads})
    assert read_threads() is None
