"""Pinned windows with hits at whole blocks, through the manager."""

import logging
from typing import Any

import pytest

from tests.v1.core.cache_helpers import (
    cached_indices,
    free_ids,
    make_config,
    make_manager,
    make_request,
    run_prompt,
    start,
)
from tests.v1.core.specs import full, mamba, swa
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.pool.pins import Pins


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("VLLM_PIN_SWA_TOKENS", "1")
    monkeypatch.setenv("VLLM_PIN_MIN_DROP_SIZE", "2")
    monkeypatch.delenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", raising=False)
    return monkeypatch


def hybrid(num_blocks: int = 100, eagle: bool = False, **kw: Any) -> KVCacheManager:
    specs = [full(block_size=32), swa(block_size=8, sliding_window=20)]
    return make_manager(make_config(num_blocks, specs, [1] if eagle else []), **kw)


def pins_of(manager: KVCacheManager) -> Pins:
    pins = manager.block_pool.pins
    assert pins is not None
    return pins


def decode(manager: KVCacheManager, request: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        request.append_output_token_ids(5)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1


def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PIN_SWA_TOKENS", raising=False)
    assert hybrid().block_pool.pins is None


def test_nothing_to_pin(pinning: pytest.MonkeyPatch) -> None:
    for specs in ([full()], [full(block_size=16), mamba(block_size=16)]):
        assert make_manager(make_config(10, specs)).block_pool.pins is None
    assert hybrid(enable_caching=False).block_pool.pins is None


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
    pinned = pins_of(manager)
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
        num_pinned = pins_of(manager).num_blocks
        assert (num_pinned > 0) == (num_tokens > 20)
        decode(manager, request, 100)
        assert pins_of(manager).num_blocks == num_pinned


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
    pinned = pins_of(manager)
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
    assert pins_of(manager).num_blocks == 0
    manager.check_invariants()


def test_small_chunks_pin_nothing(pinning: pytest.MonkeyPatch) -> None:
    pinning.setenv("VLLM_PIN_MIN_DROP_SIZE", "9")
    manager = hybrid()
    run_prompt(manager, make_request("0", range(320), 8), 64)
    assert pins_of(manager).num_blocks == 0


def test_pins_give_way_to_admission(pinning: pytest.MonkeyPatch) -> None:
    pinning.setenv("VLLM_PIN_MAX_SHARE", "1")
    manager = make_manager(make_config(33, [swa(block_size=8, sliding_window=120)]))
    first = make_request("0", range(256), 8)
    run_prompt(manager, first, 128)
    decode(manager, first, 1)
    manager.free(first)
    assert pins_of(manager).num_blocks >= 15
    assert manager.block_pool.get_num_free_blocks() == 32
    other = make_request("1", range(5000, 5256), 8)
    assert manager.allocate_slots(other, 256, full_sequence_must_fit=True) is not None
    assert pins_of(manager).num_blocks == 0
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
    with caplog.at_level(logging.INFO, logger="vllm.v1.core.retention.pinning"):
        hybrid(num_blocks=101)
    assert [expected in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(("decode_ranks", "prefill_ranks"), [(1, 1), (2, 1), (2, 2)])
def test_tails_are_kept_below_every_boundary_however_many_ranks_share_a_block(
    decode_ranks: int, prefill_ranks: int
) -> None:
    ranks = decode_ranks * prefill_ranks
    manager = make_manager(
        make_config(100, [full(block_size=32), swa(block_size=8, sliding_window=8)]),
        scheduler_block_size=32 * ranks,
        hash_block_size=8 * ranks,
        dcp_world_size=decode_ranks,
        pcp_world_size=prefill_ranks,
    )
    tokens = range(128 * ranks)
    start(manager, make_request("0", tokens, 8 * ranks))
    for num_tokens in (33 * ranks, 127 * ranks, 128 * ranks):
        found = manager.get_computed_blocks(make_request("1", tokens[:num_tokens], 8 * ranks))
        assert found[1] == (num_tokens - 1) // (32 * ranks) * 32 * ranks
