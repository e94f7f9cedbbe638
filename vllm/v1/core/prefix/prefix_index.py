"""Cached prefixes by units: keys of dense blocks, checkpoints of window blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from vllm.utils.hashing import BlockHash
from vllm.v1.core.pool.events import KVEventWriter
from vllm.v1.core.prefix.ghosts import GhostList
from vllm.v1.core.prefix.lineage import Lineage
from vllm.v1.core.prefix.members import Members
from vllm.v1.core.retention.queues import Standing
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.values.hit import Checkpoint

_SCRATCH, _SPARE, _REGULAR = Tier.SCRATCH, Tier.SPARE, Tier.REGULAR


def _tier_of(records: Sequence[Checkpoint]) -> Tier:
    """Return the best tier of some checkpoints."""
    if len(records) == 1:
        return records[0].tier
    return max(record.tier for record in records)


class PrefixIndex:
    """The ``BlockIndex`` of hits at one unit.

    A *dense* block carries one key for every unit whose rows it holds; a *window* block belongs to
    the checkpoints that need it. A checkpoint is atomic: losing one block dissolves it.

    Owns: the keys, their lineage, membership of checkpoints, the memory of what was evicted, which
    dense blocks are spare. The fields of a checkpoint belong to the ``CheckpointStore``.

    Args:
        num_blocks: Blocks of the pool, which bound the memory of what was evicted.
        dense_group_ids: Groups that carry keys.
        window_group_ids: Groups that checkpoints hold blocks of, in their order.
        events: Hears of prefixes that become reusable and of those that are not any more.
        ranks_blocks: Whether free blocks go by what is known of them, and not in the order of use.
            Then a free block also gives up a key that a held one has computed again.
    """

    def __init__(
        self,
        num_blocks: int,
        dense_group_ids: Sequence[int],
        window_group_ids: Sequence[int],
        events: KVEventWriter,
        *,
        ranks_blocks: bool = False,
    ) -> None:
        self.events = events
        self._ranks_blocks = ranks_blocks
        self._num_blocks = num_blocks
        # What is known of dense blocks, by id, and the clock of evictions.
        self._standings = [Standing.NEW] * num_blocks
        self._num_forgotten = 0
        self._window_group_ids = tuple(window_group_ids)
        # Per dense group: prefix -> a block that holds its last rows; further blocks of the same
        # prefix (copies, or requests that computed it side by side) stand in _duplicates.
        self.keys: dict[int, dict[BlockHash, KVCacheBlock]] = {g: {} for g in dense_group_ids}
        self._duplicates: dict[int, dict[BlockHash, list[KVCacheBlock]]] = {
            g: {} for g in dense_group_ids
        }
        self._num_keyed = 0  # blocks that carry keys
        # Blocks, by id, whose keys only requests wrote and hit that leave spare prefixes, or only a
        # session that is over. Ids of blocks without keys mean nothing.
        self.spare_ids: set[int] = set()
        # Of the first dense group, which has a key at every unit; where there are no windows,
        # nobody asks who continues whom; where there is nothing else, chains end at checkpoints.
        self.keeps_lineage = bool(window_group_ids)
        self.lineage_group = dense_group_ids[0] if dense_group_ids and window_group_ids else -1
        self.lineage = Lineage()
        self.checkpoints: dict[BlockHash, Checkpoint] = {}
        self.members = Members()
        # A quarter of a million hashes of 32 bytes: a bound on memory, not on usefulness. Else for
        # several times the pool, whose blocks carry several keys each.
        self.ghosts = GhostList(capacity=max(1024, min(16 * num_blocks, 250_000)))
        self.checkpoint_ghosts = GhostList(capacity=max(1024, min(num_blocks, 65_536)))

    # ---- what the pool asks ------------------------------------------------------------------

    def forget(self, block: KVCacheBlock, *, is_held: bool = False) -> Sequence[KVCacheBlock]:
        """Drop a block's keys and the checkpoints that need it; returns those's other blocks."""
        block_id = block.block_id
        if block.key is not None:
            group_id, hashes = block.group_id, self.keys_of(block)
            block.key = block.more_keys = None
            if block.ref_cnt:
                # A free one stands where it stood until the pool has placed it anew.
                self.spare_ids.discard(block_id)
            self._num_keyed -= 1
            self._num_forgotten += 1
            for prefix_hash in hashes:
                self._remove_key(group_id, prefix_hash, block)
                self.ghosts.add(prefix_hash, self._num_forgotten)
                self.events.removed(prefix_hash, group_id)
        records = self.members.entered.get(block_id, ())
        if is_held:
            records = (*records, *self.members.open_ones_with(block))
        affected: list[KVCacheBlock] = []
        for record in records:
            self.checkpoint_ghosts.add(record.prefix_hash)
            affected += self.remove_checkpoint(record)
        return affected

    def is_cached(self, block: KVCacheBlock) -> bool:
        """Whether a block carries keys or belongs to a checkpoint."""
        return block.key is not None or bool(self.checkpoints_of(block))

    def tier(self, block: KVCacheBlock) -> Tier:
        """Return where a free block belongs: with the best of what it serves."""
        if block.key is not None:
            return _SPARE if block.block_id in self.spare_ids else _REGULAR
        records = self.members.entered.get(block.block_id)
        return _tier_of(records) if records else _SCRATCH

    def tiers(self, blocks: Sequence[KVCacheBlock]) -> Sequence[Tier]:
        """Return the tiers of many blocks: most carry keys, or belong where the one before does."""
        entered, spare_ids = self.members.entered, self.spare_ids
        last: tuple[Checkpoint, ...] = ()
        tier, tiers = _SCRATCH, []
        for block in blocks:
            if block.key is not None:
                is_spare = bool(spare_ids) and block.block_id in spare_ids
                tiers.append(_SPARE if is_spare else _REGULAR)
                continue
            records = entered.get(block.block_id, ())
            if records is not last:
                last, tier = records, _tier_of(records) if records else _SCRATCH
            tiers.append(tier)
        return tiers

    def note_hit(self, block: KVCacheBlock) -> None:
        """Take note that a block was hit."""
        if block.key is not None:
            self._standings[block.block_id] = Standing.HIT

    def standings(self, blocks: Sequence[KVCacheBlock]) -> Sequence[Standing]:
        """Return what is known of many blocks: nearly all carry keys."""
        known, standing = self._standings, self.standing
        return [
            known[block.block_id] if block.key is not None else standing(block) for block in blocks
        ]

    def standing(self, block: KVCacheBlock) -> Standing:
        """Return what is known of a block: for a window block, of its checkpoints, or their rows.

        Dense rows outlive checkpoints that are given up before them, and are of no use then.
        """
        if block.key is not None:
            return self._standings[block.block_id]
        best = Standing.NEW
        rows = self.keys.get(self.lineage_group, {})
        for record in self.members.entered.get(block.block_id, ()):
            if record.num_hits or record.standing is CheckpointStanding.JUNCTION:
                return Standing.HIT
            dense = rows.get(record.prefix_hash)
            if dense is not None:
                best = max(best, self._standings[dense.block_id])
        return best

    def dense_share(self, num_spare: int) -> float:
        """Return which part of the blocks that cache something have dense rows.

        Args:
            num_spare: Blocks of spare checkpoints, which are not counted.
        """
        self.members.close_all()
        num_dense = self._num_keyed
        return num_dense / max(1, num_dense + len(self.members.entered) - num_spare)

    def clear(self) -> None:
        """Forget everything, what was evicted included; the pool resets its blocks' keys."""
        for group_id in self.keys:
            self.keys[group_id].clear()
            self._duplicates[group_id].clear()
        self._num_keyed = 0
        self.spare_ids.clear()
        self._standings = [Standing.NEW] * self._num_blocks
        self.lineage.clear()
        self.checkpoints.clear()
        self.members.clear()
        self.ghosts.clear()
        self.checkpoint_ghosts.clear()

    # ---- keys of dense blocks ----------------------------------------------------------------

    def keys_of(self, block: KVCacheBlock) -> Sequence[BlockHash]:
        """Return a dense block's keys in ascending order of position."""
        if block.key is None:
            return ()
        return (block.key,) if block.more_keys is None else (block.key, *block.more_keys)

    def add_keys(
        self,
        blocks: Sequence[KVCacheBlock],
        group_id: int,
        prefix_hashes: Sequence[BlockHash],
        parents: Sequence[BlockHash | None],
        *,
        is_spare: bool = False,
    ) -> Sequence[KVCacheBlock]:
        """Publish that held blocks have all their group's rows up to some prefixes' ends.

        Args:
            blocks: For each prefix the block with its last rows.
            group_id: Their dense group.
            prefix_hashes: Hashes of the prefixes, ascending in position.
            parents: For each the hash of the prefix one unit shorter, None for the first unit;
                looked at in the ``lineage_group`` alone.
            is_spare: Whether these rows go before others.

        Returns:
            Free blocks that cache nothing any more.
        """
        if is_spare:
            self.spare_ids.update(block.block_id for block in blocks if block.key is None)
        elif self.spare_ids:
            self.spare_ids.difference_update(block.block_id for block in blocks)
        self._carry(blocks, group_id, prefix_hashes)
        emptied: list[KVCacheBlock] = []
        index = self.keys[group_id]
        if index.keys().isdisjoint(prefix_hashes):
            index.update(zip(prefix_hashes, blocks, strict=True))
        else:
            duplicates = self._duplicates[group_id]
            for prefix_hash, block in zip(prefix_hashes, blocks, strict=True):
                old = index.setdefault(prefix_hash, block)
                if old is block:
                    continue
                if is_spare and old.block_id not in self.spare_ids:
                    # It may stand in for the other one from now on, which is not spare.
                    self.spare_ids.discard(block.block_id)
                duplicates.setdefault(prefix_hash, []).append(block)
                if self._ranks_blocks and old.ref_cnt == 0:
                    emptied += self._give_up(old, group_id, prefix_hash)
        self.ghosts.discard(prefix_hashes)
        if group_id == self.lineage_group:
            self.lineage.add(prefix_hashes, parents)
        return emptied

    def _carry(
        self, blocks: Sequence[KVCacheBlock], group_id: int, prefix_hashes: Sequence[BlockHash]
    ) -> None:
        """Let blocks carry keys, in ascending order of position."""
        fresh: list[KVCacheBlock] = []
        for block, prefix_hash in zip(blocks, prefix_hashes, strict=True):
            if block.key is None:
                block.group_id, block.key = group_id, prefix_hash
                fresh.append(block)
            elif block.more_keys is None:
                block.more_keys = [prefix_hash]
            else:
                block.more_keys.append(prefix_hash)
        self._num_keyed += len(fresh)
        if self._ranks_blocks:
            for block in fresh:
                assert block.key is not None
                standing = self._first_standing(group_id, block.key)
                self._standings[block.block_id] = standing

    def _first_standing(self, group_id: int, prefix_hash: BlockHash) -> Standing:
        """Return what is known of a prefix that is about to be published."""
        if prefix_hash in self.keys[group_id]:
            return Standing.HIT
        if group_id != self.lineage_group:
            # Published before, which made it no ghost any more: all rows of a prefix stand alike.
            first = self.keys.get(self.lineage_group, {}).get(prefix_hash)
            if first is not None:
                return self._standings[first.block_id]
        forgotten = self.ghosts.time_of(prefix_hash)
        if forgotten is None or self._num_forgotten - forgotten >= self._num_blocks:
            return Standing.NEW
        return Standing.RETURNED

    def _give_up(
        self, block: KVCacheBlock, group_id: int, prefix_hash: BlockHash
    ) -> Sequence[KVCacheBlock]:
        """Take a key from a free block; returns the block if that was its last."""
        self._remove_key(group_id, prefix_hash, block)
        self.events.removed(prefix_hash, group_id)
        left = [key for key in self.keys_of(block) if key != prefix_hash]
        if left:
            block.key, *more = left
            block.more_keys = more or None
            return ()
        block.key = None
        self._num_keyed -= 1
        return (block,)

    def note_used(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take note that a request holds dense blocks whose prefixes are not spare."""
        if self.spare_ids:
            self.spare_ids.difference_update(block.block_id for block in blocks)

    def note_spare(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take note that dense blocks, which stand in no tier, go before others from now on."""
        self.spare_ids.update(block.block_id for block in blocks)

    def _remove_key(self, group_id: int, prefix_hash: BlockHash, block: KVCacheBlock) -> None:
        index, duplicates = self.keys[group_id], self._duplicates[group_id]
        others = duplicates.get(prefix_hash)
        if others is None:
            del index[prefix_hash]
            if group_id == self.lineage_group:
                self.lineage.remove(prefix_hash)
            return
        if index[prefix_hash] is block:
            index[prefix_hash] = others.pop()
        else:
            others.remove(block)
        if not others:
            del duplicates[prefix_hash]

    def holds_any(self, prefix_hash: BlockHash) -> bool:
        """Whether any dense group has a prefix's last rows."""
        return any(prefix_hash in keys for keys in self.keys.values())

    def holds_key(self, group_id: int, prefix_hash: BlockHash, block: KVCacheBlock) -> bool:
        """Whether the index leads from a prefix to this very block, perhaps among others."""
        others = self._duplicates[group_id].get(prefix_hash, ())
        return self.keys[group_id].get(prefix_hash) is block or any(b is block for b in others)

    def add_chain(
        self, prefix_hashes: Sequence[BlockHash], parents: Sequence[BlockHash | None]
    ) -> None:
        """Note units below a checkpoint that is about to be entered, without dense rows.

        Their parents are noted: so every checkpoint ends a whole chain.
        """
        assert not self.keys, "dense rows tell the chain"
        self.lineage.add(prefix_hashes, parents)

    def _prune_chain(self, end: BlockHash | None) -> None:
        """Forget the units that led to nothing but a checkpoint that is gone."""
        lineage = self.lineage
        while end is not None and end not in self.checkpoints and lineage.is_leaf(end):
            parent = lineage.parent_of(end)
            lineage.remove(end)
            end = parent

    # ---- membership of checkpoints -----------------------------------------------------------

    def checkpoints_of(self, block: KVCacheBlock) -> Sequence[Checkpoint]:
        """Return the checkpoints a window block belongs to, those of running requests included."""
        entered = self.members.entered.get(block.block_id, ())
        return (*entered, *self.members.open_ones_with(block))

    def add_checkpoint(self, record: Checkpoint, *, is_open: bool = False) -> None:
        """Enter a checkpoint of a prefix that has none; who made it announces it.

        Args:
            record: The checkpoint.
            is_open: Whether the request that made it holds its blocks, and tells ``members`` which
                it gives back.
        """
        assert record.prefix_hash not in self.checkpoints
        self.checkpoints[record.prefix_hash] = record
        self.checkpoint_ghosts.discard((record.prefix_hash,))
        if is_open:
            self.members.open(record)
        else:
            self.members.enter(record, [*record.all_blocks()])

    def holds_checkpoint(self, record: Checkpoint) -> bool:
        """Whether a checkpoint can be hit."""
        return self.checkpoints.get(record.prefix_hash) is record

    def remove_checkpoint(self, record: Checkpoint) -> Sequence[KVCacheBlock]:
        """Withdraw a checkpoint that is entered; returns its blocks that may be free."""
        del self.checkpoints[record.prefix_hash]
        if self.events.is_on:
            for group_id in self.groups_of(record):
                self.events.removed(record.prefix_hash, group_id)
        blocks = self.members.remove(record)
        if not self.keys:
            self._prune_chain(record.prefix_hash)
        return blocks

    def groups_of(self, record: Checkpoint) -> list[int]:
        """Return the window groups in which a checkpoint holds blocks."""
        groups = zip(self._window_group_ids, record.blocks, strict=True)
        return [group_id for group_id, blocks in groups if blocks]

    # ---- checks ------------------------------------------------------------------------------

    def find_faults(self, blocks: Sequence[KVCacheBlock]) -> Iterator[str]:
        """Say where keys, checkpoints and blocks disagree."""
        num_carried = 0
        for block in blocks:
            for prefix_hash in self.keys_of(block):
                num_carried += 1
                if not any(self.holds_key(group, prefix_hash, block) for group in self.keys):
                    yield f"block {block.block_id} carries a key that the index does not know"
        duplicates = (more for group in self._duplicates.values() for more in group.values())
        num_indexed = sum(map(len, self.keys.values())) + sum(map(len, duplicates))
        if num_carried != num_indexed:
            yield f"blocks carry {num_carried} keys, the index holds {num_indexed}"
        needed: Counter[int] = Counter()
        entered = self.members.entered
        for prefix_hash, record in self.checkpoints.items():
            if record.prefix_hash != prefix_hash:
                yield f"a record at {record.position} is misfiled"
            needed.update([block.block_id for block in record.all_blocks()])
            held = self.members.held_ids_of(record)
            # Those of a record that nobody holds are all listed.
            listed = {block.block_id for block in self.members.blocks_of(record)} if held else ()
            for block in record.all_blocks():
                block_id = block.block_id
                if held and block.ref_cnt == 0 and block_id not in listed:
                    yield f"free block {block_id} is not listed at {record.position}"
                if block_id not in held and record not in entered.get(block_id, ()):
                    yield f"block {block_id} does not know the record at {record.position}"
        if not self.keys:
            yield from self._find_broken_chains()
        believed = Counter({block_id: len(of) for block_id, of in entered.items()})
        believed.update(self.members.open_blocks())
        agree = dict(believed) == dict(needed)
        for block_id in () if agree else believed.keys() | needed.keys():
            if believed[block_id] != needed[block_id]:
                yield f"block {block_id} believes in {believed[block_id]} records"

    def _find_broken_chains(self) -> Iterator[str]:
        """Say which units of a model without dense rows nothing leads to: no lookup gets there."""
        parents = self.lineage.parents
        for record in self.checkpoints.values():
            if record.prefix_hash not in parents:
                yield f"the record at {record.position} ends no chain"
        num_orphans = sum(1 for p in parents.values() if p is not None and p not in parents)
        if num_orphans:
            yield f"{num_orphans} units continue prefixes that are not known"
