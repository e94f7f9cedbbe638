"""Kept blocks by brute force: a block is kept iff some boundary needs a row of it."""

import pytest

from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.retention import CacheGeometry
from vllm_ascend.core.masks import kept_block_mask, kept_boundaries


@pytest.mark.parametrize("unit", [32, 64, 128])
@pytest.mark.parametrize("use_mtp", [False, True])
def test_masks_are_what_boundaries_need(unit: int, use_mtp: bool) -> None:
    geometry = CacheGeometry.from_config(v4_config(unit, 8))
    for num_tokens in (*range(1, 40), *range(unit - 1, 700, 7), 128, 256, 640):
        wanted = kept_boundaries(geometry, num_tokens, use_mtp=use_mtp)
        for group in geometry.groups:
            mask = kept_block_mask(geometry, group, num_tokens, use_mtp=use_mtp)
            if not group.is_window:
                rows = num_tokens // group.ratio
                held = -(-rows // (group.block_size // group.ratio))
                assert mask == [True] * held
                continue
            assert len(mask) == -(-num_tokens // group.block_size)
            needed = {
                row // group.block_size
                for boundary in wanted
                for row in range(group.first_needed(boundary), boundary)
            }
            assert {i for i, kept in enumerate(mask) if kept} == needed


def test_mtp_keeps_the_boundary_below() -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 8))
    assert kept_boundaries(geometry, 352) == (256, 320, 352)
    assert kept_boundaries(geometry, 352, use_mtp=True) == (224, 256, 288, 320, 352)
    assert kept_boundaries(geometry, 20, use_mtp=True) == ()
    assert kept_boundaries(geometry, 40, use_mtp=True) == (32,)
