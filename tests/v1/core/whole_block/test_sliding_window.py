"""Sliding windows: what is skipped, what is freed where, and the lookup against a plain scan."""

from collections.abc import Sequence
from itertools import product

import pytest

from tests.v1.core.cache_helpers import ids
from tests.v1.core.specs import swa
from tests.v1.core.whole_block.lookup_table import find, make_manager
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

T, F = True, False


@pytest.mark.parametrize(
    ("is_cached", "expected"),
    [
        ([], 0),
        ([T], 1),
        ([T, F], 1),
        ([F, T], 0),
        ([T, T], 2),
        ([T, T, F], 2),
        ([T, T, F, T, F, F, T, T, F, T, T, T], 12),
        ([T, T, F, T, F, F, T, T, F, T, T, F], 11),
        ([T, T, F, T, F, F, T, T, F, F, F, F], 8),
        ([T, T, F, T, F, F, T, T, F, F, F, T], 8),
    ],
)
def test_lookup(is_cached: list[bool], expected: int) -> None:
    manager, pool = make_manager(swa(block_size=2, sliding_window=4))
    found = find(manager, pool, is_cached)
    assert len(found) == expected
    assert all(block.is_null for block in found[: max(expected - 2, 0)])
    assert not any(block.is_null for block in found[max(expected - 2, 0) :])


def plain_scan(is_cached: Sequence[bool], need: int, per: int, drop: bool) -> int:
    """Return the hit's blocks by the rule read literally: right to left, block by block."""
    length = run = 0
    for i in range(len(is_cached) - 1, -1, -1):
        if not is_cached[i]:
            run = 0
            continue
        if run == 0 and (i + 1 - drop) % per:
            continue
        run += 1
        if run == need:
            length = i + need
            break
    else:
        # The run that touches block 0 counts though shorter.
        length = run // per * per
    length = max(length - drop, 0)
    return length // per * per


def test_lookup_against_a_plain_scan() -> None:
    for window in (2, 3, 4, 5, 7, 9):
        manager, pool = make_manager(swa(block_size=2, sliding_window=window))
        for per, drop in product((1, 2, 3), (False, True)):
            need = -(-(window - 1) // 2) + drop
            for is_cached in product((T, F), repeat=8):
                found = find(manager, pool, is_cached, 1, drop, alignment_tokens=2 * per)
                expected = plain_scan(is_cached, need, per, drop)
                assert len(found) == expected, (window, per, drop, is_cached)
                held = [i for i, block in enumerate(found) if not block.is_null]
                assert held == list(range(max(expected + drop - need, 0), expected))


def test_a_window_of_one_token_hits_no_unseen_prompt() -> None:
    manager, pool = make_manager(swa(block_size=2, sliding_window=1))
    assert find(manager, pool, [F, F, F]) == []
    assert len(find(manager, pool, [F, T, F])) == 2


def test_a_miss_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, pool = make_manager(swa(block_size=2, sliding_window=17), num_blocks=200)
    calls = []
    lookup = pool.get_cached_block

    def counting(block_hash: object, group_ids: object) -> object:
        calls.append(block_hash)
        return lookup(block_hash, group_ids)  # type: ignore[arg-type]

    monkeypatch.setattr(pool, "get_cached_block", counting)
    assert find(manager, pool, [F] * 160) == []
    assert len(calls) == 160 // 8


def test_remove_skipped_blocks() -> None:
    manager, pool = make_manager(swa(block_size=2, sliding_window=4), num_blocks=2000)
    table = [KVCacheBlock(1000 + i) for i in range(10)]
    manager.req_to_blocks["test"] = table
    for num_computed, num_null in ((0, 0), (4, 0), (5, 1), (6, 1), (7, 2), (11, 4)):
        manager.remove_skipped_blocks("test", num_computed)
        assert ids(table) == [0] * num_null + list(range(1000 + num_null, 1010))
    assert pool.get_num_free_blocks() == 1999


def test_hashed_to_the_back_unhashed_to_the_front() -> None:
    manager, pool = make_manager(swa(block_size=2, sliding_window=4), num_blocks=9)
    manager.allocate_new_blocks("0", num_tokens=12, num_tokens_main_model=12)
    table = manager.req_to_blocks["0"]
    for i in (1, 3, 5):
        table[i].block_hash = BlockHashWithGroupId(bytes([i]))
    manager.remove_skipped_blocks("0", 11)
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [3, 1, 7, 8, 4, 2]
    manager.free("0")
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [5, 3, 1, 7, 8, 4, 2, 6]


def test_mask_uses_the_specs_numbers() -> None:
    manager, _ = make_manager(swa(block_size=8, sliding_window=8))
    mask = manager.reachable_block_mask(
        start_block=0,
        end_block=8,
        alignment_tokens=32,
        kv_cache_spec=manager.kv_cache_spec,
        use_eagle=True,
        retention_interval=0,
        num_prompt_tokens=64,
    )
    assert mask == [False] * 3 + [True] * 2 + [False] * 3
