"""Where cached rows lie, for those who keep prefixes elsewhere. Nothing is held or changed."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.utils.hashing import BlockHash
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.pool.exports import PlacedCheckpoint, PrefixBlocks
from vllm.v1.core.prefix.prefix_index import PrefixIndex
from vllm.v1.core.values.hit import Checkpoint


def list_checkpoints(
    index: PrefixIndex, geometry: CacheGeometry, block_hashes: Sequence[BlockHash], end: int
) -> list[PlacedCheckpoint]:
    """Return the checkpoints in the first ``end`` tokens of a prompt, the first one first."""
    found = (index.checkpoints.get(key) for key in block_hashes[: end // geometry.unit])
    return [
        PlacedCheckpoint(record.position, record.standing, record.next_token)
        for record in found
        if record is not None and not record.is_partial
    ]


def locate_rows(
    index: PrefixIndex,
    geometry: CacheGeometry,
    block_hashes: Sequence[BlockHash],
    first: int,
    end: int,
    record: Checkpoint | None = None,
) -> PrefixBlocks | None:
    """Return where the dense rows of tokens ``[first, end)`` lie; None: not all are cached.

    Args:
        index: What is cached.
        geometry: The model's groups.
        block_hashes: Of the prompt, one for each unit.
        first: A boundary.
        end: A boundary above it.
        record: The checkpoint at ``end`` whose window rows are wanted, too.
    """
    bases = [0] * len(geometry.groups)
    ids: list[tuple[int, ...]] = [()] * len(geometry.groups)
    for group in geometry.dense:
        keys, size, ratio = index.keys[group.group_id], group.block_size, group.ratio
        low, high = first // ratio * ratio, end // ratio * ratio
        found = []
        for number in group.block_range(low, high):
            last = min((number + 1) * size, high)
            block = keys.get(block_hashes[last // geometry.unit - 1])
            if block is None:
                return None
            found.append(block.block_id)
        bases[group.group_id], ids[group.group_id] = low // size, tuple(found)
    if record is not None:
        for group, blocks in zip(geometry.windows, record.blocks, strict=True):
            bases[group.group_id] = group.rows_below(end).start
            ids[group.group_id] = tuple(block.block_id for block in blocks)
    next_token = None if record is None else record.next_token
    return PrefixBlocks(end, first, tuple(bases), tuple(ids), next_token)
