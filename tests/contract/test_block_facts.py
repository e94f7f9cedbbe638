"""Hashes, blocks, the free queue and the pool, sentence by sentence (sections 3 and 4)."""

import hashlib
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from tests.v1.core.cache_helpers import ids, make_request
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name, sha256, sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashListWithBlockSize,
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)


@pytest.fixture(autouse=True)
def _none_hash() -> None:
    init_none_hash(sha256)


def blocks_of(count: int, first: int = 0) -> list[KVCacheBlock]:
    return [KVCacheBlock(i) for i in range(first, first + count)]


# ---- 3.1 hash functions --------------------------------------------------------------------------


def test_digests() -> None:
    thing = (None, (1, 2), ("a",))
    pickled = pickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL)
    assert sha256(thing) == hashlib.sha256(pickled).digest()
    assert len(sha256_cbor(thing)) == 32
    assert sha256_cbor({"a": 1, "b": 2}) == sha256_cbor({"b": 2, "a": 1})


@pytest.mark.parametrize("name", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_hash_functions_have_names(name: str) -> None:
    hash_function = get_hash_fn_by_name(name)
    assert isinstance(hash_function((1, 2)), bytes)
    assert hash_function((1, 2)) == hash_function((1, 2)) != hash_function((1, 3))


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="md5"):
        get_hash_fn_by_name("md5")


@pytest.mark.parametrize("group_id", [0, 1, 256, 2**31])
def test_a_key_is_the_hash_and_the_group_in_four_bytes(group_id: int) -> None:
    key = make_block_hash_with_group_id(BlockHash(b"hash"), group_id)
    assert key == b"hash" + group_id.to_bytes(4, "big")
    assert (get_block_hash(key), get_group_id(key)) == (b"hash", group_id)


@pytest.mark.parametrize(("as_ints", "expected"), [(None, 0x1112), ("1", 0x1112), ("0", None)])
def test_hashes_of_events(
    as_ints: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", raising=False)
    if as_ints is not None:
        monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_ints)
    block_hash = BlockHash(b"\xff" * 24 + bytes(6) + b"\x11\x12")
    assert maybe_convert_block_hash(block_hash) == (block_hash if expected is None else expected)


def test_the_first_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    init_none_hash(sha256)
    first = kv_cache_utils.NONE_HASH
    init_none_hash(sha256)
    assert len(first) == len(kv_cache_utils.NONE_HASH) == 32
    assert first != kv_cache_utils.NONE_HASH
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    init_none_hash(sha256)
    assert sha256("7") == kv_cache_utils.NONE_HASH


def test_a_block_is_hashed_as_a_triple() -> None:
    parent = BlockHash(b"parent")
    assert hash_block_tokens(sha256, parent, [1, 2], ("x",)) == sha256((parent, (1, 2), ("x",)))
    none = kv_cache_utils.NONE_HASH
    assert hash_block_tokens(sha256, None, [1, 2]) == sha256((none, (1, 2), None))


def with_images(*items: tuple[str, int, int], **kw: Any) -> Any:
    features = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
        for name, offset, length in items
    ]
    return make_request("0", range(32), 8, mm_features=features, **kw)


@pytest.mark.parametrize(
    ("span", "start_index", "expected"),
    [
        ((0, 8), 0, ((("a", 2),), 1)),  # ends in the block: the index goes on
        ((8, 16), 1, ((("b", 2),), 1)),  # goes on behind it
        ((16, 24), 1, ((("b", -6),), 2)),
        ((24, 32), 2, (None, 2)),  # no overlap left
        ((16, 24), -1, ((("b", -6),), 2)),  # counts from the end
        ((0, 6), 0, ((("a", 2),), 1)),  # ends with the block
    ],
)
def test_items_of_a_block(span: tuple[int, int], start_index: int, expected: Any) -> None:
    request = with_images(("a", 2, 4), ("b", 10, 12))
    assert generate_block_hash_extra_keys(request, *span, start_index) == expected


def test_order_of_what_a_block_is_hashed_with() -> None:
    lora = SimpleNamespace(lora_name="adapter", name="adapter", adapter_id=1, lora_int_id=1)
    request = with_images(("a", 0, 4), cache_salt="salt")
    request.lora_request = lora
    keys, _ = generate_block_hash_extra_keys(request, 0, 8, 0)
    assert keys == ("adapter", ("a", 0), "salt")
    # The salt stands in the first block alone: the chain carries it on.
    assert generate_block_hash_extra_keys(request, 8, 16, 1)[0] == ("adapter",)


def test_without_items_the_index_stays() -> None:
    assert generate_block_hash_extra_keys(make_request("0", range(9), 4), 0, 4, 5) == (None, 5)


def test_a_hasher_goes_on_from_the_last_hash() -> None:
    hasher = get_request_block_hasher(4, sha256)
    request = make_request("0", range(11), 4)
    first, second = request.block_hashes
    assert second == hash_block_tokens(sha256, first, [4, 5, 6, 7])
    assert hasher(request) == []
    request.append_output_token_ids(11)
    assert request.block_hashes[2] == hash_block_tokens(sha256, second, [8, 9, 10, 11])


def test_hashes_of_larger_blocks() -> None:
    fine = [BlockHash(bytes([i])) for i in range(7)]
    view = BlockHashListWithBlockSize(fine, 4, 12)
    assert len(view) == 2
    assert list(view) == [b"\0\1\2", b"\3\4\5"]
    assert (view[1], view[0:2]) == (b"\3\4\5", [b"\0\1\2", b"\3\4\5"])


# ---- 3.2 blocks, 3.3 the free queue ------------------------------------------------------------


def test_blocks_have_slots_and_one_hash() -> None:
    block = KVCacheBlock(3)
    assert (block.block_id, block.ref_cnt, block.block_hash, block.is_null) == (3, 0, None, False)
    assert (block.prev_free_block, block.next_free_block) == (None, None)
    with pytest.raises(AttributeError):
        block.unknown = 1  # type: ignore[attr-defined]
    block.block_hash = BlockHashWithGroupId(b"key")
    with pytest.raises(AssertionError):
        block.block_hash = BlockHashWithGroupId(b"other")
    block.reset_hash()
    assert block.block_hash is None


def test_the_free_queues_ends() -> None:
    blocks = blocks_of(5)
    queue = FreeKVCacheBlockQueue(blocks[:2])
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    assert (head.block_id, tail.block_id) == (-1, -1)
    assert (head.next_free_block, tail.prev_free_block) == (blocks[0], blocks[1])
    assert queue.popleft_n(0) == []
    assert queue.popleft_n(2) == blocks[:2]
    assert all(b.prev_free_block is b.next_free_block is None for b in blocks[:2])
    assert (head.next_free_block, tail.prev_free_block) == (tail, head)
    with pytest.raises(ValueError, match="No free blocks available"):
        queue.popleft()
    with pytest.raises(RuntimeError):
        queue.remove(blocks[0])
    queue.append_n([])
    queue.append(blocks[0])
    queue.append_n(blocks[1:3])
    queue.prepend_n(blocks[4:5])
    queue.prepend_n(blocks[3:4])
    assert ids(queue.get_all_free_blocks()) == [3, 4, 0, 1, 2]
    queue.remove(blocks[0])
    assert (ids(queue.get_all_free_blocks()), queue.num_free_blocks) == ([3, 4, 1, 2], 4)
    tail.prev_free_block = None
    with pytest.raises(AssertionError):
        queue.append_n(blocks[:1])
    assert queue.num_free_blocks == 4


def test_blocks_put_first_keep_their_order() -> None:
    blocks = blocks_of(6)
    queue = FreeKVCacheBlockQueue(blocks[:4])
    queue.prepend_n(blocks[4:])
    assert ids(queue.get_all_free_blocks()) == [4, 5, 0, 1, 2, 3]


# ---- 4 the pool ----------------------------------------------------------------------------------


def test_blocks_of_one_key() -> None:
    index = BlockHashToBlockMap()
    key, other = BlockHashWithGroupId(b"k"), BlockHashWithGroupId(b"o")
    one, two = blocks_of(2, 1)
    assert (index.get_one_block(key), len(index)) == (None, 0)
    index.insert(key, one)
    assert index._cache == {key: one}
    index.insert(key, two)
    assert index._cache == {key: {1: one, 2: two}}
    assert index.get_one_block(key) is one
    assert (index.pop(other, 1), index.pop(key, 9), len(index)) == (None, None, 1)
    assert index.pop(key, 1) is one
    assert index._cache == {key: {2: two}}
    assert index.pop(key, 2) is two
    assert not index


def cached_pool() -> tuple[BlockPool, list[KVCacheBlock], Any]:
    pool = BlockPool(6, True, 4, enable_kv_cache_events=True)
    request = make_request("0", range(12), 4)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(
        request=request,
        blocks=blocks,
        num_cached_blocks=0,
        num_full_blocks=3,
        block_size=4,
        kv_cache_group_id=0,
        block_mask=[True, False, True],
    )
    return pool, blocks, request


def test_a_new_pool() -> None:
    pool = BlockPool(4, True, 16)
    assert ids(pool.blocks) == [0, 1, 2, 3]
    assert (pool.null_block.block_id, pool.null_block.is_null) == (0, True)
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [1, 2, 3]
    assert (pool.num_gpu_blocks, pool.hash_block_size, pool.enable_caching) == (4, 16, True)
    assert (pool.kv_event_queue, pool.metrics_collector, pool.get_usage()) == ([], None, 0.0)
    assert not pool.cached_block_hash_to_block


def test_taking_more_than_there_is() -> None:
    pool = BlockPool(4, True, 16)
    blocks = pool.get_new_blocks(2)
    assert [block.ref_cnt for block in blocks] == [1, 1]
    with pytest.raises(ValueError, match="2 free blocks"):
        pool.get_new_blocks(2)
    assert pool.get_num_free_blocks() == 1


def test_what_a_mask_leaves_out_is_not_cached() -> None:
    pool, blocks, request = cached_pool()
    first, second, third = request.block_hashes
    assert pool.get_cached_block(first, [0]) == [blocks[0]]
    assert pool.get_cached_block(second, [0]) is None
    assert pool.get_cached_block(third, [0]) == [blocks[2]]
    assert pool.get_cached_block(first, [0, 1]) is None
    assert blocks[1].block_hash is None


def test_losing_and_keeping_what_is_cached() -> None:
    pool, blocks, request = cached_pool()
    pool.free_blocks(reversed(blocks))
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [4, 5, 3, 2, 1]
    pool.touch([blocks[0]])
    assert (blocks[0].ref_cnt, pool.get_num_free_blocks()) == (1, 4)
    assert not pool.reset_prefix_cache()
    pool.take_events()
    assert pool._maybe_evict_cached_block(blocks[2])
    assert not pool._maybe_evict_cached_block(blocks[2])
    (event,) = pool.take_events()
    assert isinstance(event, BlockRemoved)
    assert pool.get_cached_block(request.block_hashes[2], [0]) is None
    pool.evict_blocks({blocks[0].block_id})
    assert pool.get_cached_block(request.block_hashes[0], [0]) is None
    # It is only un-cached.
    assert blocks[0].ref_cnt == 1
    pool.free_blocks([blocks[0]], prepend=True)
    assert ids(pool.free_block_queue.get_all_free_blocks())[0] == blocks[0].block_id
    pool.take_events()
    assert pool.reset_prefix_cache()
    assert pool.take_events() == [AllBlocksCleared()]
    assert pool.take_events() == []


def test_one_event_stands_for_a_run_with_its_logical_parent() -> None:
    pool, blocks, request = cached_pool()
    stored = pool.take_events()
    assert all(isinstance(event, BlockStored) for event in stored)
    first, third = stored
    assert (first.parent_block_hash, list(first.token_ids)) == (None, [0, 1, 2, 3])
    # Of the block that was left out: it is the parent though nothing holds it.
    assert third.parent_block_hash == maybe_convert_block_hash(request.block_hashes[1])
    assert (list(third.token_ids), third.group_idx, third.block_size) == ([8, 9, 10, 11], 0, 4)
    assert (third.kv_cache_spec_kind, third.kv_cache_spec_sliding_window) == (None, None)
    del blocks
