"""Fresh zeros in pages that the system chooses, and what it cannot give."""

import pytest

from vllm.utils.huge_pages import HUGE_PAGE_BYTES, map_huge_pages


def test_memory_is_zero_and_begins_where_a_page_does() -> None:
    memory = map_huge_pages(2 * HUGE_PAGE_BYTES + 5)
    assert len(memory) == 2 * HUGE_PAGE_BYTES + 5
    assert memory.find(b"\1") == -1
    memory[-1] = 7
    assert memory[-1] == 7


@pytest.mark.parametrize("num_bytes", [1 << 55, 1 << 70])
def test_too_much_is_a_memory_error(num_bytes: int) -> None:
    with pytest.raises(MemoryError, match=f"no {num_bytes:,} bytes"):
        map_huge_pages(num_bytes)
