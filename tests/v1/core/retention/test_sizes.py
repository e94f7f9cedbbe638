"""How many blocks requests and checkpoints hold, by brute force."""

import pytest

from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.sizes import max_checkpoint_blocks


@pytest.mark.parametrize("unit", [32, 64, 128])
def test_the_largest_checkpoint(unit: int) -> None:
    geometry = CacheGeometry.from_config(v4_config(unit, 10))
    sizes = {
        sum(len(g.block_range(g.first_needed(p), p)) for g in geometry.windows)
        for p in range(unit, 5000, unit)
    }
    assert max_checkpoint_blocks(geometry) == max(sizes)
