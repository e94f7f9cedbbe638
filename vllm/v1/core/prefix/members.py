"""Which checkpoints a window block belongs to."""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.values.hit import Checkpoint


class Members:
    """The checkpoints of each window block.

    A checkpoint is *open* while the request that made it holds blocks of it: of a held block nobody
    asks what it belongs to, and most checkpoints of a running request are replaced by newer ones
    soon. Of an open one only those blocks are entered that its maker gave back: it gives back a
    group's blocks in their order, the first one first.

        group      b0  b1 | b2  b3  b4
                   entered| held by its maker

    Owns: both.
    """

    __slots__ = ("_of", "_open")

    def __init__(self) -> None:
        # By block id. Blocks that belong to the same checkpoints share one tuple: a window may have
        # hundreds of blocks.
        self._of: dict[int, tuple[Checkpoint, ...]] = {}
        # For each open one, how many blocks of each group are entered.
        self._open: dict[Checkpoint, list[int]] = {}

    @property
    def entered(self) -> Mapping[int, tuple[Checkpoint, ...]]:
        """The checkpoints of each block that may be free, by its id."""
        return self._of

    def blocks_of(self, record: Checkpoint) -> Sequence[KVCacheBlock]:
        """Return the blocks of a checkpoint that may be free."""
        counts = self._open.get(record)
        if counts is None:
            return [*record.all_blocks()]
        return [b for n, group in zip(counts, record.blocks, strict=True) for b in group[:n]]

    def open_ones_with(self, block: KVCacheBlock) -> Iterator[Checkpoint]:
        """Iterate over the open checkpoints of a block that is not entered. Cost: O(open ones)."""
        for record, counts in self._open.items():
            if any(block in g[n:] for n, g in zip(counts, record.blocks, strict=True)):
                yield record

    def held_ids_of(self, record: Checkpoint) -> Set[int]:
        """Return the ids of a checkpoint's blocks that are not entered; none: it is not open."""
        counts = self._open.get(record)
        if counts is None:
            return frozenset()
        groups = zip(counts, record.blocks, strict=True)
        return {block.block_id for n, group in groups for block in group[n:]}

    def open_blocks(self) -> Iterator[int]:
        """Iterate over the ids of blocks that are not entered, once for each open checkpoint."""
        for record in self._open:
            yield from self.held_ids_of(record)

    def enter(self, record: Checkpoint, blocks: Sequence[KVCacheBlock]) -> None:
        """Note of blocks that they belong to a checkpoint."""
        of = self._of
        block_ids = [block.block_id for block in blocks]
        assert 0 not in block_ids  # the null block belongs to nothing
        last: tuple[Checkpoint, ...] = ()
        grown: tuple[Checkpoint, ...] = (record,)
        if of.keys().isdisjoint(block_ids):
            of.update(dict.fromkeys(block_ids, grown))
            return
        for block_id in block_ids:
            records = of.get(block_id, ())
            if records is not last:
                last, grown = records, (*records, record)
            of[block_id] = grown

    def open(self, record: Checkpoint) -> None:
        """Begin with a checkpoint whose blocks its maker holds."""
        self._open[record] = [0] * len(record.blocks)

    def give_back(self, record: Checkpoint, blocks: Collection[KVCacheBlock]) -> None:
        """Enter those blocks of a checkpoint that its maker is about to give back, among others."""
        counts = self._open.get(record)
        if counts is None:
            return
        given: list[KVCacheBlock] = []
        for number, group in enumerate(record.blocks):
            begin = end = counts[number]
            while end < len(group) and group[end] in blocks:
                end += 1
            if end > begin:
                given += group[begin:end]
                counts[number] = end
        if given:
            self.enter(record, given)

    def close(self, record: Checkpoint) -> None:
        """Enter all blocks of a checkpoint."""
        counts = self._open.pop(record, None)
        if counts is not None:
            groups = zip(counts, record.blocks, strict=True)
            self.enter(record, [block for n, group in groups for block in group[n:]])

    def close_all(self) -> None:
        """Enter all blocks of all checkpoints."""
        for record in tuple(self._open):
            self.close(record)

    def remove(self, record: Checkpoint) -> Sequence[KVCacheBlock]:
        """Forget a checkpoint; returns those of its blocks that may be free."""
        blocks = self.blocks_of(record)
        self._open.pop(record, None)
        of = self._of
        last: tuple[Checkpoint, ...] = ()
        rest: tuple[Checkpoint, ...] = ()
        for block in blocks:
            records = of[block.block_id]
            if records is not last:
                last, rest = records, tuple(other for other in records if other is not record)
            if rest:
                of[block.block_id] = rest
            else:
                del of[block.block_id]
        return blocks

    def clear(self) -> None:
        """Forget all."""
        self._of.clear()
        self._open.clear()
