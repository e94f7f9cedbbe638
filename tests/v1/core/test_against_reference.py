"""Random traffic through KVCacheManager and through a plain model of the rules: always equal."""

import math
import random
from typing import Any

import pytest

from tests.v1.core.cache_helpers import free_ids, ids, make_config, make_request
from tests.v1.core.reference_cache import Group, ReferenceCache
from tests.v1.core.specs import full, swa
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.request import Request

# Kinds of groups by the letter of their spec: "F" and "f" are full attention, "W" and "w" windows.
SHAPES = ("F", "W", "FW", "WF", "FWW", "Ww", "FWw", "FfW", "WWw")
NUM_STEPS = 120


class Pair:
    """A manager and its reference, of random groups."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        shape = rng.choice(SHAPES)
        self.hash_block = rng.choice((1, 2, 4))
        specs: dict[str, tuple[int, int]] = {}
        while len(set(specs.values())) < len(set(shape)):
            for kind in shape:
                size = self.hash_block * (rng.randint(1, 4) if len(shape) > 1 else 1)
                specs[kind] = (size, rng.randint(1, 30) if kind in "Ww" else 0)
        self.groups = [Group(*specs[kind], is_eagle=rng.random() < 0.4) for kind in shape]
        self.alignment = math.lcm(*(group.block_size for group in self.groups))
        intervals: list[int | None] = [None]
        if any(group.window for group in self.groups):
            intervals += [None, 0, self.alignment, 3 * self.alignment]
        interval = rng.choice(intervals)
        num_blocks = rng.randint(10, 120)
        config = make_config(
            num_blocks,
            [
                swa(block_size=group.block_size, sliding_window=group.window)
                if group.window
                else full(block_size=group.block_size)
                for group in self.groups
            ],
            [i for i, group in enumerate(self.groups) if group.is_eagle],
        )
        config.prefix_cache_retention_interval = interval
        self.manager = KVCacheManager(config, 100_000, self.alignment, self.hash_block)
        self.reference = ReferenceCache(
            num_blocks,
            self.groups,
            alignment=self.alignment,
            hash_block=self.hash_block,
            interval=interval,
        )
        self.prefixes = [[rng.randrange(5) for _ in range(200)] for _ in range(3)]
        self.live: dict[str, Request] = {}
        self.num_started = 0

    def start(self) -> None:
        """Admit a request that shares a prefix with others."""
        rng = self.rng
        shared = rng.choice(self.prefixes)[: rng.randint(1, 8 * self.alignment)]
        own = [rng.randrange(5, 9) for _ in range(rng.choice((0, 0, 10)))]
        request = make_request(str(self.num_started), shared + own, self.hash_block)
        self.num_started += 1
        hit, num_hit = self.manager.get_computed_blocks(request)
        expected = self.reference.find(request.block_hashes, request.num_tokens - 1)
        assert (list(hit.get_block_ids()), num_hit) == expected
        num_external = 0
        if rng.random() < 0.2:
            num_external = rng.randint(0, request.num_tokens - num_hit)
        is_loading = num_external > 0 and rng.random() < 0.5
        num_new = 0
        if not is_loading and num_hit + num_external < request.num_tokens:
            num_new = rng.randint(1, request.num_tokens - num_hit - num_external)
        options = {"num_external": num_external, "num_reserved": rng.choice((0, 0, 5))}
        if not self.step(request, num_new, num_hit, hit, is_loading=is_loading, **options):
            return
        self.live[request.request_id] = request
        if is_loading:
            # The load has arrived.
            self.compare()
            num_tokens = request.num_computed_tokens
            self.manager.cache_blocks(request, num_tokens)
            self.reference.cache(
                request.request_id, request.block_hashes, num_tokens, request.num_prompt_tokens
            )

    def go_on(self) -> None:
        """Compute more tokens of a request; one that finds no room is preempted."""
        request = self.rng.choice(list(self.live.values()))
        if request.num_tokens == request.num_computed_tokens:
            request.append_output_token_ids([self.rng.randrange(5)] * self.rng.randint(1, 2))
        num_new = self.rng.randint(1, request.num_tokens - request.num_computed_tokens)
        if not self.step(request, num_new):
            self.finish(request.request_id)

    def step(
        self,
        request: Request,
        num_new: int,
        num_hit: int = 0,
        hit: Any = None,
        *,
        num_external: int = 0,
        num_reserved: int = 0,
        is_loading: bool = False,
    ) -> bool:
        """Allocate in both; whether there was room."""
        num_lookahead = self.rng.choice((0, 0, 3))
        expected = self.reference.allocate(
            request.request_id,
            request.block_hashes,
            num_computed=request.num_computed_tokens + num_hit,
            num_new=num_new,
            num_tokens=request.num_tokens,
            num_prompt=request.num_prompt_tokens,
            hit=None if hit is None else hit.get_block_ids(),
            num_external=num_external,
            num_lookahead=num_lookahead,
            num_reserved=num_reserved,
            delay_cache=is_loading,
        )
        blocks = self.manager.allocate_slots(
            request,
            num_new,
            num_hit,
            hit,
            num_lookahead_tokens=num_lookahead,
            num_external_computed_tokens=num_external,
            reserved_blocks=num_reserved,
            delay_cache_blocks=is_loading,
        )
        if blocks is None or expected is None:
            assert blocks is None
            assert expected is None
            return False
        assert list(blocks.get_block_ids()) == expected
        request.num_computed_tokens += num_hit + num_external + num_new
        return True

    def finish(self, request_id: str) -> None:
        """Free a request's blocks."""
        self.manager.free(self.live.pop(request_id))
        self.reference.free_request(request_id)

    def compare(self) -> None:
        """The free queue, the tables and the index are equal."""
        assert free_ids(self.manager) == self.reference.free
        for group_id, manager in enumerate(self.manager.coordinator.single_type_managers):
            tables = {name: ids(blocks) for name, blocks in manager.req_to_blocks.items()}
            expected = self.reference.tables
            assert tables == {name: t[group_id].blocks for name, t in expected.items()}
        cached = {
            (get_group_id(key), get_block_hash(key)): (
                list(found) if isinstance(found, dict) else [found.block_id]
            )
            for key, found in self.manager.block_pool.cached_block_hash_to_block._cache.items()
        }
        assert cached == self.reference.cached


@pytest.mark.parametrize("seed", range(60))
def test_random_traffic_follows_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(rng)
    for _ in range(NUM_STEPS):
        draw = rng.random()
        if not pair.live or draw < 0.45:
            pair.start()
        elif draw < 0.8:
            pair.go_on()
        else:
            pair.finish(rng.choice(list(pair.live)))
        pair.compare()
