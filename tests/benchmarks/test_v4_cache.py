"""The configs that control-plane benchmarks run on."""

import pytest

from benchmarks.v4_cache import (
    PUBLISHED_BLOCK_BYTES,
    UNITS,
    flash_block_bytes,
    flash_config,
    vllm_config,
)
from tests.v1.core.v4_geometry import FLASH, v4_config
from vllm.v1.core.geometry import CacheGeometry


@pytest.mark.parametrize("unit", UNITS)
def test_flash_has_the_six_groups_that_tests_of_the_core_use(unit: int) -> None:
    ours = CacheGeometry.from_config(flash_config(unit, 10))
    assert ours == CacheGeometry.from_config(v4_config(unit, 10, FLASH))
    assert len(ours.groups) == 6


@pytest.mark.parametrize("unit", UNITS)
def test_a_packed_block_weighs_about_what_the_published_one_does(unit: int) -> None:
    assert 1.0 <= flash_block_bytes(unit) / PUBLISHED_BLOCK_BYTES[unit] < 1.05


def test_whole_windows_cost_a_checkpoint_twenty_two_blocks_and_lean_ones_five() -> None:
    def checkpoint_blocks(*, is_strict: bool) -> int:
        geometry = CacheGeometry.from_config(vllm_config(10, 256, is_strict=is_strict))
        return sum(len(g.block_range(g.first_needed(1024), 1024)) for g in geometry.windows)

    assert checkpoint_blocks(is_strict=True) == 2 + 2 + 2 + 16
    assert checkpoint_blocks(is_strict=False) == 2 + 2 + 1
