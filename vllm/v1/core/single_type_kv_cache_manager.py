"""A request's block tables, one per KV cache group: dense ones, and windows.

The managers that keep the tables of all requests of a group, as code written against the interface
knows them, are in ``vllm.v1.core.whole_block``; their names are here, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import count

from vllm.v1.core.geometry import GroupGeometry
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.whole_block.interface_only import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    MambaManager,
)
from vllm.v1.core.whole_block.manager_base import SingleTypeKVCacheManager
from vllm.v1.core.whole_block.managers import (
    FullAttentionManager,
    SinkFullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.core.whole_block.registration import (
    get_manager_for_kv_cache_spec,
    register_all_kvcache_specs,
)

__all__ = [
    "ChunkedLocalAttentionManager",
    "CrossAttentionManager",
    "DenseTable",
    "FullAttentionManager",
    "LiveWindow",
    "MambaManager",
    "SingleTypeKVCacheManager",
    "SinkFullAttentionManager",
    "SlidingWindowManager",
    "get_manager_for_kv_cache_spec",
    "register_all_kvcache_specs",
]


class DenseTable:
    """One request's blocks of a group that keeps every row.

    Owns: ``blocks``; block i covers tokens ``[i, i + 1) * block_size``.
    """

    __slots__ = ("blocks", "geometry")

    def __init__(self, geometry: GroupGeometry) -> None:
        self.geometry = geometry
        self.blocks: list[KVCacheBlock] = []

    def num_missing(self, alloc_end: int, num_adopted: int = 0) -> int:
        """Return the blocks to take so that rows of tokens below ``alloc_end`` have a slot."""
        missing = self.geometry.num_dense_blocks(alloc_end) - len(self.blocks) - num_adopted
        return missing if missing > 0 else 0

    def places(self) -> Iterator[tuple[int, KVCacheBlock]]:
        """Iterate over the blocks, each behind the first token that it covers."""
        return zip(count(0, self.geometry.block_size), self.blocks, strict=False)

    def capacity(self) -> int:
        """Return up to which position the rows of tokens have slots."""
        return len(self.blocks) * self.geometry.block_size + self.geometry.ratio - 1

    def blocks_below(self, ends: range) -> list[KVCacheBlock]:
        """Return for each position the block that holds the last row of the tokens below it."""
        blocks, block_size = self.blocks, self.geometry.block_size
        if ends.step == block_size:
            return blocks[(ends[0] - 1) // block_size : (ends[-1] - 1) // block_size + 1]
        return [blocks[(end - 1) // block_size] for end in ends]


class LiveWindow:
    """One request's live range of a group that needs only the tail.

    Owns: block ``base + i`` is ``blocks[i]``, the null block where nothing is stored; their ids,
    which the worker hears of whenever the table grows: a window may have hundreds.

    Attributes:
        is_dirty: Whether the worker has not seen the table as it is now.
    """

    __slots__ = ("_null_block", "_num_null", "base", "block_ids", "blocks", "geometry", "is_dirty")

    def __init__(self, geometry: GroupGeometry, null_block: KVCacheBlock) -> None:
        self.geometry = geometry
        self.base = 0
        self.blocks: list[KVCacheBlock] = []
        self.block_ids: list[int] = []
        self.is_dirty = True
        self._null_block = null_block
        self._num_null = 0

    def adopt(self, position: int, blocks: Sequence[KVCacheBlock]) -> None:
        """Begin with a checkpoint's blocks, already touched for the request."""
        assert not self.blocks
        span = self.geometry.rows_below(position)
        assert len(span) == len(blocks)
        self.base, self.blocks = span.start, list(blocks)
        self.block_ids = [block.block_id for block in blocks]

    def replace_last(self, block: KVCacheBlock) -> KVCacheBlock:
        """Put a block in the place of the last one; returns that."""
        replaced, self.blocks[-1] = self.blocks[-1], block
        self.block_ids[-1] = block.block_id
        self.is_dirty = True
        return replaced

    def drop_below(self, position: int) -> list[KVCacheBlock]:
        """Take out the blocks that going on at ``position`` does not need, the last one first."""
        # Where nothing is needed below the position, the whole table is below it.
        end = self.geometry.first_block(self.geometry.first_needed(position)) - self.base
        if end <= 0 or not self.blocks:
            return []
        end = min(end, len(self.blocks))
        # Between checkpoints far from each other most of a table is null.
        null_block = self._null_block
        dropped = [block for block in self.blocks[end - 1 :: -1] if block is not null_block]
        del self.blocks[:end], self.block_ids[:end]
        self._num_null -= end - len(dropped)
        self.base += end
        # The worker need not hear of it: it reads nothing below first_needed.
        return dropped

    def find_missing(self, needed: Sequence[int], adopted: range = range(0)) -> Sequence[int]:
        """Return which of the needed block indices are neither held nor about to be adopted."""
        if not self.blocks:
            return [i for i in needed if i not in adopted]
        if not self._num_null and needed and needed[0] >= self.base:
            return needed[bisect_left(needed, self.end) :]  # most times: nothing, or what is new
        return self.find_holes(needed)

    def find_holes(self, needed: Sequence[int]) -> list[int]:
        """Return which of the needed block indices have no block, by looking at each."""
        base, blocks, end = self.base, self.blocks, self.end
        return [i for i in needed if not (base <= i < end) or blocks[i - base].is_null]

    def insert(self, indices: Sequence[int], blocks: Sequence[KVCacheBlock]) -> None:
        """Place new blocks at ascending block indices, null blocks in between."""
        if not indices:
            return
        if not self.blocks:
            self.base = indices[0]
        below = self.base - indices[0]
        if below > 0:
            # Another boundary inside a chunk that is not computed yet.
            self._fill(0, below)
            self.base = indices[0]
        gap = indices[-1] + 1 - self.base - len(self.blocks)
        if gap > 0:
            self._fill(len(self.blocks), gap)
        block_ids = [block.block_id for block in blocks]
        begin, end = indices[0] - self.base, indices[-1] + 1 - self.base
        if end - begin == len(indices):
            self.blocks[begin:end], self.block_ids[begin:end] = blocks, block_ids
        else:
            for index, block, block_id in zip(indices, blocks, block_ids, strict=True):
                self.blocks[index - self.base] = block
                self.block_ids[index - self.base] = block_id
        # Where new blocks go there was none.
        self._num_null -= len(indices)
        self.is_dirty = True

    def _fill(self, at: int, count: int) -> None:
        """Make room that has no blocks yet."""
        self.blocks[at:at] = [self._null_block] * count
        self.block_ids[at:at] = [self._null_block.block_id] * count
        self._num_null += count

    def find_appended(self, end: int, alloc_end: int) -> range | None:
        """Return the block indices a short step appends.

        Args:
            end: Tokens computed when the step ends, drafts not counted.
            alloc_end: ``end`` with drafts and lookahead.

        Returns:
            None if the step would leave a hole, which ``find_missing`` can deal with.
        """
        if self.blocks and alloc_end <= self.capacity():
            return range(0)  # most groups, most times
        needed = self.geometry.block_range(self.geometry.first_needed(end), alloc_end)
        if not self.blocks or not needed:
            return needed
        held = self.base + len(self.blocks)
        return range(held, max(held, needed.stop)) if needed.start <= held else None

    def places(self) -> Iterator[tuple[int, KVCacheBlock]]:
        """Iterate over the blocks, each behind the first token of the whole block that it is of."""
        size, num_pieces = self.geometry.block_size, self.geometry.num_pieces
        for index, block in enumerate(self.blocks, self.base):
            yield index // num_pieces * size, block

    def capacity(self) -> int:
        """Return the position up to which the table has blocks; 0 for an empty table."""
        if not self.blocks:
            return 0
        num_pieces = self.base + len(self.blocks)
        return num_pieces // self.geometry.num_pieces * self.geometry.block_size

    @property
    def end(self) -> int:
        """The index behind the last block."""
        return self.base + len(self.blocks)

    def runs_below(
        self, positions: Sequence[int], num_blocks: int
    ) -> list[tuple[KVCacheBlock, ...]]:
        """Return for each position the last ``num_blocks`` blocks that lie below it, if so many."""
        blocks, base = self.blocks, self.base
        ends = self.geometry.first_blocks(positions)
        return [tuple(blocks[max(0, end - num_blocks) - base : end - base]) for end in ends]

    def blocks_for(self, position: int) -> tuple[KVCacheBlock, ...]:
        """Return the blocks a checkpoint at ``position`` needs; all are held."""
        span = self.geometry.rows_below(position)
        if not span:
            return ()
        found = tuple(self.blocks[span.start - self.base : span.stop - self.base])
        assert len(found) == len(span)
        return found
