"""The numbered invariants of the KV cache, executable.

I1  free + held + null = total.
I2  A block's ref count is the number of tables, pending copies and transfers that hold it: nothing
    is given back more often than it was taken. The null block is not counted.
I3  A block is in exactly one free tier iff its ref count is 0 and it is not the null block: the
    tier of the best it serves. No more blocks are pinned than the cap allows.
I4  Keys, checkpoint records, pins, claims and blocks agree both ways.
I5  A table covers every row in [first_needed(accepted), computed).

Checked after every step in tests and under ``VLLM_CHECK_INVARIANTS=1``; other code cites them as
``(I3)``. Cost: O(pool), so never in a serving path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm.exceptions import InvariantError
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.free_block_queue import KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import TieredPool
    from vllm.v1.core.coordinator_interface import Coordinator


def _broken(number: str, detail: str) -> InvariantError:
    return InvariantError(f"{number} does not hold: {detail}")


def check_cache(coordinator: Coordinator, num_computed: Mapping[str, int] | None = None) -> None:
    """Check I1..I5.

    Args:
        coordinator: The groups and their pool.
        num_computed: Accepted tokens by request, for I5; None leaves I5 out.

    Raises:
        InvariantError: Names the invariant and the block or request.
    """
    check_pool(coordinator.block_pool, coordinator.held_blocks())
    for number, fault in coordinator.find_faults(num_computed or {}):
        raise _broken(number, fault)


def check_pool(pool: TieredPool, held: Iterable[KVCacheBlock]) -> None:
    """Check I1..I4.

    Args:
        pool: The pool.
        held: Blocks of all tables and copies over it, once per hold.

    Raises:
        InvariantError: Names the invariant and the block.
    """
    _check_ref_counts(pool, Counter(block.block_id for block in held if not block.is_null))
    _check_tiers(pool)
    for fault in pool.index.find_faults(pool.blocks):
        raise _broken("I4", fault)
    for fault in pool.claims.find_faults():
        raise _broken("I4", fault)
    for block in filter(pool.claims.holds, pool.blocks):
        if block.ref_cnt == 0 and not pool.index.is_cached(block):
            raise _broken("I4", f"block {block.block_id} is claimed, and nothing is cached in it")
    if pool.pins is not None:
        for fault in pool.pins.find_faults():
            raise _broken("I4", fault)
        for block in filter(pool.pins.holds, pool.blocks):
            if not pool.index.is_cached(block):
                detail = f"block {block.block_id} is pinned, and nothing is cached in it"
                raise _broken("I4", detail)
        if pool.pins.num_blocks > pool.pins.max_blocks:
            num_pinned, cap = pool.pins.num_blocks, pool.pins.max_blocks
            raise _broken("I3", f"{num_pinned} blocks are pinned, above the cap of {cap}")


# Most blocks of most pools are free and serve nothing, and tests check a pool after every step:
# the loops put nothing into words but a fault.


def _check_ref_counts(pool: TieredPool, holds: Counter[int]) -> None:
    if num_null := pool.null_block.ref_cnt:
        raise _broken("I2", f"the null block counts {num_null}, and is never counted")
    num_held_by_model = 0
    counts = {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt}
    for block_id in counts.keys() | holds.keys():
        count, num_held = counts.get(block_id, 0), holds[block_id]
        if count == num_held:
            continue
        if num_held or count != 1 or num_held_by_model == pool.num_reserved_blocks:
            raise _broken("I2", f"block {block_id} counts {count}, held {num_held} times")
        num_held_by_model += 1
    num_free = sum(queue.num_free_blocks for queue in dict.fromkeys(pool.tiers))
    num_held_blocks = len(holds) + num_held_by_model
    if num_free + num_held_blocks + 1 != pool.num_gpu_blocks:
        detail = f"{num_free} free + {num_held_blocks} held + 1 null != {pool.num_gpu_blocks}"
        raise _broken("I1", detail)
    if num_free != (num_counted := pool.get_num_free_blocks()):
        raise _broken("I1", f"the pool counts {num_counted} free blocks, its tiers {num_free}")


def _check_tiers(pool: TieredPool) -> None:
    seen: Counter[int] = Counter()
    may_be_kept = pool.pins is not None or len(pool.claims) > 0
    find_tier = pool.index.tier
    for queue in dict.fromkeys(pool.tiers):
        queued = queue.get_all_free_blocks()
        if len(queued) != queue.num_free_blocks:
            detail = f"a tier counts {queue.num_free_blocks} blocks, holds {len(queued)}"
            raise _broken("I3", detail)
        seen.update([block.block_id for block in queued])
        for block in queued:
            placed = pool.tier_of(block)
            if placed is None or pool.tiers[placed] is not queue:
                detail = f"block {block.block_id} is believed in tier {placed!r}, stands elsewhere"
                raise _broken("I3", detail)
            best = _best_tier(pool, block) if may_be_kept else find_tier(block)
            if pool.tiers[best] is not queue:
                detail = f"block {block.block_id} stands in {placed!r}, but serves {best!r}"
                raise _broken("I3", detail)
    if seen[0]:
        raise _broken("I3", "the null block stands in a tier")
    find_seen = seen.get
    for block in pool.blocks[1:]:
        if find_seen(block.block_id, 0) != (block.ref_cnt == 0):
            num_tiers = seen[block.block_id]
            detail = f"block {block.block_id} with ref count {block.ref_cnt} stands in {num_tiers}"
            raise _broken("I3", f"{detail} tiers")


def _best_tier(pool: TieredPool, block: KVCacheBlock) -> Tier:
    if pool.pins is not None and pool.pins.holds(block):
        return Tier.PINNED
    return Tier.CLAIMED if pool.claims.holds(block) else pool.index.tier(block)
