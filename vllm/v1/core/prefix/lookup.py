"""Looking a prompt up in the cache of prefixes that hit at one unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.utils.hashing import BlockHash
from vllm.v1.core.geometry import CacheGeometry, GroupGeometry
from vllm.v1.core.prefix.prefix_index import PrefixIndex
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.values.hit import Checkpoint, PartialAdoption, PrefixHit

if TYPE_CHECKING:
    from vllm.v1.request import Request


def find_prefix(
    index: PrefixIndex,
    geometry: CacheGeometry,
    block_hashes: Sequence[BlockHash],
    max_tokens: int,
    output_from: int = 0,
) -> PrefixHit:
    """Find the deepest boundary where all groups can resume.

    A unit counts while every dense group that stores a row at its end holds the key; of the units
    that count, the deepest boundary with a checkpoint wins. Without windows there is nothing to
    check: the rows themselves are enough. Without dense groups the checkpoint is.

    Args:
        index: Where keys and checkpoints are.
        geometry: The model's groups.
        block_hashes: Chained hashes, one per unit.
        max_tokens: Upper bound of the hit.
        output_from: The first position that anything reads of all layers: far enough before it
            checkpoints are enough that lack the rows of some.

    Returns:
        The hit. Cost: O(units matched). Takes no block.
    """
    unit = geometry.unit
    dense = geometry.dense
    checkpoints = index.checkpoints
    num_units = min(len(block_hashes), max_tokens // unit)
    for group in dense:
        num_units = _count_matched(index.keys[group.group_id], group, block_hashes, num_units, unit)
    if not dense:
        # Nothing but the chain tells how far the prompt was seen before.
        num_units = _count_seen(index, block_hashes, num_units)
    if not num_units:
        return PrefixHit.nothing(len(dense))
    if not geometry.windows:
        position = geometry.floor_lean(num_units * unit) if dense else 0
        full, partial = find_dense_blocks(index, geometry, block_hashes, position)
        return PrefixHit(position, full, partial, None, position)
    matched = num_units * unit
    reach = geometry.lazy_reach
    is_short = reach > 0 and matched + reach > output_from
    if is_short and _find_parting(index, geometry, block_hashes, matched):
        # The next one that goes on as shortly needs the rows of all layers there: they are made.
        output_from = min(output_from, matched)
    best, passed = _find_checkpoint(checkpoints, block_hashes[:num_units], output_from - reach)
    if best is None:
        return PrefixHit.nothing(len(dense), matched, passed)
    full, partial = find_dense_blocks(index, geometry, block_hashes, best.position)
    lean = geometry.floor_lean(best.position)
    partner = checkpoints.get(block_hashes[lean // unit - 1]) if lean else None
    if partner is best:
        partner = None
    return PrefixHit(best.position, full, partial, best, matched, partner, passed=passed)


def _find_checkpoint(
    checkpoints: Mapping[BlockHash, Checkpoint],
    block_hashes: Sequence[BlockHash],
    partial_below: int,
) -> tuple[Checkpoint | None, Checkpoint | None]:
    """Return the deepest checkpoint of a prompt that will do, and the deepest partial one above.

    Args:
        checkpoints: By prefix.
        block_hashes: Of the prompt.
        partial_below: Before which position a partial one will do.
    """
    passed: Checkpoint | None = None
    for block_hash in reversed(block_hashes):
        record = checkpoints.get(block_hash)
        if record is None:
            continue
        if not record.is_partial or record.position < partial_below:
            return record, passed
        passed = passed or record
    return None, passed


def first_output(geometry: CacheGeometry, request: Request) -> int:
    """Return the first boundary from which a request needs the rows of all layers; 0: it does.

    A resend of its tokens resumes there, and others where it was asked to leave a checkpoint.
    """
    params = request.sampling_params
    if not geometry.lazy_reach or params is None or params.prompt_logprobs is not None:
        return 0
    asked = [
        p for p in (*request.options.cache_junctions, *request.cache_ttls) if p >= geometry.unit
    ]
    return geometry.floor_unit(min([request.num_tokens - 1, *asked]))


def _count_seen(index: PrefixIndex, block_hashes: Sequence[BlockHash], limit: int) -> int:
    """Return how many of the first ``limit`` units are in a chain that is cached."""
    parents = index.lineage.parents
    return next((i for i in range(limit) if block_hashes[i] not in parents), limit)


def find_dense_blocks(
    index: PrefixIndex, geometry: CacheGeometry, block_hashes: Sequence[BlockHash], position: int
) -> tuple[tuple[list[KVCacheBlock], ...], tuple[tuple[KVCacheBlock, BlockHash] | None, ...]]:
    """Return, per dense group, the full blocks below a matched position, and the partial one."""
    found = [
        _blocks_below(index, group, block_hashes, position, geometry.unit)
        for group in geometry.dense
    ]
    return tuple(full for full, _ in found), tuple(partial for _, partial in found)


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
    index: PrefixIndex,
    group: GroupGeometry,
    block_hashes: Sequence[BlockHash],
    position: int,
    unit: int,
) -> tuple[list[KVCacheBlock], tuple[KVCacheBlock, BlockHash] | None]:
    """Return the full blocks below a matched position, and the partly covered one."""

    # The walk saw all these keys.
    keys, size = index.keys[group.group_id], group.block_size
    num_full, step = position // size, size // unit
    full = [keys[h] for h in block_hashes[step - 1 : num_full * step : step]]
    last_row_end = position // group.ratio * group.ratio
    if last_row_end <= num_full * size:
        return full, None
    last_key = block_hashes[last_row_end // unit - 1]
    return full, (keys[last_key], last_key)


def hit_tables(
    geometry: CacheGeometry, hit: PrefixHit
) -> tuple[tuple[int, tuple[KVCacheBlock, ...]], ...]:
    """Return per group the index of its first block and all blocks that a hit stands on."""
    tables: list[tuple[int, tuple[KVCacheBlock, ...]]] = [(0, ())] * len(geometry.groups)
    for group, full, partial in zip(
        geometry.dense, hit.full_blocks, hit.partial_blocks, strict=True
    ):
        last = () if partial is None else (partial[0],)
        tables[group.group_id] = (0, (*full, *last))
    if hit.checkpoint is not None:
        for group, blocks in zip(geometry.windows, hit.checkpoint.blocks, strict=True):
            tables[group.group_id] = (group.rows_below(hit.position).start, blocks)
    return tuple(tables)


def dense_part(
    index: PrefixIndex,
    geometry: CacheGeometry,
    block_hashes: Sequence[BlockHash],
    hit: PrefixHit,
    end: int,
) -> PrefixHit:
    """Return a hit on the dense rows alone that a lookup matched below ``end``, a boundary."""
    position = min(geometry.floor_unit(hit.dense_match), end)
    full, partial = find_dense_blocks(index, geometry, block_hashes, position)
    return PrefixHit(position, full, partial, None, hit.dense_match)


def find_junction(
    index: PrefixIndex, geometry: CacheGeometry, block_hashes: Sequence[BlockHash], hit: PrefixHit
) -> int:
    """Return where a cached continuation parts from a prompt, in tokens; 0: nowhere."""
    return _find_parting(index, geometry, block_hashes, hit.dense_match)


def _find_parting(
    index: PrefixIndex, geometry: CacheGeometry, block_hashes: Sequence[BlockHash], matched: int
) -> int:
    num_units = matched // geometry.unit
    if num_units == 0:
        return 0
    following = block_hashes[num_units] if num_units < len(block_hashes) else None
    parts = index.lineage.has_other_continuation(block_hashes[num_units - 1], following)
    return matched if parts else 0


def plan_partials(
    index: PrefixIndex, hit: PrefixHit, *, copies_all: bool = False
) -> tuple[PartialAdoption, ...]:
    """Decide whether a hit's partly covered blocks are adopted or copied."""
    plans = []
    for i, entry in enumerate(hit.partial_blocks):
        if entry is None:
            continue
        block, last_key = entry
        keys = tuple(index.keys_of(block))
        below = keys[: keys.index(last_key) + 1]
        is_copy = copies_all or block.ref_cnt > 0 or len(keys) > len(below)
        plans.append(PartialAdoption(i, block, below, is_copy))
    return tuple(plans)
