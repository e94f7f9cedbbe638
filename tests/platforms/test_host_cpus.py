"""Cores and CPU quotas."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm.exceptions import ConfigError
from vllm.platforms.host_cpus import bind_to, count_usable_cores, parse_binding, read_cpu_quota


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000\n", None), ("150000 100000\n", 1.5), ("nonsense", None), ("", None)],
)
def test_quota(tmp_path: Path, text: str, expected: float | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    assert read_cpu_quota(file) == expected


def test_no_quota_file(tmp_path: Path) -> None:
    assert read_cpu_quota(tmp_path / "absent") is None


def test_there_is_at_least_one_core() -> None:
    assert count_usable_cores() >= 1


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("value", "rank", "expected"),
    [
        ("auto", 0, None),
        ("nobind", 3, None),
        ("0", 0, {0}),
        ("0-2", 0, {0, 1, 2}),
        ("3, 0-1", 0, {0, 1, 3}),
        ("0-1|2-3", 1, {2, 3}),
    ],
)
def test_a_binding_lists_cpus(value: str, rank: int, expected: set[int] | None) -> None:
    assert parse_binding(value, rank) == expected


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("value", "rank", "reason"),
    [
        ("all", 0, "'all' is no CPU and no range"),
        ("0-", 0, "'0-' is no CPU and no range"),
        ("2-1", 0, "this process may use the CPUs 0,1,2,3"),
        ("0-4", 0, "this process may use the CPUs 0,1,2,3"),
        ("0-99999999999", 0, "this process may use the CPUs 0,1,2,3"),
        ("²", 0, "'²' is no CPU and no range"),
        ("0-1|2-3", 2, "it has no list for worker 2"),
    ],
)
def test_a_binding_that_makes_no_sense_is_refused(value: str, rank: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        parse_binding(value, rank)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no threads")
def test_threads_inherit_a_binding() -> None:
    one = frozenset([min(os.sched_getaffinity(0))])

    def bind() -> set[int]:
        assert bind_to(one)
        with ThreadPoolExecutor(1) as inner:
            return inner.submit(os.sched_getaffinity, 0).result()

    # In a thread of its own: the test's keeps all.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(bind).result() == one
