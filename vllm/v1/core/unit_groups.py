"""One group's block tables: dense ones grow, window ones slide."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.retention import GroupGeometry
from vllm.v1.core.unit_block_pool import UnitBlockPool


class DenseGroup:
    """Block tables of a group that keeps every row.

    Owns: request id -> blocks, block i covering tokens ``[i, i + 1) * block_size``.
    """

    def __init__(self, geometry: GroupGeometry, pool: UnitBlockPool) -> None:
        self.geometry = geometry
        self._pool = pool
        self.tables: dict[str, list[KVCacheBlock]] = {}

    def num_missing(self, request_id: str, alloc_end: int, num_adopted: int) -> int:
        """Return the blocks to take so that rows of tokens below ``alloc_end`` have a slot."""
        held = len(self.tables.get(request_id, ())) + num_adopted
        return max(0, self.geometry.num_dense_blocks(alloc_end) - held)

    def capacity(self, request_id: str) -> int:
        """Return up to which position the rows of tokens have slots."""
        held = len(self.tables.get(request_id, ()))
        return held * self.geometry.block_size + self.geometry.ratio - 1

    def adopt(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """Begin a request's table with blocks already touched for it."""
        assert request_id not in self.tables
        self.tables[request_id] = list(blocks)

    def extend(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """Append new blocks."""
        self.tables.setdefault(request_id, []).extend(blocks)

    def blocks_below(self, request_id: str, ends: Iterable[int]) -> list[KVCacheBlock]:
        """Return for each position the block that holds the last row of the tokens below it."""
        table, block_size = self.tables[request_id], self.geometry.block_size
        return [table[(end - 1) // block_size] for end in ends]

    def free(self, request_id: str) -> None:
        """Give all blocks back, a sequence's tail before its head."""
        self._pool.free_blocks(reversed(self.tables.pop(request_id, [])))


@dataclass(slots=True)
class WindowBlocks:
    """The live range of one request: block ``base + i`` is ``blocks[i]``, null where not stored."""

    base: int = 0
    blocks: list[KVCacheBlock] = field(default_factory=list)
    # Whether the worker has not seen the table as it is now.
    is_dirty: bool = True


class WindowGroup:
    """Block tables of a group that needs only the tail.

    Owns: request id -> live range of blocks.
    """

    def __init__(self, geometry: GroupGeometry, pool: UnitBlockPool) -> None:
        self.geometry = geometry
        self._pool = pool
        self.tables: dict[str, WindowBlocks] = {}

    def adopt(self, request_id: str, position: int, blocks: Sequence[KVCacheBlock]) -> None:
        """Begin a request's table with a checkpoint's blocks, already touched for it."""
        assert request_id not in self.tables
        span = self.geometry.block_range(self.geometry.first_needed(position), position)
        assert len(span) == len(blocks)
        self.tables[request_id] = WindowBlocks(span.start, list(blocks))

    def replace_last(self, request_id: str, block: KVCacheBlock) -> KVCacheBlock:
        """Put a block in the place of a request's last one; returns that."""
        table = self.tables[request_id]
        replaced, table.blocks[-1] = table.blocks[-1], block
        table.is_dirty = True
        return replaced

    def drop_below(self, request_id: str, position: int, *, shallow_first: bool = False) -> None:
        """Give back the blocks that going on at ``position`` does not need.

        Args:
            request_id: The request.
            position: Where it goes on.
            shallow_first: Whether those of the prompt's beginning are reused first.
        """
        table = self.tables.get(request_id)
        if table is None or not table.blocks:
            return
        # Where nothing is needed below the position, the whole table is below it.
        end = self.geometry.first_needed(position) // self.geometry.block_size - table.base
        if end <= 0:
            return
        end = min(end, len(table.blocks))
        dropped = table.blocks[:end]
        self._pool.free_blocks(dropped if shallow_first else reversed(dropped))
        del table.blocks[:end]
        table.base += end
        # The worker need not hear of it: it reads nothing below first_needed.

    def find_missing(self, request_id: str, needed: Sequence[int], adopted: range) -> list[int]:
        """Return which of the needed block indices the request does not hold yet."""
        table = self.tables.get(request_id)
        if table is None:
            return [i for i in needed if i not in adopted]
        base, blocks = table.base, table.blocks
        end = base + len(blocks)
        return [i for i in needed if not (base <= i < end) or blocks[i - base].is_null]

    def insert(
        self, request_id: str, indices: Sequence[int], blocks: Sequence[KVCacheBlock]
    ) -> None:
        """Place new blocks at ascending block indices, null blocks in between."""
        table = self.tables.setdefault(request_id, WindowBlocks())
        if not indices:
            return
        if not table.blocks:
            table.base = indices[0]
        below = table.base - indices[0]
        if below > 0:
            # Another boundary inside a chunk that is not computed yet.
            table.blocks[:0] = [self._pool.null_block] * below
            table.base = indices[0]
        gap = indices[-1] + 1 - table.base - len(table.blocks)
        if gap > 0:
            table.blocks.extend([self._pool.null_block] * gap)
        for index, block in zip(indices, blocks, strict=True):
            table.blocks[index - table.base] = block
        table.is_dirty = True

    def find_appended(self, request_id: str, end: int, alloc_end: int) -> range | None:
        """Return the block indices a short step appends to a request's table.

        Args:
            request_id: The request; blocks below the step's start have been dropped.
            end: Tokens computed when the step ends, drafts not counted.
            alloc_end: ``end`` with drafts and lookahead.

        Returns:
            None if the step would leave a hole, which ``find_missing`` can deal with.
        """
        table = self.tables[request_id]
        needed = self.geometry.block_range(self.geometry.first_needed(end), alloc_end)
        if not table.blocks or not needed:
            return needed
        held = table.base + len(table.blocks)
        return range(held, max(held, needed.stop)) if needed.start <= held else None

    def capacity(self, request_id: str) -> int:
        """Return the position up to which the table has blocks; 0 for an empty table."""
        table = self.tables[request_id]
        if not table.blocks:
            return 0
        return (table.base + len(table.blocks)) * self.geometry.block_size

    def blocks_for(self, request_id: str, position: int) -> tuple[KVCacheBlock, ...]:
        """Return the blocks a checkpoint at ``position`` needs; all are held."""
        span = self.geometry.block_range(self.geometry.first_needed(position), position)
        if not span:
            return ()
        table = self.tables[request_id]
        found = tuple(table.blocks[span.start - table.base : span.stop - table.base])
        assert len(found) == len(span)
        return found

    def free(self, request_id: str) -> None:
        """Give all blocks back, tail before head."""
        table = self.tables.pop(request_id, None)
        if table is not None:
            self._pool.free_blocks(reversed(table.blocks))
