"""The invariants I1..I4 of ``vllm/v1/core/invariants.py`` for the pool of whole-block hits.

Cost: O(pool), so never in a serving path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.exceptions import InvariantError

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


def _require(holds: bool, number: str, detail: str) -> None:
    if not holds:
        raise InvariantError(f"{number} does not hold: {detail}")


def check_pool(pool: BlockPool, tables: Iterable[Sequence[KVCacheBlock]]) -> None:
    """Check I1..I4.

    Args:
        pool: The pool.
        tables: All block tables over it, of all groups and requests.

    Raises:
        InvariantError: Names the invariant and the block.
    """
    holds = Counter(block.block_id for table in tables for block in table if not block.is_null)
    _check_ref_counts(pool, holds)
    _check_free_queue(pool)
    _check_index(pool)


def _check_ref_counts(pool: BlockPool, holds: Counter[int]) -> None:
    num_held_by_model = 0
    for block in pool.blocks[1:]:
        num_held = holds[block.block_id]
        if num_held == 0 and block.ref_cnt == 1 and num_held_by_model < pool.num_reserved_blocks:
            num_held_by_model += 1
            continue
        _require(
            block.ref_cnt == num_held,
            "I2",
            f"block {block.block_id} counts {block.ref_cnt}, held {num_held} times",
        )
    num_held_blocks = len(holds) + num_held_by_model
    _require(
        pool.get_num_free_blocks() + num_held_blocks + 1 == pool.num_gpu_blocks,
        "I1",
        f"{pool.get_num_free_blocks()} free + {num_held_blocks} held + 1 null != "
        f"{pool.num_gpu_blocks}",
    )


def _check_free_queue(pool: BlockPool) -> None:
    queued = pool.free_block_queue.get_all_free_blocks() + _check_pinned(pool)
    _require(
        len(queued) == pool.get_num_free_blocks(),
        "I3",
        f"the queue counts {pool.get_num_free_blocks()} blocks, holds {len(queued)}",
    )
    ids = Counter(block.block_id for block in queued)
    _require(0 not in ids, "I3", "the null block stands in the free queue")
    for block in pool.blocks[1:]:
        expected = 1 if block.ref_cnt == 0 else 0
        _require(
            ids[block.block_id] == expected,
            "I3",
            f"block {block.block_id} with ref count {block.ref_cnt} stands in the queue "
            f"{ids[block.block_id]} times",
        )


def _check_pinned(pool: BlockPool) -> list[KVCacheBlock]:
    """Check the pinned tier, if there is one; return the blocks that stand in it."""
    tier = pool.pinned
    if tier is None:
        return []
    queued = tier.queue.get_all_free_blocks()
    pinned = tier.pinned_blocks()
    free_pinned = {block.block_id for block in pinned if block.ref_cnt == 0}
    _require(
        free_pinned == {block.block_id for block in queued} == tier.free_block_ids(),
        "I3",
        f"of the pinned blocks {sorted(free_pinned)} are free, the pinned queue holds "
        f"{sorted(block.block_id for block in queued)}",
    )
    _require(
        len(pinned) <= tier.max_pinned,
        "I3",
        f"{len(pinned)} blocks are pinned, above the cap of {tier.max_pinned}",
    )
    for block in pinned:
        _require(
            block.block_hash is not None and not block.is_null,
            "I3",
            f"block {block.block_id} is pinned without a hash",
        )
    return queued


def _check_index(pool: BlockPool) -> None:
    num_hashed = 0
    for block in pool.blocks:
        if block.block_hash is None:
            continue
        num_hashed += 1
        _require(not block.is_null, "I4", "the null block has a hash")
        _require(
            pool.cached_block_hash_to_block.holds(block.block_hash, block),
            "I4",
            f"block {block.block_id} has a hash under which the index does not know it",
        )
    num_indexed = pool.cached_block_hash_to_block.num_blocks()
    _require(
        num_indexed == num_hashed,
        "I4",
        f"the index holds {num_indexed} blocks, {num_hashed} have a hash",
    )
