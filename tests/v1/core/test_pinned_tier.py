"""Pinned windows: the tier by itself, in the pool, and through the real KVCacheManager."""

import logging
from typing import Any

import pytest
from vllm.v1.core.pool_invariants import check_pool

from tests.v1.core.cache_helpers import (
    cached_indices,
    free_ids,
    ids,
    make_config,
    make_manager,
    make_request,
    run_prompt,
)
from tests.v1.core.specs import full, mamba, swa
from vllm.exceptions import InvariantError
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id


def pinning_pool(num_blocks: int = 10, max_pinned: int = 4) -> BlockPool:
    pool = BlockPool(num_blocks, True, 4)
    pool.enable_pinning(max_pinned, min_drop_blocks=2)
    return pool


def take_hashed(pool: BlockPool, n: int) -> list[KVCacheBlock]:
    blocks = pool.get_new_blocks(n)
    for block in blocks:
        key = make_block_hash_with_group_id(BlockHash(b"%d" % block.block_id), 0)
        block.block_hash = key
        pool.cached_block_hash_to_block.insert(key, block)
    return blocks


def tier(pool: BlockPool) -> Any:
    assert pool.pinned is not None
    return pool.pinned


def queued(pool: BlockPool) -> tuple[list[int], list[int]]:
    """Return the ids in the free queue and in the pinned queue."""
    return (
        ids(pool.free_block_queue.get_all_free_blocks()),
        ids(tier(pool).queue.get_all_free_blocks()),
    )


# ---- the pool ----------------------------------------------------------------------------------


def test_pinned_blocks_are_free_but_reached_last() -> None:
    pool = pinning_pool()
    blocks = take_hashed(pool, 3)
    tier(pool).pin(blocks[:2])
    pool.free_blocks(blocks)
    assert queued(pool) == ([4, 5, 6, 7, 8, 9, 3], [1, 2])
    assert pool.get_num_free_blocks() == 9
    assert pool.get_usage() == 0.0
    assert ids(pool.get_new_blocks(7)) == [4, 5, 6, 7, 8, 9, 3]
    assert blocks[0].block_hash is not None
    check_pool(pool, [pool.blocks[3:]])
    # Nothing else is left: the oldest gives way, the other one stays.
    assert ids(pool.get_new_blocks(1)) == [1]
    assert queued(pool) == ([], [2])
    assert blocks[0] not in tier(pool)
    with pytest.raises(ValueError, match="only 1 are free"):
        pool.get_new_blocks(2)
    assert ids(pool.get_new_blocks(1)) == [2]
    assert len(tier(pool)) == 0
    check_pool(pool, [pool.blocks[1:]])


def test_touch_keeps_the_pin() -> None:
    pool = pinning_pool()
    first, second = take_hashed(pool, 2)
    tier(pool).pin([first, second])
    pool.free_blocks([first, second])
    pool.touch([first])
    assert queued(pool)[1] == [2]
    assert first in tier(pool)
    pool.touch([first])
    pool.free_blocks([first])
    assert queued(pool)[1] == [2]
    pool.free_blocks([first])
    # Used last, given up last.
    assert queued(pool)[1] == [2, 1]
    check_pool(pool, [])


def test_only_hashed_blocks_are_pinned() -> None:
    pool = pinning_pool()
    hashed = take_hashed(pool, 1)
    unhashed = pool.get_new_blocks(1)
    tier(pool).pin([*hashed, *unhashed, pool.null_block])
    assert tier(pool).pinned_blocks() == hashed
    pool.free_unhashed_first([*hashed, *unhashed])
    assert queued(pool) == ([2, 3, 4, 5, 6, 7, 8, 9], [1])


def test_the_cap_demotes_the_oldest() -> None:
    pool = pinning_pool(max_pinned=4)
    old, held, new = take_hashed(pool, 2), take_hashed(pool, 2), take_hashed(pool, 3)
    tier(pool).pin(old)
    pool.free_blocks(old)
    tier(pool).pin(held)
    tier(pool).pin(new)
    # Free ones first, then pins of blocks that requests hold.
    assert ids(tier(pool).pinned_blocks()) == [4, 5, 6, 7]
    assert queued(pool) == ([8, 9, 1, 2], [])
    pool.free_blocks([*held, *new])
    assert queued(pool) == ([8, 9, 1, 2, 3], [4, 5, 6, 7])
    # A window that does not fit as a whole serves nobody.
    tier(pool).pin(take_hashed(pool, 5))
    assert ids(tier(pool).pinned_blocks()) == [4, 5, 6, 7]


def test_pinning_again_makes_young() -> None:
    pool = pinning_pool(max_pinned=3)
    blocks = take_hashed(pool, 4)
    tier(pool).pin(blocks[:3])
    tier(pool).pin(blocks[:1])
    tier(pool).pin(blocks[3:])
    assert ids(tier(pool).pinned_blocks()) == [3, 1, 4]


def test_demote_n() -> None:
    pool = pinning_pool()
    blocks = take_hashed(pool, 3)
    tier(pool).pin(blocks)
    pool.free_blocks(blocks)
    assert tier(pool).demote_n(0) == 0
    assert tier(pool).demote_n(2) == 2
    assert queued(pool) == ([4, 5, 6, 7, 8, 9, 1, 2], [3])
    assert blocks[0].block_hash is not None
    assert tier(pool).demote_n(5) == 1
    assert tier(pool).demote_n(5) == 0


def test_evicting_unpins() -> None:
    pool = pinning_pool()
    free, held = take_hashed(pool, 2)
    tier(pool).pin([free, held])
    pool.free_blocks([free])
    pool.evict_blocks([free.block_id, held.block_id])
    assert len(tier(pool)) == 0
    # Scratch now, so it is reused first.
    assert queued(pool) == ([1, 3, 4, 5, 6, 7, 8, 9], [])
    pool.free_blocks([held])
    assert queued(pool)[1] == []
    check_pool(pool, [])


def test_reset_unpins() -> None:
    pool = pinning_pool()
    blocks = take_hashed(pool, 2)
    tier(pool).pin(blocks)
    assert not pool.reset_prefix_cache()
    assert len(tier(pool)) == 2
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert len(tier(pool)) == 0
    assert pool.get_num_free_blocks() == 9
    check_pool(pool, [])


def test_invariants_notice_a_broken_tier() -> None:
    pool = pinning_pool()
    blocks = take_hashed(pool, 2)
    tier(pool).pin(blocks)
    pool.free_blocks(blocks)
    check_pool(pool, [])
    tier(pool)._is_free[blocks[0]] = False
    with pytest.raises(InvariantError, match="I3"):
        check_pool(pool, [])
    tier(pool)._is_free[blocks[0]] = True
    tier(pool).max_pinned = 1
    with pytest.raises(InvariantError, match="cap"):
        check_pool(pool, [])
    tier(pool).max_pinned = 4
    pool.free_block_queue.append(tier(pool).queue.popleft())
    with pytest.raises(InvariantError, match="I3"):
        check_pool(pool, [])


# ---- the manager -------------------------------------------------------------------------------


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("VLLM_PIN_SWA_TOKENS", "1")
    monkeypatch.setenv("VLLM_PIN_MIN_DROP_SIZE", "2")
    monkeypatch.delenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", raising=False)
    return monkeypatch


def hybrid(num_blocks: int = 100, eagle: bool = False, **kw: Any) -> KVCacheManager:
    specs = [full(block_size=32), swa(block_size=8, sliding_window=20)]
    return make_manager(make_config(num_blocks, specs, [1] if eagle else []), **kw)


def decode(manager: KVCacheManager, request: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        request.append_output_token_ids(5)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1


def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PIN_SWA_TOKENS", raising=False)
    assert hybrid().block_pool.pinned is None


def test_nothing_to_pin(pinning: pytest.MonkeyPatch) -> None:
    for specs in ([full()], [full(block_size=16), mamba(block_size=16)]):
        assert make_manager(make_config(10, specs)).block_pool.pinned is None
    assert hybrid(enable_caching=False).block_pool.pinned is None


@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("interval", [None, "0", "64"])
@pytest.mark.parametrize("num_tokens", [128, 129, 150, 159, 160, 161])
def test_a_dropped_window_is_hit_where_the_prompt_paused(
    num_tokens: int, interval: str | None, eagle: bool, pinning: pytest.MonkeyPatch
) -> None:
    if interval is not None:
        pinning.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", interval)
    manager = hybrid(eagle=eagle)
    request = make_request("0", range(1000, 1000 + num_tokens), 8)
    run_prompt(manager, request, 64)
    decode(manager, request, 1)
    boundary = num_tokens // 32 * 32
    tail_end = min(boundary // 8 + eagle, num_tokens // 8)
    tail = set(range(tail_end - 3 - eagle, tail_end))
    assert tail <= cached_indices(manager, request, 1)
    pinned = tier(manager.block_pool)
    by_hash = {
        i
        for i, h in enumerate(request.block_hashes)
        if (found := manager.block_pool.get_cached_block(h, [1])) and found[0] in pinned
    }
    assert tail <= by_hash
    manager.free(request)
    manager.check_invariants()
    # Whoever goes on from the pause resumes there; a drafter needs the block after it.
    if not eagle or tail_end > boundary // 8:
        longer = make_request("1", [*range(1000, 1000 + num_tokens), *range(40)], 8)
        assert manager.get_computed_blocks(longer)[1] == boundary


def test_a_pinned_window_outlives_a_flood(pinning: pytest.MonkeyPatch) -> None:
    pinning.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "0")
    pinning.setenv("VLLM_PIN_MAX_SHARE", "0.1")
    window_only = [swa(block_size=8, sliding_window=20)]

    def hit_after_flood(pins: str) -> int:
        pinning.setenv("VLLM_PIN_SWA_TOKENS", pins)
        manager = make_manager(make_config(60, window_only), scheduler_block_size=8)
        first = make_request("first", range(1000, 1128), 8)
        run_prompt(manager, first, 64)
        decode(manager, first, 1)
        manager.free(first)
        # Short prompts drop nothing, so they pin nothing, and leave their cached tails behind.
        for i in range(40):
            other = make_request(f"o{i}", range(2000 + 40 * i, 2033 + 40 * i), 8)
            run_prompt(manager, other, 64)
            manager.free(other)
            manager.check_invariants()
        return manager.get_computed_blocks(make_request("again", range(1000, 1129), 8))[1]

    assert hit_after_flood("0") == 0
    assert hit_after_flood("1") == 128


@pytest.mark.parametrize("num_tokens", [20, 128, 131])
def test_decode_steps_pin_nothing(num_tokens: int, pinning: pytest.MonkeyPatch) -> None:
    window_only = make_config(60, [swa(block_size=8, sliding_window=20)])
    for manager in (hybrid(), hybrid(eagle=True), make_manager(window_only, use_eagle=True)):
        request = make_request("0", range(num_tokens), 8)
        run_prompt(manager, request, 64)
        # One step drops what the prompt leaves; the next ones may fill a drafter's block.
        decode(manager, request, 10)
        num_pinned = len(tier(manager.block_pool))
        assert (num_pinned > 0) == (num_tokens > 20)
        decode(manager, request, 100)
        assert len(tier(manager.block_pool)) == num_pinned


@pytest.mark.parametrize("eagle", [False, True])
def test_a_lone_window_group_resumes_where_it_paused(
    eagle: bool, pinning: pytest.MonkeyPatch
) -> None:
    pinning.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "0")
    config = make_config(60, [swa(block_size=8, sliding_window=20)])
    manager = make_manager(config, use_eagle=eagle)
    request = make_request("0", range(131), 8)
    run_prompt(manager, request, 64)
    decode(manager, request, 6)
    manager.free(request)
    # 128 is the last boundary; the answer filled the block that a drafter's hit drops.
    longer = make_request("1", [*request.all_token_ids, *range(20)], 8)
    assert manager.get_computed_blocks(longer)[1] == 128
    pinned = tier(manager.block_pool)
    hit = manager.get_computed_blocks(longer)[0].blocks[0]
    assert all(block.is_null or block in pinned for block in hit)


def test_a_tail_that_fell_apart_is_not_pinned(pinning: pytest.MonkeyPatch) -> None:
    manager = hybrid()
    request = make_request("0", range(160), 8)
    # The first drop is of one block: it pins nothing, and what it leaves may be gone later.
    manager.allocate_slots(request, 32)
    request.num_computed_tokens = 32
    manager.allocate_slots(request, 1)
    other = make_request("1", range(5000, 5320), 8)
    manager.allocate_slots(other, 320)
    request.num_computed_tokens = 96
    manager.allocate_slots(request, 32)
    assert len(tier(manager.block_pool)) == 0
    manager.check_invariants()


def test_small_chunks_pin_nothing(pinning: pytest.MonkeyPatch) -> None:
    pinning.setenv("VLLM_PIN_MIN_DROP_SIZE", "9")
    manager = hybrid()
    run_prompt(manager, make_request("0", range(320), 8), 64)
    assert len(tier(manager.block_pool)) == 0


def test_pins_give_way_to_admission(pinning: pytest.MonkeyPatch) -> None:
    pinning.setenv("VLLM_PIN_MAX_SHARE", "1")
    manager = make_manager(make_config(33, [swa(block_size=8, sliding_window=120)]))
    first = make_request("0", range(256), 8)
    run_prompt(manager, first, 128)
    decode(manager, first, 1)
    manager.free(first)
    assert len(tier(manager.block_pool)) >= 15
    assert manager.block_pool.get_num_free_blocks() == 32
    other = make_request("1", range(5000, 5256), 8)
    assert manager.allocate_slots(other, 256, full_sequence_must_fit=True) is not None
    assert len(tier(manager.block_pool)) == 0
    assert free_ids(manager) == []
    manager.check_invariants()


@pytest.mark.parametrize(("share", "expected"), [("0.25", "room for 8"), ("0", "room for 0")])
def test_start_up_says_how_many_prefixes_fit(
    share: str,
    expected: str,
    pinning: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pinning.setenv("VLLM_PIN_MAX_SHARE", share)
    pinning.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm.v1.core.kv_cache_coordinator"):
        hybrid(num_blocks=101)
    assert [expected in record.getMessage() for record in caplog.records] == [True]
