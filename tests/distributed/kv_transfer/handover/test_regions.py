"""What travels: against a brute-force list of the rows that resuming needs."""

import pytest

from tests.v1.core.v4_geometry import v4_config
from vllm.distributed.kv_transfer.handover.host_memory import row_range
from vllm.distributed.kv_transfer.handover.regions import Region, list_regions, read_groups
from vllm.v1.core.geometry import GroupGeometry


def rows_needed(group: GroupGeometry, num_tokens: int, dense_from: int) -> set[int]:
    """The tokens whose rows a request lacks that resumes at ``num_tokens``."""
    if group.is_window:
        return set(range(group.first_needed(num_tokens), num_tokens))
    whole = range(num_tokens // group.ratio * group.ratio)
    return {t for t in whole if (t // group.ratio + 1) * group.ratio > dense_from}


@pytest.mark.parametrize("unit", [32, 64, 128])
@pytest.mark.parametrize("num_units", [1, 2, 3, 4, 7, 33, 130])
def test_every_row_that_is_needed_travels(unit: int, num_units: int) -> None:
    groups = read_groups(v4_config(unit, 1000))
    num_tokens = num_units * unit
    for dense_from in {0, unit, num_units // 2 * unit, num_tokens - unit, num_tokens}:
        regions = list_regions(groups, num_tokens, dense_from)
        assert len(set(regions)) == len(regions)
        for group in groups:
            mine = [region for region in regions if region.group_id == group.group_id]
            sent = {t for region in mine for t in range(region.first, region.end)}
            needed = rows_needed(group, num_tokens, dense_from)
            assert needed <= sent
            if not group.is_window:
                # A window's blocks go whole; rows of dense blocks may be another request's.
                assert sent == needed
            for region in mine:
                block = range(
                    region.block_index * group.block_size,
                    (region.block_index + 1) * group.block_size,
                )
                assert region.first in block
                assert region.end - 1 in block


def test_the_window_is_clipped() -> None:
    window = GroupGeometry(3, is_window=True, block_size=32, keep=127)
    regions = list_regions([window], 4096, 0)
    assert regions == tuple(Region(3, i, 32 * i, 32 * i + 32) for i in range(124, 128))


def test_a_state_travels_whole_block_after_block() -> None:
    """The blocks of a cut state are those that its span holds, each a whole page."""
    state = GroupGeometry(1, True, 32, align=32, is_recurrent=True, num_pieces=3)
    regions = list_regions((state,), 64, 0)
    assert [region.block_index for region in regions] == [3, 4, 5]
    assert [row_range(state, 1, region) for region in regions] == [(0, 1)] * 3
