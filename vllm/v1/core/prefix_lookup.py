"""Looking a prompt up in the prefix cache, and saying why tokens missed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.retention import CacheGeometry, GroupGeometry
from vllm.v1.core.unit_block_pool import Checkpoint, UnitBlockPool

# Reasons of a miss, as they appear in metrics and in usage records.
FIRST_SEEN = "first_seen"
EVICTED = "evicted"
WINDOW_NOT_RETAINED = "window_not_retained"
WINDOW_EVICTED = "window_evicted"
ABOVE_LAST_BOUNDARY = "above_last_boundary"
DRAFTER = "drafter"
BYPASSED = "bypassed"
MISS_REASONS = (
    FIRST_SEEN,
    EVICTED,
    WINDOW_NOT_RETAINED,
    WINDOW_EVICTED,
    ABOVE_LAST_BOUNDARY,
    DRAFTER,
    BYPASSED,
)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Where a prompt can resume, and the blocks that make it possible.

    Attributes:
        position: Tokens that need not be computed: a boundary, or 0.
        full_blocks: Per dense group the blocks that lie wholly below ``position``.
        partial_blocks: Per dense group a block that holds the rows between the last full block
            and ``position``, with its key of the last of them; None where there are no such rows.
        checkpoint: The window rows; None when ``position`` is 0.
        dense_match: How far the dense groups alone matched, in tokens.
        lean_checkpoint: That of the lean boundary below ``position``, if it is another one.
        given_up: Deepest boundary that could have been resumed but for the drafter's rows; 0: none.
    """

    position: int
    full_blocks: tuple[list[KVCacheBlock], ...]
    partial_blocks: tuple[tuple[KVCacheBlock, BlockHash] | None, ...]
    checkpoint: Checkpoint | None
    dense_match: int
    lean_checkpoint: Checkpoint | None = None
    given_up: int = 0

    @classmethod
    def nothing(cls, num_dense_groups: int, dense_match: int = 0) -> "PrefixHit":
        """Return a hit of no token."""
        empty: tuple[list[KVCacheBlock], ...] = tuple([] for _ in range(num_dense_groups))
        return cls(0, empty, (None,) * num_dense_groups, None, dense_match)


def find_prefix(
    pool: UnitBlockPool,
    geometry: CacheGeometry,
    block_hashes: Sequence[BlockHash],
    max_tokens: int,
) -> PrefixHit:
    """Find the deepest boundary where all groups can resume.

    A unit counts while every dense group that stores a row at its end holds the key; of the units
    that count, the deepest boundary with a checkpoint wins.

    Args:
        pool: Where keys and checkpoints are.
        geometry: The model's groups.
        block_hashes: Chained hashes, one per unit.
        max_tokens: Upper bound of the hit.

    Returns:
        The hit. Cost: O(units matched). Takes no block.
    """
    unit = geometry.unit
    dense = geometry.dense
    checkpoints = pool.checkpoints
    num_units = min(len(block_hashes), max_tokens // unit)
    for group in dense:
        num_units = _count_matched(pool.index[group.group_id], group, block_hashes, num_units, unit)
    matched = num_units * unit
    best: Checkpoint | None = None
    for i in range(num_units - 1, -1, -1):
        best = checkpoints.get(block_hashes[i])
        if best is not None:
            break
    if best is None:
        return PrefixHit.nothing(len(dense), matched)
    full, partial = [], []
    for group in dense:
        blocks, tail = _blocks_below(pool, group, block_hashes, best.position, unit)
        full.append(blocks)
        partial.append(tail)
    lean = geometry.floor_lean(best.position)
    partner = checkpoints.get(block_hashes[lean // unit - 1]) if lean else None
    if partner is best:
        partner = None
    return PrefixHit(best.position, tuple(full), tuple(partial), best, matched, partner)


def _count_matched(
    index: Mapping[BlockHash, KVCacheBlock],
    group: GroupGeometry,
    block_hashes: Sequence[BlockHash],
    limit: int,
    unit: int,
) -> int:
    """Return how many of the first ``limit`` units a dense group has every row of."""
    step = max(1, group.ratio // unit)
    for i in range(step - 1, limit, step):
        if block_hashes[i] not in index:
            return i
    return limit


def _blocks_below(
    pool: UnitBlockPool,
    group: GroupGeometry,
    block_hashes: Sequence[BlockHash],
    position: int,
    unit: int,
) -> tuple[list[KVCacheBlock], tuple[KVCacheBlock, BlockHash] | None]:
    """Return the full blocks below a matched position, and the partly covered one."""

    def block_at(end: int) -> tuple[KVCacheBlock, BlockHash]:
        prefix_hash = block_hashes[end // unit - 1]
        block = pool.get_cached_block(prefix_hash, group.group_id)
        assert block is not None, "the walk saw this key"
        return block, prefix_hash

    size = group.block_size
    num_full = position // size
    full = [block_at((j + 1) * size)[0] for j in range(num_full)]
    last_row_end = position // group.ratio * group.ratio
    partial = block_at(last_row_end) if last_row_end > num_full * size else None
    return full, partial


def explain_misses(
    pool: UnitBlockPool,
    geometry: CacheGeometry,
    block_hashes: Sequence[BlockHash],
    num_tokens: int,
    hit: PrefixHit,
) -> dict[str, int]:
    """Give every missed token of a prompt one reason.

    Args:
        pool: Where keys, checkpoints and the memory of evicted ones are.
        geometry: The model's groups.
        block_hashes: Chained hashes of the prompt.
        num_tokens: Tokens of the prompt.
        hit: What the lookup found.

    Returns:
        Reason to tokens, zero entries left out; with ``hit.position`` they sum to ``num_tokens``.
    """
    reasons: dict[str, int] = {}
    last = geometry.floor_unit(num_tokens - 1)
    if num_tokens > last:
        reasons[ABOVE_LAST_BOUNDARY] = num_tokens - last
    resumable = max(hit.position, hit.given_up)
    if resumable > hit.position:
        reasons[DRAFTER] = resumable - hit.position
    window_missed = min(hit.dense_match, last) - resumable
    if window_missed > 0:
        first_unit = resumable // geometry.unit
        units = block_hashes[first_unit : hit.dense_match // geometry.unit]
        lost = any(h in pool.checkpoint_ghosts for h in units)
        reasons[WINDOW_EVICTED if lost else WINDOW_NOT_RETAINED] = window_missed
    dense_missed = last - max(hit.dense_match, hit.position)
    if dense_missed > 0:
        evicted = 0
        for i in range(hit.dense_match // geometry.unit, last // geometry.unit):
            if block_hashes[i] not in pool.ghosts and not _is_cached(pool, block_hashes[i]):
                break
            evicted += geometry.unit
        if evicted:
            reasons[EVICTED] = evicted
        if dense_missed > evicted:
            reasons[FIRST_SEEN] = dense_missed - evicted
    return reasons


def _is_cached(pool: UnitBlockPool, prefix_hash: BlockHash) -> bool:
    return any(pool.get_cached_block(prefix_hash, group_id) is not None for group_id in pool.index)
