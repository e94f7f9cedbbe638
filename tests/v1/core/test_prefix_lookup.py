"""Lookups against a brute-force search over a random cache, and the reasons of misses."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.unit_block_pool import Checkpoint, UnitBlockPool

from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.policy.geometry import CacheGeometry
from vllm.v1.core.prefix.lookup import PrefixHit, explain_misses, find_prefix


def hashes(count: int, name: str = "p") -> list[BlockHash]:
    return [BlockHash(f"{name}{i}".encode()) for i in range(count)]


def make_pool(geometry: CacheGeometry, num_blocks: int = 2000) -> UnitBlockPool:
    return UnitBlockPool(num_blocks, [group.group_id for group in geometry.dense])


def publish(
    pool: UnitBlockPool,
    geometry: CacheGeometry,
    chain: list[BlockHash],
    held_back: set[tuple[int, int]],
    boundaries: set[int],
) -> None:
    """Cache a chain: all keys but ``held_back`` (group, unit), checkpoints at ``boundaries``."""
    for group in geometry.dense:
        blocks: dict[int, object] = {}
        for i, prefix_hash in enumerate(chain):
            position = (i + 1) * geometry.unit
            if position % group.ratio or (group.group_id, i) in held_back:
                continue
            index = (position - 1) // group.block_size
            if index not in blocks:
                blocks[index] = pool.get_new_blocks(1)[0]
            pool.add_key(blocks[index], group.group_id, prefix_hash)  # type: ignore[arg-type]
    for i in boundaries:
        pool.add_checkpoint(Checkpoint(chain[i], (i + 1) * geometry.unit, ((), (), (), ())))


def brute_force(
    geometry: CacheGeometry,
    num_units: int,
    held_back: set[tuple[int, int]],
    boundaries: set[int],
    max_tokens: int,
) -> int:
    """Return the deepest boundary whose every needed key is there, straight from the rule."""
    best = 0
    for i in range(num_units):
        position = (i + 1) * geometry.unit
        keys = [
            (group.group_id, j)
            for group in geometry.dense
            for j in range(i + 1)
            if (j + 1) * geometry.unit % group.ratio == 0
        ]
        if position <= max_tokens and i in boundaries and not held_back.intersection(keys):
            best = position
    return best


@given(data=st.data(), unit=st.sampled_from([32, 64, 128]), num_units=st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_the_deepest_resumable_boundary_is_found(
    data: st.DataObject, unit: int, num_units: int
) -> None:
    geometry = CacheGeometry.from_config(v4_config(unit, 10))
    ids = [group.group_id for group in geometry.dense]
    cells = st.tuples(st.sampled_from(ids), st.integers(0, max(0, num_units - 1)))
    held_back = data.draw(st.sets(cells, max_size=3))
    boundaries = data.draw(st.sets(st.integers(0, num_units - 1))) if num_units else set()
    max_tokens = data.draw(st.integers(0, 45 * unit))
    pool = make_pool(geometry)
    chain = hashes(num_units)
    publish(pool, geometry, chain, held_back, boundaries)
    hit = find_prefix(pool, geometry, chain, max_tokens)
    assert hit.position == brute_force(geometry, num_units, held_back, boundaries, max_tokens)
    assert hit.position <= hit.dense_match <= max_tokens
    for group, full, partial in zip(
        geometry.dense, hit.full_blocks, hit.partial_blocks, strict=True
    ):
        assert len(full) == hit.position // group.block_size
        rows_in_part = hit.position // group.ratio - len(full) * group.block_size // group.ratio
        assert (partial is not None) == (rows_in_part > 0)
        if partial is not None:
            end = hit.position // group.ratio * group.ratio
            assert partial[1] == chain[end // unit - 1]


def test_a_foreign_prompt_matches_nothing() -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 10))
    pool = make_pool(geometry)
    publish(pool, geometry, hashes(8), set(), {7})
    hit = find_prefix(pool, geometry, hashes(8, "q"), 1000)
    assert (hit.position, hit.dense_match) == (0, 0)


def test_the_lean_partner_of_a_hit_is_reported() -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 10))
    pool = make_pool(geometry)
    publish(pool, geometry, hashes(10), set(), {7, 8})
    hit = find_prefix(pool, geometry, hashes(10), 1000)
    assert hit.position == 288
    assert hit.lean_checkpoint is not None
    assert hit.lean_checkpoint.position == 256
    assert find_prefix(pool, geometry, hashes(10), 256).lean_checkpoint is None


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 320, 321, 1000])
def test_reasons_sum_to_the_prompt(num_tokens: int) -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 10))
    rng = random.Random(num_tokens)
    pool = make_pool(geometry)
    chain = hashes(40)
    publish(pool, geometry, chain[:20], set(), {rng.randrange(20)})
    for prefix_hash in chain[20:25]:
        pool.ghosts.add(prefix_hash)
    mine = chain[: num_tokens // 32]
    hit = find_prefix(pool, geometry, mine, num_tokens - 1)
    reasons = explain_misses(pool, geometry, mine, num_tokens, hit)
    assert hit.position + sum(reasons.values()) == num_tokens
    assert all(count > 0 for count in reasons.values())


def test_each_reason_has_its_cause() -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 10))
    pool = make_pool(geometry)
    chain = hashes(12)
    publish(pool, geometry, chain[:6], set(), {1})
    for prefix_hash in chain[6:9]:
        pool.ghosts.add(prefix_hash)
    hit = find_prefix(pool, geometry, chain, 12 * 32 + 5)
    reasons = explain_misses(pool, geometry, chain, 12 * 32 + 6, hit)
    assert hit.position == 64
    assert reasons == {
        "above_last_boundary": 6,
        "window_not_retained": 4 * 32,
        "evicted": 3 * 32,
        "first_seen": 3 * 32,
    }
    pool.checkpoint_ghosts.add(chain[3])
    assert "window_evicted" in explain_misses(pool, geometry, chain, 12 * 32 + 6, hit)


def test_nothing_is_an_empty_hit() -> None:
    hit = PrefixHit.nothing(2, dense_match=64)
    assert (hit.position, hit.dense_match, hit.full_blocks) == (0, 64, ([], []))
    assert hit.checkpoint is None
