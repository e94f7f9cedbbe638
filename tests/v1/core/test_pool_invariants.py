"""Each invariant of the pool can fail."""

from collections.abc import Callable

import pytest

from tests.v1.core.cache_helpers import make_config, make_manager, make_request, start
from tests.v1.core.specs import full
from vllm.exceptions import InvariantError
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId


def used_manager() -> KVCacheManager:
    manager = make_manager(make_config(8, [full()]))
    start(manager, make_request("0", range(40)))
    manager.check_invariants()
    return manager


def lose_a_hold(manager: KVCacheManager) -> None:
    manager.block_pool.blocks[1].ref_cnt += 1


def queue_a_held_block(manager: KVCacheManager) -> None:
    manager.block_pool.free_block_queue.append(manager.block_pool.blocks[1])


def lose_a_free_block(manager: KVCacheManager) -> None:
    manager.block_pool.free_block_queue.popleft()


def miscount(manager: KVCacheManager) -> None:
    queue = manager.block_pool.free_block_queue
    queue.fake_free_list_head.next_free_block = queue.fake_free_list_tail


def hash_the_null_block(manager: KVCacheManager) -> None:
    manager.block_pool.null_block.block_hash = BlockHashWithGroupId(b"x")


def lose_an_index_entry(manager: KVCacheManager) -> None:
    manager.block_pool.cached_block_hash_to_block._cache.popitem()


def lose_a_hash(manager: KVCacheManager) -> None:
    manager.block_pool.blocks[1].reset_hash()


@pytest.mark.parametrize(
    ("breach", "number"),
    [
        (lose_a_hold, "I2"),
        (queue_a_held_block, "I1"),
        (lose_a_free_block, "I1"),
        (miscount, "I3"),
        (hash_the_null_block, "I4"),
        (lose_an_index_entry, "I4"),
        (lose_a_hash, "I4"),
    ],
)
def test_a_breach_is_named(breach: Callable[[KVCacheManager], None], number: str) -> None:
    manager = used_manager()
    breach(manager)
    with pytest.raises(InvariantError, match=number):
        manager.check_invariants()
