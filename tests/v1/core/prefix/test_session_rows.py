"""Dense rows of a session that is over go before all others, and no others with them."""

import random

from tests.v1.core.unit_cache_driver import coordinator_of, make_manager, make_request
from tests.v1.core.window_geometry import window_config
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.prefix.session_rows import SessionRows
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.request import Request
from vllm.v1.request_options import RequestOptions

UNIT = 16
NUM_BLOCKS = 60


def blocks_of(*keys: bytes | None) -> list[KVCacheBlock]:
    blocks = [KVCacheBlock(i) for i in range(len(keys))]
    for block, key in zip(blocks, keys, strict=True):
        block.key = key  # type: ignore[assignment]
    return blocks


def test_rows_are_a_sessions_own_until_another_uses_them() -> None:
    blocks = blocks_of(b"a", b"b", b"c", b"d", None)
    rows = SessionRows(blocks)
    rows.note_left(blocks[:3], 7)
    rows.note_hit(blocks[:2], 7)
    assert rows.list_own(7) == [blocks[2], blocks[1], blocks[0]]
    rows.note_hit(blocks[:1], 8)
    rows.note_hit(blocks[1:2], None)
    rows.note_left(blocks[:2], 7)
    assert rows.list_own(7) == [blocks[2]]
    assert rows.list_own(8) == []
    # What was there before a session came is not its own, and neither is a block without keys.
    rows.note_hit(blocks[3:], 7)
    rows.note_left(blocks[3:], 7)
    assert rows.list_own(7) == [blocks[2]]


def test_other_rows_in_a_block_are_known_anew_and_held_ones_stay() -> None:
    blocks = blocks_of(b"a", b"b")
    rows = SessionRows(blocks)
    rows.note_left(blocks, 7)
    blocks[0].key = b"x"  # type: ignore[assignment]
    blocks[1].ref_cnt = 1
    assert rows.list_own(7) == []
    rows.note_left(blocks[:1], 8)
    blocks[1].ref_cnt = 0
    assert (rows.list_own(7), rows.list_own(8)) == ([blocks[1]], [blocks[0]])
    rows.clear()
    assert rows.list_own(7) == []


def run(manager: KVCacheManager, name: str, tokens: list[int], session: str | None) -> Request:
    options = RequestOptions(session_id=session)
    request = make_request(name, tokens, UNIT, options=options)
    found = manager.look_up(request)
    manager.new_step_starts()
    num_new = request.num_tokens - found.num_tokens
    placed = manager.allocate_slots(request, num_new, found.num_tokens, found.blocks)
    assert placed is not None
    manager.coordinator.commit_step()
    request.num_computed_tokens = request.num_tokens
    manager.free(request)
    return request


def test_a_model_of_full_attention_gives_an_ended_session_up_first() -> None:
    rng = random.Random(46)

    def text(count: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(count)]

    manager = make_manager(window_config(UNIT, NUM_BLOCKS, 64, "ffff"), 512)
    pool = coordinator_of(manager).block_pool
    rules, one, two = text(4 * UNIT), text(6 * UNIT), text(6 * UNIT)
    old = run(manager, "old", text(8 * UNIT), None)
    first = run(manager, "first", rules + one, "one")
    second = run(manager, "second", rules + two, "two")
    again = run(manager, "again", rules + one + text(2 * UNIT), "one")
    session = first.session
    assert session is not None
    # Six blocks of its own and two of its second turn; the rules were another's too.
    num_ended = manager.coordinator.end_session(session)
    assert num_ended == manager.coordinator.end_session(session) == 8
    manager.check_invariants()
    spare = pool.tiers[Tier.SPARE].get_all_free_blocks()
    assert len(spare) == num_ended
    # Still hit as long as nothing else needs the room, and then the first to go.
    assert manager.look_up(again).num_tokens == again.num_tokens // UNIT * UNIT - UNIT
    num_scratch = pool.num_scratch_blocks
    taken = pool.get_new_blocks(num_scratch + num_ended)
    assert {b.block_id for b in spare} <= {b.block_id for b in taken}
    assert manager.look_up(again).num_tokens == len(rules)
    for request in (old, second):
        assert manager.look_up(request).num_tokens == request.num_tokens - UNIT
    pool.free_blocks(taken)
    manager.check_invariants()


def test_a_session_that_goes_on_has_its_rows_back() -> None:
    manager = make_manager(window_config(UNIT, NUM_BLOCKS, 64, "ffff"), 512)
    pool = coordinator_of(manager).block_pool
    tokens = [random.Random(1).randrange(1000) for _ in range(5 * UNIT)]
    request = run(manager, "one", tokens, "one")
    assert request.session is not None
    assert manager.coordinator.end_session(request.session) == 5
    run(manager, "two", [*tokens, *range(UNIT)], "one")
    assert pool.num_spare_blocks == 0
    assert manager.coordinator.end_session(request.session) == 6
