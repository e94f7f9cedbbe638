"""Prefixes that other engines read, and those they write here."""

from functools import partial

import pytest

from tests.v1.core.unit_cache_driver import coordinator_of, make_request
from tests.v1.core.v4_geometry import v4_config
from vllm.exceptions import InvariantError
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

UNIT = 32


def make_manager(num_blocks: int = 400) -> KVCacheManager:
    config = v4_config(UNIT, num_blocks)
    return KVCacheManager(config, 4096, UNIT, UNIT, max_num_batched_tokens=4096)


def compute(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> None:
    """Run a request's prompt in one step."""
    manager.new_step_starts()
    found = manager.look_up(request)
    rest = (num_tokens or request.num_tokens) - found.num_tokens
    assert manager.allocate_slots(request, rest, found.num_tokens, found.blocks) is not None
    manager.coordinator.commit_step()
    manager.take_step_work()
    request.num_computed_tokens = found.num_tokens + rest


def load(manager: KVCacheManager, request: Request, num_tokens: int) -> int:
    """Give a request the blocks of a prefix that is loaded; returns the local hit."""
    manager.new_step_starts()
    found = manager.look_up(request)
    blocks = manager.allocate_slots(
        request,
        0,
        found.num_tokens,
        found.blocks,
        num_external_computed_tokens=num_tokens - found.num_tokens,
        delay_cache_blocks=True,
    )
    assert blocks is not None
    manager.coordinator.commit_step()
    request.num_computed_tokens = num_tokens
    return found.num_tokens


def test_an_export_holds_its_blocks_until_it_is_released() -> None:
    manager = make_manager()
    request = make_request("a", range(300), UNIT)
    compute(manager, request)
    exported = manager.export_prefix("lease", request)
    assert exported is not None
    assert (exported.num_tokens, exported.dense_from) == (288, 0)
    assert exported.next_token == 288
    manager.free(request)
    pool = manager.block_pool
    held = {block_id for table in exported.block_ids for block_id in table}
    assert all(pool.blocks[block_id].ref_cnt == 1 for block_id in held)
    manager.check_invariants()
    # Whoever needs all blocks does not get these.
    other = make_request("b", range(1000, 1200), UNIT)
    compute(manager, other)
    manager.free(other)
    assert manager.release_export("lease")
    assert not manager.release_export("lease")
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    manager.check_invariants()
    # What was exported is still hit.
    assert manager.look_up(make_request("c", range(300), UNIT)).num_tokens == 288


def test_a_prompt_without_a_boundary_exports_nothing() -> None:
    manager = make_manager()
    request = make_request("a", range(UNIT), UNIT)
    compute(manager, request)
    assert manager.export_prefix("lease", request) is None
    manager.free(request)
    assert manager.usage == 0


def test_an_export_names_every_block_that_resuming_needs() -> None:
    manager = make_manager()
    request = make_request("a", range(300), UNIT)
    compute(manager, request)
    exported = manager.export_prefix("lease", request)
    assert exported is not None
    for group in coordinator_of(manager).geometry.groups:
        ids = exported.block_ids[group.group_id]
        base = exported.bases[group.group_id]
        if group.is_window:
            span = group.rows_below(exported.num_tokens)
            assert len(ids) == len(span)
            assert not span or base == span.start
        else:
            assert (base, len(ids)) == (0, group.num_dense_blocks(exported.num_tokens))
        assert 0 not in ids


def test_nothing_that_is_loaded_is_seen_before_it_came() -> None:
    manager = make_manager()
    request, twin = (make_request(name, range(300), UNIT) for name in "ab")
    assert load(manager, request, 288) == 0
    assert manager.take_step_work().window_tables == {}, "the worker does not know the request"
    assert manager.look_up(twin).num_tokens == 0
    manager.cache_blocks(request, 288)
    assert manager.look_up(twin).num_tokens == 288
    compute_rest(manager, request)
    manager.free(request)
    manager.check_invariants()
    assert manager.usage == 0


def compute_rest(manager: KVCacheManager, request: Request) -> None:
    """Go on behind what was loaded, in one step; the worker hears of the tables then."""
    manager.new_step_starts()
    rest = request.num_tokens - request.num_computed_tokens
    assert manager.allocate_slots(request, rest) is not None
    manager.coordinator.commit_step()
    tables = manager.take_step_work().window_tables
    assert request.request_id in tables
    request.num_computed_tokens += rest
    manager.check_invariants({request.request_id: request.num_computed_tokens})


def test_a_load_that_ends_early_leaves_nothing() -> None:
    manager = make_manager()
    request = make_request("a", range(300), UNIT)
    load(manager, request, 288)
    manager.free(request)
    manager.check_invariants()
    assert manager.usage == 0
    assert manager.look_up(make_request("b", range(300), UNIT)).num_tokens == 0


def test_dense_rows_that_are_here_are_not_asked_for() -> None:
    manager = make_manager()
    first = make_request("a", range(200), UNIT)
    compute(manager, first)
    manager.free(first)
    request = make_request("b", range(300), UNIT)
    num_local = load(manager, request, 288)
    wanted = manager.coordinator.find_import(request, 288, 288 - num_local)
    # All rows of the first prompt's units, wherever its checkpoints are.
    assert wanted.dense_from == 192
    shared = coordinator_of(manager).geometry.dense[0].group_id
    assert len(wanted.block_ids[shared]) == 3
    manager.cache_blocks(request, 288)
    compute_rest(manager, request)
    manager.free(request)
    manager.check_invariants()
    assert manager.usage == 0


def test_every_token_of_a_loaded_prompt_has_one_source() -> None:
    manager = make_manager()
    request = make_request("a", range(300), UNIT)
    manager.new_step_starts()
    found = manager.look_up(request)
    manager.allocate_slots(
        request, 0, 0, found.blocks, num_external_computed_tokens=288, delay_cache_blocks=True
    )
    record = manager.record_admission(request, found, 288)
    assert record.num_cached_tokens == 288
    assert record.miss_tokens == {"above_last_boundary": 12}


def test_what_nothing_is_cached_in_is_not_exported() -> None:
    manager = make_manager()
    blocks = manager.block_pool.get_new_blocks(2)
    with pytest.raises(
        InvariantError, match=f"block {blocks[0].block_id} is exported, and nothing"
    ):
        manager.coordinator.exports.hold("lease", [blocks])
    assert len(manager.coordinator.exports) == 0
    assert [block.ref_cnt for block in blocks] == [1, 1]


def test_a_block_that_was_given_back_while_it_was_read_is_noticed() -> None:
    manager = make_manager()
    request = make_request("a", range(300), UNIT)
    compute(manager, request)
    exported = manager.export_prefix("lease", request)
    assert exported is not None
    manager.free(request)
    block = manager.block_pool.blocks[exported.block_ids[0][0]]
    manager.block_pool.free_blocks([block])
    with pytest.raises(InvariantError, match=f"block {block.block_id} was given back while"):
        manager.release_export("lease")


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_loaded_belongs_to_one_request_from_first_to_last(when: str) -> None:
    manager = make_manager()
    request = make_request("a", range(300), UNIT)
    load(manager, request, 288)
    coordinator = coordinator_of(manager)
    block = coordinator.requests["a"].windows[-2].blocks[-1]
    if when == "after":
        assert manager.coordinator.find_import(request, 288, 288).num_tokens == 288
    manager.block_pool.touch([block])
    checks = {
        "before": partial(manager.coordinator.find_import, request, 288, 288),
        "after": partial(manager.cache_blocks, request, 288),
    }
    with pytest.raises(InvariantError, match=f"I2 .*block {block.block_id}, into which request a"):
        checks[when]()
    manager.block_pool.free_blocks([block])
    manager.cache_blocks(request, 288)
    assert manager.look_up(make_request("b", range(300), UNIT)).num_tokens == 288
