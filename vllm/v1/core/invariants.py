"""The numbered invariants of the KV cache, executable.

I1  free + held + null = total.
I2  A block's ref count is the number of tables, pending copies and transfers that hold it.
I3  A block is in exactly one free tier iff its ref count is 0 and it is not the null block: the
    tier of the best it serves. No more blocks are pinned than the cap allows.
I4  Keys, checkpoint records, pins and blocks agree both ways.
I5  A table covers every row in [first_needed(accepted), computed).

Checked after every step in tests and under ``VLLM_CHECK_INVARIANTS=1``; other code cites them as
``(I3)``. Cost: O(pool), so never in a serving path.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.exceptions import InvariantError
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.unit_block_pool import Tier

if TYPE_CHECKING:
    from vllm.v1.core.unit_block_pool import UnitBlockPool
    from vllm.v1.core.unit_coordinator import UnitKVCacheCoordinator


def _require(holds: bool, number: str, detail: str) -> None:
    if not holds:
        raise InvariantError(f"{number} does not hold: {detail}")


def check_unit_cache(
    coordinator: "UnitKVCacheCoordinator", num_computed: Mapping[str, int] | None = None
) -> None:
    """Check I1..I5 of a hybrid cache.

    Args:
        coordinator: The groups and their pool.
        num_computed: Accepted tokens by request, for I5; None leaves I5 out.

    Raises:
        InvariantError: Names the invariant and the block or request.
    """
    pool = coordinator.block_pool
    _check_counts(pool)
    _check_ref_counts(coordinator)
    _check_tiers(pool)
    _check_pins(pool)
    _check_keys(pool)
    _check_checkpoints(coordinator)
    if num_computed is not None:
        _check_coverage(coordinator, num_computed)


def _check_counts(pool: "UnitBlockPool") -> None:
    held = sum(block.ref_cnt > 0 for block in pool.blocks[1:])
    total = pool.get_num_free_blocks() + held + 1
    _require(
        total == pool.num_gpu_blocks,
        "I1",
        f"{pool.get_num_free_blocks()} free + {held} held + 1 null != {pool.num_gpu_blocks}",
    )


def _check_ref_counts(coordinator: "UnitKVCacheCoordinator") -> None:
    holds: Counter[int] = Counter()
    for group in coordinator.dense:
        for blocks in group.tables.values():
            holds.update(block.block_id for block in blocks)
    for window in coordinator.windows:
        for table in window.tables.values():
            holds.update(block.block_id for block in table.blocks if not block.is_null)
    holds.update(block.block_id for block in coordinator.copy_holds)
    for block in coordinator.block_pool.blocks[1:]:
        _require(
            block.ref_cnt == holds[block.block_id],
            "I2",
            f"block {block.block_id} counts {block.ref_cnt}, held {holds[block.block_id]} times",
        )


def _check_tiers(pool: "UnitBlockPool") -> None:
    seen: Counter[int] = Counter()
    for number, tier in enumerate(pool.tiers):
        queued = tier.get_all_free_blocks()
        _require(
            len(queued) == tier.num_free_blocks,
            "I3",
            f"tier {number} counts {tier.num_free_blocks} blocks, holds {len(queued)}",
        )
        for block in queued:
            seen[block.block_id] += 1
            placed = pool.tier_of(block)
            _require(
                placed is not None and int(placed) == number,
                "I3",
                f"block {block.block_id} stands in tier {number}, believed in {placed}",
            )
            best = _best_tier(pool, block)
            _require(
                placed is best,
                "I3",
                f"block {block.block_id} stands in {placed!r}, but serves what {best!r} is for",
            )
    _require(seen[0] == 0, "I3", "the null block stands in a tier")
    for block in pool.blocks[1:]:
        expected = 1 if block.ref_cnt == 0 else 0
        _require(
            seen[block.block_id] == expected,
            "I3",
            f"block {block.block_id} with ref count {block.ref_cnt} stands in "
            f"{seen[block.block_id]} tiers",
        )


def _best_tier(pool: "UnitBlockPool", block: KVCacheBlock) -> Tier:
    records = pool.records_of(block)
    if pool.pinned is not None and any(record in pool.pinned for record in records):
        return Tier.PINNED
    if pool.keys_of(block):
        return Tier.COLD if pool.is_on_trial(block) else Tier.REGULAR
    if any(not record.is_cold for record in records):
        return Tier.REGULAR
    return Tier.COLD if records else Tier.SCRATCH


def _check_pins(pool: "UnitBlockPool") -> None:
    pinned = pool.pinned
    if pinned is None:
        return
    holds: Counter[int] = Counter()
    for record in pinned:
        _require(
            pool.checkpoints.get(record.prefix_hash) is record,
            "I4",
            f"the record at {record.position} is pinned but withdrawn",
        )
        holds.update(block.block_id for block in record.all_blocks())
    _require(
        pinned.num_pins_by_block() == holds,
        "I4",
        f"pins cover the blocks {sorted(holds)}, believed are {sorted(pinned.num_pins_by_block())}",
    )
    _require(
        len(holds) <= pinned.max_blocks,
        "I3",
        f"{len(holds)} blocks are pinned, above the cap of {pinned.max_blocks}",
    )


def _check_keys(pool: "UnitBlockPool") -> None:
    for block in pool.blocks:
        for prefix_hash in pool.keys_of(block):
            _require(
                any(pool.holds_key(group_id, prefix_hash, block) for group_id in pool.index),
                "I4",
                f"block {block.block_id} carries a key that the index does not know",
            )
    num_carried = sum(len(pool.keys_of(block)) for block in pool.blocks)
    _require(
        num_carried == pool.num_index_entries(),
        "I4",
        f"blocks carry {num_carried} keys, the index holds {pool.num_index_entries()}",
    )


def _check_checkpoints(coordinator: "UnitKVCacheCoordinator") -> None:
    pool = coordinator.block_pool
    back: Counter[int] = Counter()
    for prefix_hash, record in pool.checkpoints.items():
        _require(
            record.prefix_hash == prefix_hash, "I4", f"a record at {record.position} is misfiled"
        )
        for window, blocks in zip(coordinator.windows, record.blocks, strict=True):
            geometry = window.geometry
            span = geometry.block_range(geometry.first_needed(record.position), record.position)
            _require(
                len(blocks) == len(span),
                "I4",
                f"the record at {record.position} holds {len(blocks)} blocks of group "
                f"{geometry.group_id}, needs {len(span)}",
            )
        for block in record.all_blocks():
            back[block.block_id] += 1
            _require(
                record in pool.records_of(block),
                "I4",
                f"block {block.block_id} does not know the record at {record.position}",
            )
    for block in pool.blocks:
        _require(
            len(pool.records_of(block)) == back[block.block_id],
            "I4",
            f"block {block.block_id} believes in {len(pool.records_of(block))} records",
        )


def _check_coverage(coordinator: "UnitKVCacheCoordinator", num_computed: Mapping[str, int]) -> None:
    for request_id, computed in num_computed.items():
        for group in coordinator.dense:
            table = group.tables.get(request_id, [])
            needed = group.geometry.num_dense_blocks(computed)
            _require(
                len(table) >= needed and not any(block.is_null for block in table),
                "I5",
                f"request {request_id} holds {len(table)} blocks of dense group "
                f"{group.geometry.group_id}, {computed} tokens need {needed}",
            )
        for window in coordinator.windows:
            geometry = window.geometry
            live = window.tables.get(request_id)
            for index in geometry.block_range(geometry.first_needed(computed), computed):
                held = (
                    live is not None
                    and 0 <= index - live.base < len(live.blocks)
                    and not live.blocks[index - live.base].is_null
                )
                _require(
                    held,
                    "I5",
                    f"request {request_id} at {computed} tokens lacks block {index} of window "
                    f"group {geometry.group_id}",
                )
