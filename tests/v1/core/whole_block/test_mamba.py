"""State-space layers: one state per table, two steps of them in "align" mode."""

from typing import Any

import pytest

from tests.v1.core.cache_helpers import make_request
from tests.v1.core.specs import mamba
from tests.v1.core.whole_block.lookup_table import find, make_manager
from vllm.v1.core.block_pool import BlockPool

T, F = True, False


def held(manager: Any, request_id: str = "0") -> dict[int, int]:
    """Return block id by index, nulls left out."""
    table = manager.req_to_blocks[request_id]
    return {i: block.block_id for i, block in enumerate(table) if not block.is_null}


@pytest.mark.parametrize(
    ("is_cached", "per", "expected"),
    [
        ([], 1, 0),
        ([F, F], 1, 0),
        ([T, F, T, F], 1, 3),
        ([T, T, T, F], 2, 2),
        ([T, F, T], 2, 0),
        ([F, F, F, T], 2, 4),
    ],
)
def test_lookup(is_cached: list[bool], per: int, expected: int) -> None:
    manager, pool = make_manager(mamba(block_size=2))
    for drop in (False, True):
        found = find(manager, pool, is_cached, 1, drop, alignment_tokens=2 * per)
        assert len(found) == expected
        assert all(block.is_null for block in found[:-1])
        assert not expected or not found[-1].is_null


def test_drafts_get_blocks_of_their_own() -> None:
    manager, _ = make_manager(mamba(block_size=4, num_speculative_blocks=2))
    assert manager.get_num_blocks_to_allocate("0", 5, [], 0, 5) == 4
    assert len(manager.allocate_new_blocks("0", num_tokens=5, num_tokens_main_model=5)) == 4
    assert manager.get_num_skipped_tokens(5) == 4


def test_a_state_of_this_step_makes_its_reader_wait() -> None:
    manager, pool = make_manager(mamba(block_size=4))
    request = make_request("0", range(8), 4)
    manager.allocate_new_blocks("0", num_tokens=8, num_tokens_main_model=8)
    manager.req_to_blocks["0"][0] = pool.null_block
    manager.cache_blocks(request, 8)
    state = manager.req_to_blocks["0"][1]
    assert manager.cached_blocks_this_step == {state.block_hash}
    hit = [pool.null_block, state]
    assert manager.get_num_blocks_to_allocate("1", 9, hit, 8, 9) == pool.num_gpu_blocks + 1
    manager.new_step_starts()
    assert manager.get_num_blocks_to_allocate("1", 9, hit, 8, 9) == 1


def aligned(num_speculative_blocks: int = 0) -> tuple[Any, BlockPool]:
    return make_manager(
        mamba(
            block_size=4,
            mamba_cache_mode="align",
            num_speculative_blocks=num_speculative_blocks,
        )
    )


def step(manager: Any, num_computed: int, num_tokens: int, lookahead: int = 0) -> int:
    """Run one step's bookkeeping; return the blocks it took, checked against its sizing."""
    pool = manager.block_pool
    manager.remove_skipped_blocks("0", num_computed)
    before = pool.get_num_free_blocks()
    sized = manager.get_num_blocks_to_allocate(
        "0", num_tokens + lookahead, [], num_computed, num_tokens
    )
    manager.allocate_new_blocks(
        "0", num_tokens=num_tokens + lookahead, num_tokens_main_model=num_tokens
    )
    taken = before - pool.get_num_free_blocks()
    assert taken == sized
    return int(taken)


def test_align_holds_two_states() -> None:
    manager, pool = aligned()
    assert step(manager, 0, 12) == 1
    assert held(manager) == {2: 1}
    assert step(manager, 12, 24) == 1
    assert held(manager) == {2: 1, 5: 2}
    assert step(manager, 24, 36) == 1
    # The state of two steps ago was freed and, being scratch, reused at once.
    assert held(manager) == {5: 2, 8: 1}
    for num_computed in range(36, 44):
        step(manager, num_computed, num_computed + 1)
        # Two states in the step that begins a block, one while it fills.
        assert len(held(manager)) == (2 if num_computed % 4 == 0 else 1)
    assert list(held(manager)) == [10]
    manager.free("0")
    assert pool.get_num_free_blocks() == 99
    assert not manager._last_state_index
    assert not manager._running


def test_align_with_drafts() -> None:
    manager, _ = aligned(num_speculative_blocks=2)
    assert step(manager, 0, 8, lookahead=2) == 3
    assert list(held(manager)) == [1, 2, 3]
    # One block on: the first draft block becomes the state, one is added.
    assert step(manager, 8, 9, lookahead=2) == 1
    assert list(held(manager)) == [1, 2, 3, 4]
    # Far on: the draft blocks move along.
    drafts = set(list(held(manager).values())[2:])
    assert step(manager, 9, 24, lookahead=2) == 1
    table = held(manager)
    assert set(table) >= {2, 5, 6, 7}
    assert drafts <= set(table.values())
    # Fewer drafts: nothing to add, and nothing is taken back.
    assert step(manager, 24, 23) == 0


def test_align_ignores_lookahead() -> None:
    manager, _ = aligned()
    assert step(manager, 0, 8, lookahead=3) == 1
    assert list(held(manager)) == [1]


def test_align_adopts_a_hit_and_frees_it_later() -> None:
    manager, pool = aligned()
    (state,) = pool.get_new_blocks(1)
    pool.free_blocks([state])
    hit = [pool.null_block, state]
    assert manager.get_num_blocks_to_allocate("0", 20, hit, 8, 20) == 2
    manager.allocate_new_computed_blocks("0", hit, 8, 0)
    manager.allocate_new_blocks("0", num_tokens=20, num_tokens_main_model=20)
    assert list(held(manager)) == [1, 4]
    step(manager, 20, 21)
    # The hit's block was freed to the front and is the new state.
    assert list(held(manager)) == [4, 5]
    assert held(manager)[5] == state.block_id


def test_rejected_drafts_keep_the_state() -> None:
    manager, _ = make_manager(mamba(block_size=2, num_speculative_blocks=1))
    manager.allocate_new_blocks("0", num_tokens=6, num_tokens_main_model=6)
    manager.remove_skipped_blocks("0", 4)
    # Four computed, one of them perhaps rejected: the state after token 3 may be the last.
    assert list(held(manager)) == [1, 2, 3]


def test_align_keeps_the_state_before_a_rejected_draft() -> None:
    manager, _ = aligned(num_speculative_blocks=1)
    step(manager, 0, 8)
    # One token and one draft; the draft is rejected, so token 9 is computed and token 10 is not.
    step(manager, 8, 10)
    manager.remove_skipped_blocks("0", 9)
    assert next(iter(held(manager))) == 1
    manager.remove_skipped_blocks("0", 10)
    assert next(iter(held(manager))) == 2
