"""What is cached of a window group is what some lookup reads: brute force over all lookups."""

import math
import random
from collections.abc import Iterable

import pytest

from tests.v1.core.cache_helpers import cached_indices, make_config, make_request, run_prompt
from tests.v1.core.specs import full, swa
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

WINDOW = 1


class Geometry:
    """A full and a window group of random sizes, and a prompt."""

    def __init__(self, seed: int, *, use_eagle: bool) -> None:
        rng = random.Random(seed)
        self.use_eagle = use_eagle
        self.window_block = rng.choice((1, 2, 4))
        self.full_block = self.window_block * rng.choice((1, 2, 3, 6))
        self.window = rng.randint(1, 3 * self.full_block)
        self.alignment = math.lcm(self.full_block, self.window_block)
        self.num_tokens = rng.randint(1, 6 * self.alignment)
        self.chunk = rng.randint(1, self.num_tokens)
        self.interval = self.alignment * rng.randint(1, 3)

    def manager(self, interval: int | str | None = None) -> KVCacheManager:
        config = make_config(
            500,
            [
                full(block_size=self.full_block),
                swa(block_size=self.window_block, sliding_window=self.window),
            ],
            [WINDOW] if self.use_eagle else [],
        )
        config.prefix_cache_retention_interval = interval
        return KVCacheManager(config, 8192, self.alignment, self.window_block)

    def request(self, num_more_tokens: int = 0) -> Request:
        return make_request("0", range(self.num_tokens + num_more_tokens), self.window_block)

    def cached(self, interval: int | str | None = None) -> set[int]:
        """The window blocks that are cached after the prompt was computed chunk by chunk."""
        manager, request = self.manager(interval), self.request()
        run_prompt(manager, request, self.chunk)
        return cached_indices(manager, request, WINDOW)

    def num_cacheable(self) -> int:
        """Window blocks up to the last aligned boundary, and the one a drafter's hit drops."""
        aligned = self.num_tokens // self.alignment * self.alignment
        if aligned and self.use_eagle:
            aligned = min(self.num_tokens, aligned + self.window_block)
        return aligned // self.window_block

    def read_by(self, boundaries: Iterable[int]) -> set[int]:
        """The prompt's blocks that hits of these lengths read, where all blocks are cached.

        The hits are those of a request that goes on behind the prompt, so none is out of reach.
        """
        num_more = 3 * self.interval + self.window + self.alignment
        manager, request = self.manager(), self.request(num_more)
        for group_id, single in enumerate(manager.coordinator.single_type_managers):
            num_blocks = request.num_tokens // single.block_size
            manager.block_pool.cache_full_blocks(
                request=request,
                blocks=manager.block_pool.get_new_blocks(num_blocks),
                num_cached_blocks=0,
                num_full_blocks=num_blocks,
                block_size=single.block_size,
                kv_cache_group_id=group_id,
            )
        need = math.ceil((self.window - 1) / self.window_block) + self.use_eagle
        read: set[int] = set()
        for boundary in boundaries:
            # A drafter's hit matches one block more and drops it.
            length = boundary + self.use_eagle * self.window_block
            blocks, num_hit = manager.coordinator.find_longest_cache_hit(
                request.block_hashes, length
            )
            end = length // self.window_block
            if num_hit != boundary:
                # A run that touches block 0 may be shorter than a window; with a drafter it is
                # aligned before the drop, and so hits one boundary less. What it read counts.
                assert self.use_eagle
                assert end < need
                read.update(range(end))
                continue
            # A window of one token reads nothing below a boundary.
            if self.window > 1:
                read.update(i for i, block in enumerate(blocks[WINDOW]) if not block.is_null)
            if self.use_eagle and boundary:
                read.add(end - 1)
        return {i for i in read if i < self.num_cacheable()}

    def multiples(self, step: int) -> range:
        """Boundaries of which a tail may lie in the prompt."""
        return range(0, self.num_tokens + self.window + 2 * step, step)


def differing(cached: set[int], read: set[int]) -> set[int]:
    """Blocks that are cached in vain or missing; block 0 may stay, it is never worth a mask."""
    return (cached ^ read) - ({0} if 0 in cached else set())


@pytest.mark.parametrize("use_eagle", [False, True])
@pytest.mark.parametrize("seed", range(50))
def test_every_boundary_is_kept_without_an_interval(seed: int, use_eagle: bool) -> None:
    geometry = Geometry(seed, use_eagle=use_eagle)
    read = geometry.read_by(geometry.multiples(geometry.alignment))
    assert not differing(geometry.cached(), read)


@pytest.mark.parametrize("use_eagle", [False, True])
@pytest.mark.parametrize("seed", range(50))
def test_interval_zero_keeps_the_replay_boundary(seed: int, use_eagle: bool) -> None:
    geometry = Geometry(seed, use_eagle=use_eagle)
    replay = (geometry.num_tokens - 1) // geometry.alignment * geometry.alignment
    assert not differing(geometry.cached(0), geometry.read_by([replay]))


@pytest.mark.parametrize("use_eagle", [False, True])
@pytest.mark.parametrize("seed", range(50))
def test_an_interval_keeps_its_multiples_too(seed: int, use_eagle: bool) -> None:
    geometry = Geometry(seed, use_eagle=use_eagle)
    replay = (geometry.num_tokens - 1) // geometry.alignment * geometry.alignment
    read = geometry.read_by([replay, *geometry.multiples(geometry.interval)])
    assert not differing(geometry.cached(geometry.interval), read)
