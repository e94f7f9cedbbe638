"""Hits and miss reasons add up to the tokens, whatever the case."""

import random

import pytest

from tests.v1.core.prefix.unit_caches import cache_of, hashes, publish
from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.prefix.lookup import find_prefix
from vllm.v1.core.prefix.records import explain_misses


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 320, 321, 1000])
def test_reasons_sum_to_the_prompt(num_tokens: int) -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 10))
    rng = random.Random(num_tokens)
    cache = cache_of(geometry)
    chain = hashes(40)
    publish(cache, geometry, chain[:20], set(), {rng.randrange(20)})
    for prefix_hash in chain[20:25]:
        cache.index.ghosts.add(prefix_hash)
    mine = chain[: num_tokens // 32]
    hit = find_prefix(cache.index, geometry, mine, num_tokens - 1)
    reasons = explain_misses(cache.index, geometry, mine, num_tokens, hit)
    assert hit.position + sum(reasons.values()) == num_tokens
    assert all(count > 0 for count in reasons.values())


def test_each_reason_has_its_cause() -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 10))
    cache = cache_of(geometry)
    chain = hashes(12)
    publish(cache, geometry, chain[:6], set(), {1})
    for prefix_hash in chain[6:9]:
        cache.index.ghosts.add(prefix_hash)
    hit = find_prefix(cache.index, geometry, chain, 12 * 32 + 5)
    reasons = explain_misses(cache.index, geometry, chain, 12 * 32 + 6, hit)
    assert hit.position == 64
    assert reasons == {
        "above_last_boundary": 6,
        "window_not_retained": 4 * 32,
        "evicted": 3 * 32,
        "first_seen": 3 * 32,
    }
    cache.index.checkpoint_ghosts.add(chain[3])
    assert "window_evicted" in explain_misses(cache.index, geometry, chain, 12 * 32 + 6, hit)
