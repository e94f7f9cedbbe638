"""Keys of whole blocks: the map, what a pool enters in it, and the events of that."""

from typing import Any

import msgspec
import pytest

from tests.v1.core.cache_helpers import make_request
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashListWithBlockSize,
    KVCacheBlock,
    init_none_hash,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
    salt_digest,
)
from vllm.v1.core.pool.hash_index import BlockHashToBlockMap


@pytest.fixture(autouse=True)
def _none_hash() -> None:
    init_none_hash(sha256)


def key(text: bytes, group: int = 0) -> Any:
    return make_block_hash_with_group_id(BlockHash(text), group)


def cache(pool: BlockPool, request: Any, blocks: Any, done: int, full: int, **kw: Any) -> None:
    pool.cache_full_blocks(
        **{
            "request": request,
            "blocks": blocks,
            "num_cached_blocks": done,
            "num_full_blocks": full,
            "block_size": 4,
            "kv_cache_group_id": 0,
            **kw,
        }
    )


# ---- BlockHashToBlockMap -----------------------------------------------------------------------


def test_map_one_block_per_key() -> None:
    index = BlockHashToBlockMap()
    assert not index
    block = KVCacheBlock(3)
    index.insert(key(b"a"), block)
    assert index._cache == {key(b"a"): block}
    assert index.get_one_block(key(b"a")) is block
    assert index.get_one_block(key(b"b")) is None
    assert index.pop(key(b"b"), 3) is None
    assert index.pop(key(b"a"), 4) is None
    assert len(index) == 1
    assert index.pop(key(b"a"), 3) is block
    assert len(index) == 0


def test_map_two_blocks_stay_a_dict() -> None:
    index = BlockHashToBlockMap()
    first, second = KVCacheBlock(1), KVCacheBlock(2)
    index.insert(key(b"a"), first)
    index.insert(key(b"a"), second)
    assert index._cache[key(b"a")] == {1: first, 2: second}
    assert len(index) == 1
    assert index.num_blocks() == 2
    assert index.get_one_block(key(b"a")) is first
    assert index.pop(key(b"a"), 9) is None
    assert index.pop(key(b"a"), 1) is first
    assert index._cache[key(b"a")] == {2: second}
    assert index.holds(key(b"a"), second)
    assert not index.holds(key(b"a"), first)
    assert index.pop(key(b"a"), 2) is second
    assert key(b"a") not in index._cache


# ---- entering blocks ---------------------------------------------------------------------------


def test_duplicates_leave_one_by_one() -> None:
    pool = BlockPool(4, True, 4)
    request = make_request("0", range(4), 4)
    first, second = pool.get_new_blocks(2)
    cache(pool, request, [first], 0, 1)
    cache(pool, request, [second], 0, 1)
    assert pool._maybe_evict_cached_block(first)
    assert pool.get_cached_block(request.block_hashes[0], [0]) == [second]


def test_mask_null_and_untouched_blocks() -> None:
    pool = BlockPool(8, True, 4)
    request = make_request("0", range(20), 4)
    real = pool.get_new_blocks(3)
    # What was done by earlier calls is not looked at, whatever it is.
    blocks: Any = [[], pool.null_block, *real]
    cache(pool, request, blocks, 1, 5, block_mask=[True, False, True, True])
    assert [block.block_hash is not None for block in real] == [False, True, True]
    assert pool.null_block.block_hash is None
    assert len(pool.cached_block_hash_to_block) == 2


def test_free_standing_blocks_can_be_cached() -> None:
    pool = BlockPool(3, True, 4)
    request = make_request("0", range(4), 4)
    block = KVCacheBlock(block_id=0)
    cache(pool, request, [block], 0, 1)
    assert pool.get_cached_block(request.block_hashes[0], [0]) == [block]


def test_coarser_blocks_view_the_hashes() -> None:
    pool = BlockPool(5, True, 2)
    request = make_request("0", range(8), 2)
    blocks = pool.get_new_blocks(2)
    cache(pool, request, blocks, 0, 2)
    view = BlockHashListWithBlockSize(request.block_hashes, 2, 4)
    assert blocks[1].block_hash == make_block_hash_with_group_id(view[1], 0)
    assert pool.get_cached_block(view[0], [0]) == [blocks[0]]


# ---- events ------------------------------------------------------------------------------------


def event_pool(num_blocks: int = 8) -> BlockPool:
    return BlockPool(num_blocks, True, 4, enable_kv_cache_events=True)


def test_no_events_when_off() -> None:
    pool = BlockPool(4, True, 4)
    request = make_request("0", range(4), 4)
    cache(pool, request, pool.get_new_blocks(1), 0, 1)
    assert pool.take_events() == []


def test_stored_event() -> None:
    pool = event_pool()
    request = make_request("0", range(10), 4)
    cache(pool, request, pool.get_new_blocks(2), 0, 2, kv_cache_group_id=3)
    (event,) = pool.take_events()
    assert event == BlockStored(
        block_hashes=[maybe_convert_block_hash(h) for h in request.block_hashes],
        parent_block_hash=None,
        token_ids=list(range(8)),
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None, None],
        group_idx=3,
    )
    assert pool.take_events() == []


def test_stored_event_with_a_null_parent() -> None:
    pool = event_pool()
    request = make_request("0", range(12), 4, cache_salt="salt")
    blocks = [pool.null_block, *pool.get_new_blocks(2)]
    cache(pool, request, blocks, 1, 3)
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    assert event.parent_block_hash == maybe_convert_block_hash(request.block_hashes[0])
    assert event.block_hashes == [maybe_convert_block_hash(h) for h in request.block_hashes[1:]]
    assert event.token_ids == list(range(4, 12))
    assert event.extra_keys == [None, None]


def test_a_masked_range_tells_of_each_unbroken_run_with_its_own_tokens_and_parent() -> None:
    pool = event_pool(12)
    lora = LoRARequest(lora_name="fr", lora_int_id=7, lora_path="/fr")
    request = make_request("0", range(24), 4, cache_salt="salt", lora_request=lora)
    mask = [True, False, True, True, False, False]
    cache(pool, request, pool.get_new_blocks(6), 0, 6, block_mask=mask, kv_cache_group_id=2)
    hashes = [maybe_convert_block_hash(h) for h in request.block_hashes]
    first = BlockStored(
        block_hashes=[hashes[0]],
        parent_block_hash=None,
        token_ids=list(range(4)),
        block_size=4,
        lora_id=7,
        medium="GPU",
        lora_name="fr",
        # The salt is a secret.
        extra_keys=[("fr", salt_digest("salt"))],
        group_idx=2,
    )
    second = msgspec.structs.replace(
        first,
        block_hashes=hashes[2:4],
        parent_block_hash=hashes[1],
        token_ids=list(range(8, 16)),
        extra_keys=[("fr",), ("fr",)],
    )
    assert pool.take_events() == [first, second]
    cache(pool, request, pool.get_new_blocks(3), 0, 3, block_mask=[False] * 3)
    assert pool.take_events() == []


def test_the_proposals_own_mask_of_two_far_blocks() -> None:
    pool = BlockPool(12, True, 8, enable_kv_cache_events=True)
    request = make_request("0", range(64), 8)
    mask = [i in (3, 7) for i in range(8)]
    pool.cache_full_blocks(request, pool.get_new_blocks(8), 0, 8, 8, 0, mask)
    events = [e for e in pool.take_events() if isinstance(e, BlockStored)]
    assert [e.token_ids for e in events] == [list(range(24, 32)), list(range(56, 64))]
    hashes = [maybe_convert_block_hash(h) for h in request.block_hashes]
    assert [(e.parent_block_hash, e.block_hashes) for e in events] == [
        (hashes[2], [hashes[3]]),
        (hashes[6], [hashes[7]]),
    ]


def test_stored_event_of_a_range_that_begins_masked() -> None:
    pool = event_pool()
    request = make_request("0", range(16), 4)
    blocks = pool.get_new_blocks(4)
    cache(pool, request, blocks, 1, 4, block_mask=[False, True, True])
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    assert event.parent_block_hash == maybe_convert_block_hash(request.block_hashes[1])
    assert event.block_hashes == [maybe_convert_block_hash(h) for h in request.block_hashes[2:]]
    assert event.token_ids == list(range(8, 16))


@pytest.mark.parametrize("mask", [None, [True] * 4])
def test_null_blocks_break_a_run_and_nothing_is_told_of_them(mask: list[bool] | None) -> None:
    pool = event_pool()
    request = make_request("0", range(16), 4)
    first, last = pool.get_new_blocks(2)
    cache(pool, request, [first, pool.null_block, pool.null_block, last], 0, 4, block_mask=mask)
    hashes = [maybe_convert_block_hash(h) for h in request.block_hashes]
    told = [
        (e.parent_block_hash, e.block_hashes, e.token_ids, e.extra_keys)
        for e in pool.take_events()
        if isinstance(e, BlockStored)
    ]
    assert told == [
        (None, [hashes[0]], list(range(4)), [None]),
        (hashes[2], [hashes[3]], list(range(12, 16)), [None]),
    ]


def test_removed_before_stored() -> None:
    pool = event_pool(3)
    request = make_request("0", range(8), 4)
    blocks = pool.get_new_blocks(2)
    cache(pool, request, blocks, 0, 2, kv_cache_group_id=1)
    pool.free_blocks(reversed(blocks))
    other = make_request("1", range(50, 58), 4)
    cache(pool, other, pool.get_new_blocks(2), 0, 2)
    stored, first, second, last = pool.take_events()
    assert isinstance(stored, BlockStored)
    for event, block_hash in ((first, request.block_hashes[1]), (second, request.block_hashes[0])):
        assert event == BlockRemoved([maybe_convert_block_hash(block_hash)], "GPU", group_idx=1)
    assert isinstance(last, BlockStored)


def test_views_follow_the_request_they_were_asked_for() -> None:
    pool = BlockPool(4, True, 2)
    first, second = make_request("0", range(16), 2), make_request("1", range(50, 66), 2)
    view = pool.hash_index.hashes_at(first.block_hashes, 4)
    assert pool.hash_index.hashes_at(first.block_hashes, 4) is view
    assert pool.hash_index.hashes_at(first.block_hashes, 2) is first.block_hashes
    assert list(view) == list(BlockHashListWithBlockSize(first.block_hashes, 2, 4))
    assert pool.hash_index.hashes_at(first.block_hashes, 8)[0] == b"".join(first.block_hashes[:4])
    assert list(pool.hash_index.hashes_at(second.block_hashes, 4)) == list(
        BlockHashListWithBlockSize(second.block_hashes, 2, 4)
    )
    # A view grows with its request.
    first.append_output_token_ids([1, 2, 3, 4])
    assert len(pool.hash_index.hashes_at(first.block_hashes, 4)) == 5
    assert pool.hash_index.hashes_at(first.block_hashes, 4)[4] == b"".join(first.block_hashes[8:10])
