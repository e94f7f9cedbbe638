"""What the managers share: sizing that equals allocation, adoption, freeing."""

import random
from typing import Any

import pytest

from tests.v1.core.cache_helpers import ids, make_request
from tests.v1.core.specs import chunked, full, swa
from tests.v1.core.whole_block.lookup_table import find, make_manager
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    SingleTypeKVCacheManager,
    get_manager_for_kv_cache_spec,
)
from vllm.v1.kv_cache_interface import KVCacheSpec


def test_blocks_to_allocate_counts_evictable_hits() -> None:
    manager, pool = make_manager(full(block_size=2))
    hits = [KVCacheBlock(i + 1) for i in range(10)]
    assert manager.get_num_blocks_to_allocate("1", 40, hits, 0, 40) == 20
    mixed = [pool.null_block] * 5 + hits[:5]
    assert manager.get_num_blocks_to_allocate("2", 40, mixed, 0, 40) == 15
    for block in hits:
        block.ref_cnt = 1
    assert manager.get_num_blocks_to_allocate("3", 40, hits, 0, 40) == 10


def test_window_hit_counts_what_allocation_pulls() -> None:
    manager, pool = make_manager(swa(block_size=2, sliding_window=4))
    (hit,) = pool.get_new_blocks(1)
    pool.free_blocks([hit])
    before = pool.get_num_free_blocks()
    assert manager.get_num_blocks_to_allocate("1", 4, [hit], 2, 4) == 2
    manager.allocate_new_computed_blocks("1", [hit], 2, 0)
    assert len(manager.allocate_new_blocks("1", num_tokens=4, num_tokens_main_model=4)) == 1
    assert before - pool.get_num_free_blocks() == 2


@pytest.mark.parametrize(
    "spec",
    [
        full(block_size=2),
        swa(block_size=2, sliding_window=4),
        swa(block_size=2, sliding_window=9),
        chunked(block_size=2, attention_chunk_size=4),
    ],
)
def test_sizing_equals_allocation(spec: KVCacheSpec) -> None:
    rng = random.Random(0)
    for _ in range(200):
        manager, pool = make_manager(spec)
        num_hit_blocks = rng.randrange(8)
        cached = pool.get_new_blocks(num_hit_blocks)
        pool.free_blocks([block for block in cached if rng.random() < 0.5])
        num_skipped = max(manager.get_num_skipped_tokens(num_hit_blocks * 2), 0) // 2
        hits = [pool.null_block] * num_skipped + cached[num_skipped:]
        external = rng.randrange(6)
        total = num_hit_blocks * 2 + external
        num_tokens = total + rng.randrange(1, 9)
        before = pool.get_num_free_blocks()
        needed = manager.get_num_blocks_to_allocate("r", num_tokens, hits, total, num_tokens)
        manager.allocate_new_computed_blocks("r", hits, num_hit_blocks * 2, external)
        manager.allocate_new_blocks("r", num_tokens=num_tokens, num_tokens_main_model=num_tokens)
        assert before - pool.get_num_free_blocks() == needed
        assert len(manager.req_to_blocks["r"]) == -(-num_tokens // 2)
        # From now on the request is admitted: sizing is a subtraction, adoption does nothing.
        more = num_tokens + rng.randrange(9)
        before = pool.get_num_free_blocks()
        needed = manager.get_num_blocks_to_allocate("r", more, [], num_tokens, more)
        manager.allocate_new_computed_blocks("r", [], num_tokens, 0)
        manager.allocate_new_blocks("r", num_tokens=more, num_tokens_main_model=more)
        assert before - pool.get_num_free_blocks() == needed


def test_the_cap_applies_only_when_asked() -> None:
    manager, _ = make_manager(swa(block_size=16, sliding_window=64))
    manager.max_admission_blocks_per_request = 13
    assert manager.get_num_blocks_to_allocate("1", 1024, [], 0, 1024) == 64
    assert manager.get_num_blocks_to_allocate("1", 1024, [], 0, 1024, True) == 13


def test_adoption_pads_the_skipped_head() -> None:
    manager, pool = make_manager(swa(block_size=2, sliding_window=4))
    cached = pool.get_new_blocks(5)
    pool.free_blocks(cached)
    manager.allocate_new_computed_blocks("1", cached, 10, 3)
    # 13 tokens computed: 10 are skipped, so all hits are; blocks 5 and 6 are the connector's.
    table = manager.req_to_blocks["1"]
    assert [block.is_null for block in table] == [True] * 5 + [False] * 2
    assert manager.num_cached_block["1"] == 5
    assert [block.ref_cnt for block in cached] == [0] * 5


def test_no_caching_adopts_nothing() -> None:
    manager, pool = make_manager(full(block_size=2), enable_caching=False)
    with pytest.raises(AssertionError):
        manager.allocate_new_computed_blocks("1", pool.get_new_blocks(1), 2, 0)


def test_cache_blocks_judges_each_block_once() -> None:
    manager, _ = make_manager(swa(block_size=4, sliding_window=4), scheduler_block_size=16)
    request = make_request("0", range(40), 4)
    manager.allocate_new_blocks("0", num_tokens=40, num_tokens_main_model=40)
    manager.cache_blocks(request, 13)
    assert manager.num_cached_block["0"] == 3
    manager.cache_blocks(request, 11)
    assert manager.num_cached_block["0"] == 3
    manager.cache_blocks(request, 40)
    kept = [i for i, b in enumerate(manager.req_to_blocks["0"]) if b.block_hash is not None]
    assert kept == [3, 7]
    assert manager.num_cached_block["0"] == 10


def test_free_gives_the_tail_back_first() -> None:
    manager, pool = make_manager(full(block_size=2), num_blocks=6)
    manager.allocate_new_blocks("0", num_tokens=6, num_tokens_main_model=6)
    manager.free("0")
    manager.free("unknown")
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [4, 5, 3, 2, 1]
    assert not manager.req_to_blocks


def test_queries_create_no_tables() -> None:
    manager, _ = make_manager(full(block_size=2))
    manager.get_num_blocks_to_allocate("0", 4, [], 0, 4)
    manager.remove_skipped_blocks("0", 4)
    assert manager.get_num_common_prefix_blocks("0") == 0
    assert not manager.req_to_blocks


def test_new_block_ids_are_drained_per_step() -> None:
    manager, _ = make_manager(full(block_size=2))
    manager.allocate_new_blocks("0", num_tokens=4, num_tokens_main_model=4)
    assert manager.take_new_block_ids() == [1, 2]
    assert manager.take_new_block_ids() == []
    manager.allocate_new_blocks("0", num_tokens=6, num_tokens_main_model=6)
    manager.new_step_starts()
    assert manager.take_new_block_ids() == []


@pytest.mark.parametrize(("ranks", "most"), [(1, 13), (2, 7)])
def test_the_admission_cap_counts_blocks_of_all_ranks(ranks: int, most: int) -> None:
    spec = swa(block_size=16, sliding_window=64)
    manager = get_manager_for_kv_cache_spec(
        spec,
        max_num_batched_tokens=128,
        max_model_len=8192,
        block_pool=BlockPool(100, True, 16),
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=16 * ranks,
        dcp_world_size=ranks,
    )
    # 191 tokens at once, and the block that the window's first token is in.
    assert manager.get_num_blocks_to_allocate("0", 8000, [], 0, 8000, True) == most


class _ByTheInterface(SingleTypeKVCacheManager):
    """A kind from outside, which knows the interface's names alone."""

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *_: Any, **kw: Any
    ) -> tuple[list[KVCacheBlock], ...]:
        return tuple([kw["block_pool"].null_block] for _ in kv_cache_group_ids)


class _SilentKind(SingleTypeKVCacheManager):
    """It answers no lookup."""


def test_kinds_from_outside_answer_by_the_interfaces_name() -> None:
    spec, pool = full(block_size=2), BlockPool(5, True, 2)
    arguments: dict[str, Any] = {
        "block_pool": pool,
        "enable_caching": True,
        "kv_cache_group_id": 0,
        "scheduler_block_size": 2,
    }
    assert find(_ByTheInterface(spec, **arguments), pool, []) == [pool.null_block]
    silent = _SilentKind(spec, **arguments)
    assert len(silent.allocate_new_blocks("0", 4, 4)) == 2
    with pytest.raises(NotImplementedError, match="_SilentKind"):
        find(silent, pool, [])
