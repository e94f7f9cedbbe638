"""The rotation benchmark on prompts of 4,000 tokens."""

import pytest

from benchmarks.rotation import blocks_per_prompt, format_table, rotate
from benchmarks.v4_cache import UNITS, flash_config
from vllm.v1.core.geometry import CacheGeometry


def test_blocks_of_a_prompt() -> None:
    geometry = CacheGeometry.from_config(flash_config(128, 10))
    # C4: 79 blocks of 512; C128: 3 of 16,384; at 39,936 one block in three window groups.
    assert blocks_per_prompt(geometry, 40_000) == 79 + 3 + 3


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("concurrency", [1, 3])
def test_prompts_that_fit_hit_whole(unit: int, concurrency: int) -> None:
    found = rotate(unit, 5, 1200, num_tokens=4000, chunk=1024, concurrency=concurrency)
    assert found.fitting_prompts == 5
    assert found.hit_tokens == 5 * (3999 // unit * unit)
    assert found.share == 1.0
    assert found.missed_prompts == 0


def test_prompts_that_do_not_fit_are_counted_against_those_that_would() -> None:
    found = rotate(128, 30, 101, num_tokens=4000, chunk=1024)
    assert found.fitting_prompts == 100 // found.blocks_per_prompt < 30
    assert found.fitting_tokens == found.fitting_prompts * 3968
    assert 0 <= found.share < 1
    assert f"| auto | 128 | 30 | 101 | {found.blocks_per_prompt} |" in format_table([found])


def test_of_prompts_that_do_not_fit_auto_hits_those_that_would() -> None:
    shares = [
        rotate(128, 26, 201, policy_name=name, num_tokens=4000, chunk=1024, passes=3).share
        for name in ("0", "auto")
    ]
    assert shares[0] == 0.0
    assert shares[1] > 0.6
