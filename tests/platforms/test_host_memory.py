"""Host memory within the cgroup's limit."""

from vllm.platforms.host_memory import read_host_memory


def test_available_is_within_total() -> None:
    total, available = read_host_memory()
    assert 0 < available <= total
    assert total > 1 << 26
