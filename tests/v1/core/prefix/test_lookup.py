"""Lookups against a brute-force search over a random cache."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.core.prefix.unit_caches import cache_of, h, hashes, make_cache, publish
from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.prefix.lookup import find_junction, find_prefix, plan_partials
from vllm.v1.core.values.hit import PrefixHit


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


@pytest.mark.slow
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
    cache = cache_of(geometry)
    chain = hashes(num_units)
    publish(cache, geometry, chain, held_back, boundaries)
    hit = find_prefix(cache.index, geometry, chain, max_tokens)
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
    cache = cache_of(geometry)
    publish(cache, geometry, hashes(8), set(), {7})
    hit = find_prefix(cache.index, geometry, hashes(8, "q"), 1000)
    assert (hit.position, hit.dense_match) == (0, 0)


def test_the_lean_partner_of_a_hit_is_reported() -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 10))
    cache = cache_of(geometry)
    publish(cache, geometry, hashes(10), set(), {7, 8})
    hit = find_prefix(cache.index, geometry, hashes(10), 1000)
    assert hit.position == 288
    assert hit.lean_checkpoint is not None
    assert hit.lean_checkpoint.position == 256
    assert find_prefix(cache.index, geometry, hashes(10), 256).lean_checkpoint is None


def test_nothing_is_an_empty_hit() -> None:
    hit = PrefixHit.nothing(2, dense_match=64)
    assert (hit.position, hit.dense_match, hit.full_blocks) == (0, 64, ([], []))
    assert hit.checkpoint is None


def test_a_junction_is_where_a_cached_continuation_parts() -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 10))
    cache = cache_of(geometry)
    chain = hashes(4)
    for group in geometry.dense:
        (block,) = cache.pool.get_new_blocks(1)
        if group.ratio <= 32:
            cache.index.add_keys([block] * 4, group.group_id, chain, [None, *chain[:3]])
        else:
            cache.add_key(block, group.group_id, chain[3])

    def junction(prompt: list[BlockHash]) -> int:
        hit = find_prefix(cache.index, geometry, prompt, 1000)
        return find_junction(cache.index, geometry, prompt, hit)

    assert junction([*chain[:2], *hashes(2, "q")]) == 64
    assert junction(chain[:2]) == 64
    # It goes on as the prompt does, ends there, or shares nothing.
    assert junction(chain) == 0
    assert junction([*chain, *hashes(2, "q")]) == 0
    assert junction(hashes(4, "q")) == 0


def test_a_partly_covered_block_is_adopted_if_nobody_needs_it_otherwise() -> None:
    cache = make_cache(5, [0])
    one, two, held = cache.pool.get_new_blocks(3)
    for block, names in ((one, "ab"), (two, "cde"), (held, "f")):
        for name in names:
            cache.add_key(block, 0, h(name))
    cache.pool.free_blocks([one, two])
    hit = PrefixHit(64, ([],) * 4, ((one, h("b")), (two, h("d")), (held, h("f")), None), None, 64)
    plans = plan_partials(cache.index, hit)
    assert [plan.dense_index for plan in plans] == [0, 1, 2]
    assert [plan.block for plan in plans] == [one, two, held]
    assert [plan.keys for plan in plans] == [(h("a"), h("b")), (h("c"), h("d")), (h("f"),)]
    # Rows behind the boundary belong to a longer prefix; a held block may still be written.
    assert [plan.is_copy for plan in plans] == [False, True, True]
    assert hit.num_free_blocks() == 2
