"""The KVCacheManager's facts with numbers: hits, ids, the free queue's order, refusals."""

from typing import Any

import pytest

from tests.v1.core.cache_helpers import (
    cached_indices,
    free_ids,
    ids,
    make_config,
    make_manager,
    make_request,
    start,
)
from tests.v1.core.specs import full, mamba, swa
from tests.v1.core.v4_geometry import v4_config
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_manager
from vllm.v1.core.kv_cache_coordinator import CheckpointCoordinator, UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.values.cache_step import StepWork

COMMON = [i for i in range(3) for _ in range(16)]


def one_group(num_blocks: int = 11, **kw: Any) -> KVCacheManager:
    return make_manager(make_config(num_blocks, [full()]), **kw)


def hybrid(num_blocks: int, **kw: Any) -> KVCacheManager:
    window = swa(sliding_window=32)
    return make_manager(make_config(num_blocks, [full(), window, window]), **kw)


def block_ids(blocks: Any) -> tuple[list[int], ...]:
    assert blocks is not None
    ids_by_group: tuple[list[int], ...] = blocks.get_block_ids()
    return ids_by_group


# ---- one full-attention group ------------------------------------------------------------------


def test_prefill_shares_a_prefix_and_frees_in_order() -> None:
    manager = one_group()
    first = make_request("0", COMMON + [3] * 7)
    hit, num_hit = manager.get_computed_blocks(first)
    assert num_hit == 0
    assert not hit.blocks[0]
    assert block_ids(manager.allocate_slots(first, 55, 0, hit)) == ([1, 2, 3, 4],)

    second = make_request("1", COMMON + [3] * 5)
    hit, num_hit = manager.get_computed_blocks(second)
    assert hit.get_block_ids() == ([1, 2, 3],)
    assert num_hit == 48
    assert block_ids(manager.allocate_slots(second, 5, num_hit, hit)) == ([5],)
    assert [block.ref_cnt for block in hit.blocks[0]] == [2, 2, 2]
    assert manager.block_pool.free_block_queue.num_free_blocks == 5
    assert manager.get_num_common_prefix_blocks("0") == [3]

    manager.free(first)
    manager.free(second)
    assert free_ids(manager) == [6, 7, 8, 9, 10, 4, 5, 3, 2, 1]

    third = make_request("2", COMMON + [3] * 5)
    blocks, num_hit = start(manager, third)
    assert num_hit == 48
    assert block_ids(blocks) == ([6],)
    manager.free(third)

    fourth = make_request("3", [99] * 160)
    blocks, num_hit = start(manager, fourth)
    assert num_hit == 0
    assert block_ids(blocks) == ([7, 8, 9, 10, 4, 5, 6, 3, 2, 1],)
    assert manager.block_pool.free_block_queue.num_free_blocks == 0
    manager.check_invariants()


def test_a_hit_leaves_a_token_to_compute() -> None:
    manager = one_group()
    start(manager, make_request("0", COMMON))
    assert manager.get_computed_blocks(make_request("1", COMMON))[1] == 32
    assert manager.get_computed_blocks(make_request("2", [*COMMON, 5]))[1] == 48


def test_decode_caches_a_block_once_it_is_full() -> None:
    manager = one_group()
    request = make_request("0", COMMON + [3] * 7)
    start(manager, request)
    request.num_computed_tokens = 55
    request.append_output_token_ids([8] * 4)
    assert block_ids(manager.allocate_slots(request, 4)) == ([],)
    table = manager.get_blocks("0").blocks[0]
    assert table[3].block_hash is None
    request.num_computed_tokens = 59
    request.append_output_token_ids([9] * 15)
    assert block_ids(manager.allocate_slots(request, 15)) == ([5],)
    table = manager.get_blocks("0").blocks[0]
    assert table[3].block_hash is not None
    assert table[4].block_hash is None


def test_drafts_are_not_cached() -> None:
    manager = one_group()
    request = make_request("0", range(15))
    assert manager.allocate_slots(request, 18, num_lookahead_tokens=15) is not None
    assert len(manager.get_blocks("0").blocks[0]) == 3
    assert cached_indices(manager, request, 0) == set()


def test_prompt_logprobs_recompute_and_cache_again() -> None:
    manager = one_group()
    start(manager, make_request("0", COMMON))
    request = make_request("1", COMMON, prompt_logprobs=5)
    assert request.skip_reading_prefix_cache
    blocks, num_hit = start(manager, request)
    assert num_hit == 0
    assert block_ids(blocks) == ([4, 5, 6],)
    key = manager.block_pool.blocks[4].block_hash
    assert key == manager.block_pool.blocks[1].block_hash
    assert key is not None
    assert set(manager.block_pool.cached_block_hash_to_block._cache[key]) == {1, 4}  # type: ignore[arg-type]


def test_no_caching() -> None:
    manager = one_group(enable_caching=False)
    request = make_request("0", COMMON)
    blocks, num_hit = start(manager, request)
    assert (block_ids(blocks), num_hit) == (([1, 2, 3],), 0)
    manager.cache_blocks(request, 48)
    assert start(manager, make_request("1", COMMON))[1] == 0
    assert manager.get_num_common_prefix_blocks("0") == [0]


def test_a_refusal_touches_nothing() -> None:
    manager = one_group()
    first = make_request("0", COMMON)
    start(manager, first)
    manager.free(first)
    hog = make_request("1", [7] * 16 * 7)
    start(manager, hog)
    before = free_ids(manager)
    request = make_request("2", [*COMMON, *[9] * 40])
    hit, num_hit = manager.get_computed_blocks(request)
    assert num_hit == 48
    assert manager.allocate_slots(request, 40, num_hit, hit) is None
    assert free_ids(manager) == before
    assert [block.ref_cnt for block in hit.blocks[0]] == [0, 0, 0]
    assert manager.get_block_ids("2") == ([],)


def test_reserved_blocks_are_left_alone() -> None:
    manager = one_group()
    request = make_request("0", range(48))
    assert manager.allocate_slots(request, 48, reserved_blocks=8) is None
    assert manager.allocate_slots(request, 48, reserved_blocks=7) is not None


def test_nothing_to_do_is_an_error() -> None:
    manager = one_group()
    with pytest.raises(ValueError, match="num_new_tokens must be greater than 0"):
        manager.allocate_slots(make_request("0", range(48)), 0)


def test_external_tokens() -> None:
    manager = one_group()
    request = make_request("0", range(64))
    blocks = manager.allocate_slots(
        request, 0, num_external_computed_tokens=48, delay_cache_blocks=True
    )
    assert block_ids(blocks) == ([],)
    assert manager.get_block_ids("0") == ([1, 2, 3],)
    assert cached_indices(manager, request, 0) == set()
    request.num_computed_tokens = 48
    manager.cache_blocks(request, 48)
    assert cached_indices(manager, request, 0) == {0, 1, 2}
    assert block_ids(manager.allocate_slots(request, 16)) == ([4],)
    assert cached_indices(manager, request, 0) == {0, 1, 2, 3}


def test_an_empty_prompt() -> None:
    manager = one_group()
    request = make_request("0", [])
    hit, num_hit = manager.get_computed_blocks(request)
    assert num_hit == 0
    assert block_ids(manager.allocate_slots(request, 1, 0, hit)) == ([1],)


def test_slots_end_at_max_model_len() -> None:
    manager = one_group(max_model_len=40)
    request = make_request("0", range(40))
    assert block_ids(manager.allocate_slots(request, 40, num_lookahead_tokens=30)) == ([1, 2, 3],)


def test_reset() -> None:
    manager = one_group(log_stats=True)
    request = make_request("0", COMMON)
    start(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(make_request("1", COMMON))[1] == 0
    stats = manager.make_prefix_cache_stats()
    assert stats is not None
    assert stats.reset


def test_statistics() -> None:
    manager = one_group(log_stats=True)
    start(manager, make_request("0", [*COMMON, 5]))
    again = make_request("1", [*COMMON, 5])
    manager.get_computed_blocks(again)
    again.num_preemptions = 1
    manager.get_computed_blocks(again)
    stats = manager.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.requests, stats.queries, stats.hits) == (2, 98, 48)
    assert (stats.preempted_requests, stats.preempted_hits) == (1, 48)
    assert manager.make_prefix_cache_stats() == type(stats)()
    assert one_group().make_prefix_cache_stats() is None
    assert manager.usage == pytest.approx(0.4)


def test_admission_record_adds_up() -> None:
    manager = one_group()
    prompts = (
        make_request("0", [*COMMON, 5]),
        make_request("1", [*COMMON, *[6] * 20]),
        make_request("2", COMMON, prompt_logprobs=1),
    )
    records = []
    for request in prompts:
        found = manager.look_up(request)
        num_new = request.num_tokens - found.num_tokens
        assert manager.allocate_slots(request, num_new, found.num_tokens, found.blocks) is not None
        records.append(manager.record_admission(request, found, found.num_tokens))
    first = records[0]
    assert (first.num_cached_tokens, first.miss_tokens) == (
        0,
        {"first_seen": 48, "above_last_boundary": 1},
    )
    record = records[1]
    assert record.num_cached_tokens == 48
    assert record.miss_tokens == {"first_seen": 16, "above_last_boundary": 4}
    # What is cached of a prompt that is scored for the first time is passed over.
    assert records[2].miss_tokens == {"bypassed": 32, "above_last_boundary": 16}


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(48, 16), (37, 16), (16, 0)])
def test_drafter_drops_a_block(num_tokens: int, num_hit: int) -> None:
    manager = one_group(use_eagle=True)
    start(manager, make_request("0", range(num_tokens)))
    assert manager.get_computed_blocks(make_request("1", range(num_tokens)))[1] == num_hit


def test_drafter_with_a_window_of_one_block() -> None:
    manager = make_manager(make_config(11, [swa(sliding_window=16)]), use_eagle=True)
    start(manager, make_request("0", range(37)))
    probe = make_request("1", range(37))
    assert manager.get_computed_blocks(probe)[1] == 16
    manager.evict_blocks({manager.get_blocks("0").blocks[0][0].block_id})
    assert manager.get_computed_blocks(probe)[1] == 0


# ---- hybrid ------------------------------------------------------------------------------------


def test_hybrid_prefill() -> None:
    manager = hybrid(21)
    first = make_request("0", COMMON + [3] * 7)
    blocks, _ = start(manager, first)
    assert block_ids(blocks) == ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
    second = make_request("1", COMMON + [3] * 5)
    hit, num_hit = manager.get_computed_blocks(second)
    assert num_hit == 48
    assert hit.get_block_ids() == ([1, 2, 3], [0, 6, 7], [0, 10, 11])
    assert block_ids(manager.allocate_slots(second, 5, 48, hit)) == ([13], [14], [15])
    manager.free(first)
    manager.free(second)
    manager.check_invariants()


def test_hybrid_eagle_hits_one_block_less() -> None:
    manager = hybrid(100, use_eagle=True)
    start(manager, make_request("0", range(6 * 16 + 5)))
    hit, num_hit = manager.get_computed_blocks(make_request("1", range(6 * 16 + 5)))
    assert num_hit == 5 * 16
    assert [len(group) for group in hit.blocks] == [5, 5, 5]


@pytest.mark.parametrize(
    ("evicted", "num_hit"),
    [
        ([], 48),
        # Window groups need only the last two blocks.
        ([(1, 0), (2, 0)], 48),
        # Two blocks from the start are a window's tail too.
        ([(0, 2)], 32),
        ([(1, 2)], 32),
        ([(1, 1)], 16),
        ([(0, 0)], 0),
        ([(1, 1), (2, 0)], 0),
    ],
)
def test_hybrid_hits_what_all_groups_have(evicted: list[tuple[int, int]], num_hit: int) -> None:
    manager = hybrid(21)
    start(manager, make_request("0", COMMON + [3] * 7))
    tables = manager.get_blocks("0").blocks
    manager.evict_blocks(tables[group][i].block_id for group, i in evicted)
    assert manager.get_computed_blocks(make_request("1", COMMON + [4] * 5))[1] == num_hit


def test_mamba_align_in_a_hybrid() -> None:
    manager = make_manager(
        make_config(40, [full(), mamba(mamba_cache_mode="align")]), max_num_batched_tokens=64
    )
    request = make_request("0", range(100))
    for new in (32, 32, 32, 4):
        manager.new_step_starts()
        assert manager.allocate_slots(request, new) is not None
        request.num_computed_tokens += new
        manager.check_invariants()
    assert cached_indices(manager, request, 1) == {1, 3, 5}
    again = make_request("1", range(100))
    hit, num_hit = manager.get_computed_blocks(again)
    assert num_hit == 96
    assert [block.is_null for block in hit.blocks[1]] == [True] * 5 + [False]
    # The state was registered before this step began, so it may be read.
    manager.new_step_starts()
    assert manager.allocate_slots(again, 4, num_hit, hit) is not None
    manager.free(request)
    manager.free(again)
    manager.check_invariants()
    assert manager.block_pool.get_num_free_blocks() == 39


def test_mamba_hit_of_the_same_step_waits() -> None:
    manager = make_manager(make_config(40, [full(), mamba(mamba_cache_mode="align")]))
    manager.new_step_starts()
    start(manager, make_request("0", range(32)))
    again = make_request("1", range(40))
    hit, num_hit = manager.get_computed_blocks(again)
    assert num_hit == 32
    assert manager.allocate_slots(again, 8, num_hit, hit) is None
    manager.new_step_starts()
    assert manager.allocate_slots(again, 8, num_hit, hit) is not None


def test_new_blocks_of_a_step_are_zeroed_once() -> None:
    manager = make_manager(make_config(40, [full(), mamba()]))
    manager.new_step_starts()
    start(manager, make_request("0", range(20)))
    assert manager.take_step_work().new_block_ids == [1, 2, 3, 4]
    assert manager.take_step_work().new_block_ids == []


@pytest.mark.parametrize("specs", [[full()], [full(), mamba()]])
def test_new_blocks_that_nobody_asked_for_are_forgotten(specs: list[Any]) -> None:
    manager = make_manager(make_config(40, specs))
    start(manager, make_request("0", range(20)))
    manager.new_step_starts()
    assert manager.take_new_block_ids() == []


# ---- events ------------------------------------------------------------------------------------


def test_events_are_described_by_group() -> None:
    window = swa(sliding_window=32)
    manager = make_manager(make_config(9, [full(), window]), enable_kv_cache_events=True)
    start(manager, make_request("0", range(48)))
    stored = manager.take_events()
    assert [type(event) for event in stored] == [BlockStored, BlockStored]
    described = [
        (e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window)  # type: ignore[attr-defined]
        for e in stored
    ]
    assert described == [(0, "full_attention", None), (1, "sliding_window", 32)]
    manager.free(make_request("0", []))
    start(manager, make_request("1", range(100, 164)))
    assert sum(isinstance(e, BlockRemoved) for e in manager.take_events()) == 6


def test_an_unknown_group_is_passed_through(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[tuple[Any, ...]] = []

    class Logger:
        def warning(self, *args: Any) -> None:
            warnings.append(args)

    monkeypatch.setattr(kv_cache_manager, "logger", Logger())
    manager = one_group(enable_kv_cache_events=True)
    event = BlockStored([1], None, [1], 16, None, "GPU", None, group_idx=7)
    manager.block_pool.kv_event_queue.append(event)
    assert manager.take_events() == [event]
    assert event.kv_cache_spec_kind is None
    assert warnings == [("Group index `%s` not in KV cache metadata", 7)]


# ---- the rest ----------------------------------------------------------------------------------


def test_edges_of_a_step_do_nothing() -> None:
    manager = one_group()
    request = make_request("0", range(48))
    manager.new_step_starts()
    assert manager.coordinator.chunk_end(request, 33) == 33
    start(manager, request)
    manager.coordinator.commit_step()
    assert manager.take_step_work() == StepWork()
    assert manager.take_new_block_ids() == [1, 2, 3]
    assert manager.create_kv_cache_blocks(([],)) is manager.empty_kv_cache_blocks
    assert manager.get_blocks("none") is manager.empty_kv_cache_blocks
    assert ids(manager.get_blocks("0").blocks[0]) == [1, 2, 3]


def test_what_can_ever_fit() -> None:
    manager = one_group(max_model_len=320)
    assert manager.can_ever_fit(make_request("0", range(143)))
    assert not manager.can_ever_fit(make_request("1", range(144)))
    windowed = make_manager(make_config(6, [swa(sliding_window=32)]), max_num_batched_tokens=16)
    assert windowed.can_ever_fit(make_request("2", range(4000)))


def test_one_group_has_the_unitary_coordinator() -> None:
    manager = KVCacheManager(make_config(11, [full()]), 64, 16, 16, log_stats=True)
    assert isinstance(manager.coordinator, UnitaryKVCacheCoordinator)
    assert manager.prefix_cache_stats is not None


def test_hit_unit_chooses_the_coordinator() -> None:
    config = v4_config(32, 4000)
    assert config.hit_unit == 32
    manager = KVCacheManager(config, 2048, 32, 32)
    assert isinstance(manager.coordinator, CheckpointCoordinator)
    request = make_request("0", range(100), 32)
    hit, num_hit = manager.get_computed_blocks(request)
    assert num_hit == 0
    assert manager.allocate_slots(request, 100, 0, hit) is not None


def test_no_groups_at_all() -> None:
    manager = KVCacheManager(make_config(1, []), 64, 16, 16, enable_caching=False)
    request = make_request("0", range(20))
    hit, num_hit = manager.get_computed_blocks(request)
    assert num_hit == 0
    blocks = manager.allocate_slots(request, 20, 0, hit)
    assert blocks is not None
    assert blocks.get_block_ids() == ()
    assert manager.can_ever_fit(request)
    manager.free(request)


@pytest.mark.parametrize(("dcp", "pcp"), [(2, 1), (1, 2), (2, 2)])
def test_context_parallel_ranks_share_a_block(dcp: int, pcp: int) -> None:
    size = 16 * dcp * pcp
    manager = make_manager(
        make_config(40, [full()]),
        scheduler_block_size=size,
        hash_block_size=size,
        dcp_world_size=dcp,
        pcp_world_size=pcp,
    )
    request = make_request("0", range(3 * size + 1), size)
    blocks, _ = start(manager, request)
    assert blocks.get_block_ids() == ([1, 2, 3, 4],)
    manager.free(request)
    hit, num_hit = manager.get_computed_blocks(make_request("1", range(3 * size + 1), size))
    assert num_hit == 3 * size
    assert hit.get_block_ids() == ([1, 2, 3],)
