"""Kept blocks by brute force: a block is kept iff some boundary needs a row of it."""

import pytest

from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.kept_blocks import kept_block_mask, kept_boundaries
from vllm.v1.core.retention import AUTO, CacheGeometry, RetentionPolicy, parse_retention


def geometry_and_policy(unit: int, retention: str) -> tuple[CacheGeometry, RetentionPolicy]:
    geometry = CacheGeometry.from_config(v4_config(unit, 8))
    return geometry, parse_retention(retention, geometry)


@pytest.mark.parametrize("retention", ["auto", "0", "256"])
@pytest.mark.parametrize("unit", [32, 64, 128])
@pytest.mark.parametrize("has_drafter", [False, True])
def test_masks_are_what_boundaries_need(unit: int, has_drafter: bool, retention: str) -> None:
    geometry, policy = geometry_and_policy(unit, retention)
    for num_tokens in (*range(1, 40), *range(unit - 1, 700, 7), 128, 256, 640):
        wanted = kept_boundaries(geometry, policy, num_tokens, has_drafter=has_drafter)
        for group in geometry.groups:
            mask = kept_block_mask(geometry, policy, group, num_tokens, has_drafter=has_drafter)
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


def test_a_drafter_keeps_the_boundary_below() -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 8))
    assert kept_boundaries(geometry, AUTO, 352) == (256, 320, 352)
    with_drafter = {
        count: kept_boundaries(geometry, AUTO, count, has_drafter=True) for count in (352, 20, 40)
    }
    assert with_drafter == {352: (224, 256, 288, 320, 352), 20: (), 40: (32,)}


def test_the_interval_is_kept_too() -> None:
    geometry, policy = geometry_and_policy(32, "128")
    assert kept_boundaries(geometry, policy, 352) == (128, 256, 320, 352)
    assert kept_boundaries(geometry, policy, 384) == (128, 256, 352, 384)


def test_the_policy_decides_about_lean_and_coarse_boundaries() -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 8))
    plain = RetentionPolicy("plain", keeps_lean=False, keeps_coarse=False)
    assert kept_boundaries(geometry, plain, 1_000) == (992,)
    assert kept_boundaries(geometry, AUTO, 1_000) == (512, 896, 992)
