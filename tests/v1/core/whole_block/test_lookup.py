"""The hybrid lookup against an oracle: the longest length that every spec accepts."""

import random
from typing import Any

import pytest

from tests.v1.core.cache_helpers import make_config, make_manager, make_request
from tests.v1.core.specs import full, mamba, swa
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheSpec


def accepts(
    pool: BlockPool, manager: Any, group_ids: list[int], hashes: Any, length: int, cap: int
) -> bool:
    """Whether one spec's groups can serve a hit of exactly ``length`` tokens, by definition."""
    view = hashes
    if manager.block_size != pool.hash_block_size:
        view = BlockHashListWithBlockSize(hashes, pool.hash_block_size, manager.block_size)
    end = length // manager.block_size
    if manager.use_eagle and manager.drops_eagle_block:
        end += 1
        if end * manager.block_size > cap:
            return False
    first = 0
    if isinstance(manager, SlidingWindowManager):
        span = -(-(manager.sliding_window - 1) // manager.block_size)
        first = max(length // manager.block_size - span, 0)
    elif not manager.is_downward_closed:
        first = end - 1
    return all(pool.get_cached_block(view[i], group_ids) for i in range(first, end))


@pytest.mark.parametrize("seed", range(40))
def test_hybrid_lookup_finds_the_longest_common_hit(seed: int) -> None:
    rng = random.Random(seed)
    window = swa(block_size=rng.choice([4, 8, 16]), sliding_window=rng.choice([2, 8, 9, 17]))
    choices: list[KVCacheSpec] = [
        full(block_size=16),
        full(block_size=8, head_size=32),
        window,
        window,
    ]
    choices += [mamba(block_size=8), swa(block_size=8, sliding_window=20)]
    while True:
        specs = rng.sample(choices, rng.randrange(2, 5))
        if len(set(specs)) > 1:
            break
    eagle = [i for i in range(len(specs)) if rng.random() < 0.3]
    config = make_config(1000, specs, eagle)
    manager = make_manager(config, scheduler_block_size=16, hash_block_size=4)
    coordinator, pool = manager.coordinator, manager.block_pool
    request = make_request("0", range(160), 4)
    num_whole = 0
    for _ in range(30):
        assert pool.reset_prefix_cache()
        density = rng.choice([0.5, 0.8, 0.95])
        for group_id, single in enumerate(coordinator.single_type_managers):
            blocks = pool.get_new_blocks(160 // single.block_size)
            pool.cache_full_blocks(
                request,
                blocks,
                0,
                len(blocks),
                single.block_size,
                group_id,
                [rng.random() < density for _ in blocks],
            )
            pool.free_blocks(blocks)
        cap = rng.randrange(1, 161)
        found, num_hit = coordinator.find_longest_cache_hit(request.block_hashes, cap)
        by_spec: dict[Any, list[int]] = {}
        for group_id, spec in enumerate(specs):
            by_spec.setdefault(spec, []).append(group_id)
        expected = max(
            length
            for length in range(0, cap + 1, 16)
            if length == 0
            or all(
                accepts(
                    pool,
                    coordinator.single_type_managers[group_ids[0]],
                    group_ids,
                    request.block_hashes,
                    length,
                    cap,
                )
                for group_ids in by_spec.values()
            )
        )
        # A drafter's window that reaches block 0 is aligned before its drop: one alignment less.
        short_eagle = any(
            isinstance(m, SlidingWindowManager) and m.use_eagle and expected < m.sliding_window + 8
            for m in coordinator.single_type_managers
        )
        assert num_hit == expected or (short_eagle and num_hit <= expected)
        num_whole += num_hit == expected
        for single, blocks in zip(coordinator.single_type_managers, found, strict=True):
            assert len(blocks) == num_hit // single.block_size
    assert num_whole > 10
