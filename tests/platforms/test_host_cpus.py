"""Cores and CPU quotas."""

from pathlib import Path

import pytest

from vllm.platforms.host_cpus import count_usable_cores, read_cpu_quota


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
