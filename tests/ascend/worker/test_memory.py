"""Snapshots, the subtraction, and the profile run."""

from typing import Any

import pytest

from vllm.exceptions import ConfigError
from vllm.v1.worker.device_memory import MemorySnapshot, available_kv_bytes, read_peak_bytes


class FakeMemory:
    """Plays the memory part of ``torch.npu``."""

    def __init__(self, free: int, total: int, reserved: int, peak: int) -> None:
        self._free, self._total, self._reserved, self._peak = free, total, reserved, peak

    def mem_get_info(self) -> tuple[int, int]:
        return self._free, self._total

    def memory_stats(self) -> dict[str, Any]:
        return {"allocated_bytes.all.peak": self._peak, "num_ooms": 0}

    def memory_reserved(self) -> int:
        return self._reserved


def test_a_snapshot_tells_others_from_our_own() -> None:
    device = FakeMemory(free=50, total=64, reserved=10, peak=30)
    snapshot = MemorySnapshot.take(device)
    assert (snapshot.free, snapshot.total, snapshot.others) == (50, 64, 4)
    assert read_peak_bytes(device) == 30


@pytest.mark.parametrize(
    ("outside_before", "outside_now", "expected"), [(4, 4, 56), (4, 9, 51), (6, 4, 54)]
)
def test_what_is_left_for_pages(outside_before: int, outside_now: int, expected: int) -> None:
    first = MemorySnapshot(free=100 - outside_before, total=100, reserved=0)
    now = MemorySnapshot(free=100 - 20 - outside_now, total=100, reserved=20)
    assert available_kv_bytes(first, now, peak_bytes=30, utilization=0.9) == expected


def test_nothing_is_left_beside_large_weights() -> None:
    snapshot = MemorySnapshot(100, 100, 0)
    assert available_kv_bytes(snapshot, snapshot, peak_bytes=95, utilization=0.9) == 0


def test_a_taken_device_is_refused() -> None:
    first = MemorySnapshot(free=40, total=100, reserved=0)
    with pytest.raises(ConfigError, match=r"0\.9 asks for 90 bytes, but 40 of 100"):
        available_kv_bytes(first, first, peak_bytes=1, utilization=0.9)
