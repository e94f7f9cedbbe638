"""KV events, written by themselves and by the index of units."""

from tests.v1.core.prefix.unit_caches import h, make_cache
from tests.v1.core.unit_cache_driver import make_manager, make_request
from tests.v1.core.v4_geometry import v4_config
from tests.v1.core.window_geometry import MISTRAL_LIKE, window_config
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, salt_digest
from vllm.v1.core.pool.events import KVEventWriter
from vllm.v1.core.values.hit import Checkpoint


def test_nothing_is_written_while_off() -> None:
    events = KVEventWriter(False)
    events.stored([h("a")], None, [1, 2], 2, 0)
    events.removed(h("a"), 0)
    events.cleared()
    assert events.take() == []


def test_events_come_in_order_and_once() -> None:
    events = KVEventWriter(True)
    events.stored([], None, [], 2, 0)
    events.stored([h("a")], None, [1, 2], 2, 3)
    events.removed(h("a"), 3)
    events.cleared()
    a = maybe_convert_block_hash(h("a"))
    stored, *rest = events.take()
    assert stored == BlockStored([a], None, [1, 2], 2, None, "GPU", None, group_idx=3)
    assert rest == [BlockRemoved([a], "GPU", 3), AllBlocksCleared()]
    assert events.take() == []


def test_a_reset_is_one_event_after_what_happened_before() -> None:
    cache = make_cache(9, [0, 1], events=True)
    pool = cache.pool
    blocks = pool.get_new_blocks(8)
    for i, block in enumerate(blocks):
        cache.add_key(block, i % 2, h(f"p{i}"))
    cache.index.events.stored([h("p0")], None, [1, 2], 2, 0)
    pool.free_blocks(blocks)
    pool.get_new_blocks(1)  # takes the first one's key away
    removed = BlockRemoved([maybe_convert_block_hash(h("p0"))], "GPU", 0)
    assert not pool.reset_prefix_cache()
    pool.free_blocks(blocks[:1])
    assert pool.reset_prefix_cache()
    stored, *rest = pool.take_events()
    assert isinstance(stored, BlockStored)
    assert rest == [removed, AllBlocksCleared()]
    assert pool.take_events() == []
    assert all(not keys for keys in cache.index.keys.values())


def test_a_checkpoint_beside_dense_rows_is_a_place_without_tokens() -> None:
    manager = make_manager(v4_config(32, 400), 1024, enable_kv_cache_events=True)
    request = make_request("r", range(130), 32)
    assert manager.allocate_slots(request, 130) is not None
    manager.coordinator.commit_step()
    stored = [e for e in manager.take_events() if isinstance(e, BlockStored)]
    places = [event for event in stored if event.kv_cache_spec_kind != "mla_attention"]
    assert {(e.block_size, len(e.token_ids), e.parent_block_hash) for e in places} == {(0, 0, None)}
    assert len({event.group_idx for event in places}) > 1


def test_a_checkpoint_without_dense_rows_names_the_tokens_from_the_one_before() -> None:
    config = window_config(16, 200, 64, MISTRAL_LIKE)
    manager = make_manager(config, 1024, enable_kv_cache_events=True)
    request = make_request("r", range(400), 16, cache_salt="secret")
    for start, end in ((0, 160), (160, 320), (320, 400)):
        request.num_computed_tokens = start
        assert manager.allocate_slots(request, end - start) is not None
        manager.coordinator.commit_step()
    stored = [e for e in manager.take_events() if isinstance(e, BlockStored)]
    by_parent = {event.parent_block_hash: event for event in stored}
    chain, parent = [], None
    while parent in by_parent:
        chain.append(by_parent[parent])
        (parent,) = chain[-1].block_hashes
    tokens = [token for event in chain for token in event.token_ids]
    assert tokens == list(range(len(tokens)))
    assert len(tokens) >= 384
    assert all(event.block_size == len(event.token_ids) > 0 for event in stored)
    assert chain[0].extra_keys == [(salt_digest("secret"),)]
    assert all(event.extra_keys is None for event in chain[1:])


def test_a_checkpoint_is_removed_in_the_groups_where_it_has_blocks() -> None:
    cache = make_cache(9, [0], [1, 2, 3], events=True)
    a, b = cache.pool.get_new_blocks(2)
    record = Checkpoint(h("p"), 32, ((a,), (), (b,)))
    cache.store.publish(record, "one")
    cache.store.dissolve(record)
    assert [event.group_idx for event in cache.pool.take_events()] == [1, 3]


def test_a_stored_event_names_a_salt_by_its_digest_beside_the_first_hash() -> None:
    manager = make_manager(v4_config(32, 400), 1024, enable_kv_cache_events=True)
    request = make_request("r", range(128), 32, cache_salt="secret")
    for start in (0, 64):
        request.num_computed_tokens = start
        assert manager.allocate_slots(request, 64) is not None
        manager.coordinator.commit_step()
    stored = [e for e in manager.take_events() if isinstance(e, BlockStored) and e.token_ids]
    salted = [event for event in stored if event.parent_block_hash is None]
    plain = [event for event in stored if event.parent_block_hash is not None]
    assert salted
    assert plain
    for event in salted:
        others = [None] * (len(event.block_hashes) - 1)
        assert event.extra_keys == [(salt_digest("secret"),), *others]
    assert any(len(event.block_hashes) > 1 for event in salted)
    assert all(event.extra_keys is None for event in plain)
