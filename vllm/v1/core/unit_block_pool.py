"""The block pool behind hits at one unit: ref counts, free tiers, prefix keys, checkpoints.

A free block stands in one tier, and allocation takes the lowest tier that has one:

    SCRATCH   nothing can hit it: never hashed, or its keys are gone
    SPARE     checkpoints nobody asked for, left in memory that cached nothing
    COLD      superseded by something better
    REGULAR   useful; the eviction rule in force says which goes first (``regular_tier``)
    LIVE      checkpoints that running requests made or resumed at
    PINNED    the windows at which long prompts paused, if pins are on; counted as free

A *dense* block carries one key for every unit whose rows it holds; a *window* block belongs to the
checkpoint records that need it. A record is atomic: losing one block dissolves it, and blocks that
served nothing else fall to SCRATCH. The null block (id 0) is in no tier and its count is not kept.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    maybe_convert_block_hash,
    salt_digest,
)
from vllm.v1.core.pinned_checkpoints import PinnedCheckpoints
from vllm.v1.core.policy.eviction import Standing
from vllm.v1.core.regular_tier import RegularTier


class Tier(IntEnum):
    """Where a free block stands; lower tiers are reused first."""

    SCRATCH = 0
    SPARE = 1
    COLD = 2
    REGULAR = 3
    LIVE = 4
    PINNED = 5


_HELD = -1
_SCRATCH = int(Tier.SCRATCH)
_REGULAR = int(Tier.REGULAR)


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The window rows a request needs to resume at one boundary.

    Attributes:
        prefix_hash: Hash of the prefix of ``position`` tokens.
        position: The boundary, in tokens.
        blocks: Per window group (in group order) the blocks for rows
            ``[first_needed(position), position)``; empty where nothing is needed.
        next_token: The token that followed, if it was known: a drafter's last row depends on it.
        num_hits: Requests admitted here.
        num_live: Of those, requests that still run.
        num_owners: Running requests for whose sake it is among the last to go.
        is_kept: Whether it outlives the advance of the request that made it.
        is_junction: Whether continuations were seen to part here.
        is_cold: Whether it is given up before others.
        is_spare: Whether nobody asked for it, and nobody hit it yet.
        older: The checkpoints that the request which made this one began at.
    """

    prefix_hash: BlockHash
    position: int
    blocks: tuple[tuple[KVCacheBlock, ...], ...]
    next_token: int | None = None
    num_hits: int = 0
    num_live: int = 0
    num_owners: int = 0
    is_kept: bool = False
    is_junction: bool = False
    is_cold: bool = False
    is_spare: bool = False
    older: "tuple[Checkpoint, ...]" = ()

    def all_blocks(self) -> Iterable[KVCacheBlock]:
        """Iterate over the blocks of all groups."""
        for group_blocks in self.blocks:
            yield from group_blocks


@dataclass(slots=True)
class GhostList:
    """A bounded memory of evicted hashes, to tell "evicted" from "first seen".

    Owns: its entries, oldest dropped first.
    """

    capacity: int
    _entries: OrderedDict[BlockHash, int] = field(default_factory=OrderedDict)

    def add(self, prefix_hash: BlockHash, time: int = 0) -> None:
        """Remember a hash, evicted at some time."""
        self._entries[prefix_hash] = time
        self._entries.move_to_end(prefix_hash)
        if len(self._entries) > self.capacity:
            self._entries.popitem(last=False)

    def discard(self, prefix_hashes: Iterable[BlockHash]) -> None:
        """Forget hashes: they are cached again."""
        if self._entries:
            for prefix_hash in prefix_hashes:
                self._entries.pop(prefix_hash, None)

    def time_of(self, prefix_hash: BlockHash) -> int | None:
        """Return when a hash was evicted; None if that is not known."""
        return self._entries.get(prefix_hash)

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()

    def __contains__(self, prefix_hash: BlockHash) -> bool:
        return prefix_hash in self._entries


def checkpoint_tier(record: Checkpoint) -> Tier:
    """Return where a checkpoint's free blocks stand, pins left out."""
    if record.is_spare:
        return Tier.SPARE
    if record.is_cold:
        return Tier.COLD
    return Tier.LIVE if record.num_owners else Tier.REGULAR


class UnitBlockPool:
    """All blocks of the KV cache.

    Owns: ref counts, free tiers, the dense hash index, checkpoint records, pins.

    Args:
        num_blocks: Blocks in all, the null block included.
        dense_group_ids: Groups that carry unit keys.
        enable_caching: Whether keys and checkpoints are kept at all.
        window_group_ids: Groups that checkpoints hold blocks of, in their order.
        enable_kv_cache_events: Whether stored and removed prefixes are recorded.
        max_pinned: Most blocks pinned at once; None: there is no tier for them.
    """

    def __init__(
        self,
        num_blocks: int,
        dense_group_ids: Sequence[int],
        enable_caching: bool = True,
        window_group_ids: Sequence[int] = (),
        enable_kv_cache_events: bool = False,
        max_pinned: int | None = None,
    ) -> None:
        assert num_blocks > 0
        self._window_group_ids = tuple(window_group_ids)
        self.enable_kv_cache_events = enable_kv_cache_events
        self._events: list[KVCacheEvent] = []
        self.num_gpu_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.pinned = None if max_pinned is None else PinnedCheckpoints(max_pinned)
        self.regular = RegularTier(num_blocks)
        # Whether a free block gives up a key that a held block has computed again.
        self.drops_duplicates = False
        empty: list[FreeKVCacheBlockQueue | RegularTier] = [
            FreeKVCacheBlockQueue([]) for _ in range(len(Tier) - 1)
        ]
        empty[Tier.REGULAR - 1] = self.regular
        self.tiers = (FreeKVCacheBlockQueue(self.blocks[1:]), *empty)
        self._scratch = self.tiers[0]
        # Blocks whose keys were evicted so far: the clock of the memory of evicted prefixes.
        self._num_evicted = 0
        self._tier_of = [_HELD] + [int(Tier.SCRATCH)] * (num_blocks - 1)
        # Per dense group: prefix -> a block that holds its last rows; further blocks of the same
        # prefix (copies, or requests that computed it side by side) stand in _duplicates.
        self.index: dict[int, dict[BlockHash, KVCacheBlock]] = {g: {} for g in dense_group_ids}
        self._duplicates: dict[int, dict[BlockHash, list[KVCacheBlock]]] = {
            g: {} for g in dense_group_ids
        }
        # Keys of a dense block in ascending order of position, and its group.
        self._keys: dict[int, tuple[int, list[BlockHash]]] = {}
        # Which prefix a cached unit continues, and how many cached units continue a prefix; of the
        # first dense group, which has a key at every unit.
        self._lineage_group = dense_group_ids[0] if dense_group_ids else -1
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self._num_children: dict[BlockHash | None, int] = {}
        self.checkpoints: dict[BlockHash, Checkpoint] = {}
        self._records: dict[int, list[Checkpoint]] = {}
        # A quarter of a million hashes of 32 bytes: a bound on memory, not on usefulness. Else for
        # several times the pool, whose blocks carry several keys each.
        self.ghosts = GhostList(capacity=max(1024, min(16 * num_blocks, 250_000)))
        self.checkpoint_ghosts = GhostList(capacity=max(1024, min(num_blocks, 65_536)))

    # ---- counts ------------------------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        """Return how many blocks allocation can take, cached and pinned ones included."""
        return sum([tier.num_free_blocks for tier in self.tiers])

    @property
    def num_scratch(self) -> int:
        """Free blocks that cache nothing."""
        return self._scratch.num_free_blocks

    @property
    def num_spare(self) -> int:
        """Free blocks of spare checkpoints."""
        return self.tiers[Tier.SPARE].num_free_blocks

    @property
    def dense_share(self) -> float:
        """The part of what is cached that is dense rows, spare checkpoints left out."""
        dense, windows = len(self._keys), len(self._records) - self.num_spare
        return dense / (dense + windows) if dense else 1.0

    def get_usage(self) -> float:
        """Return the share of blocks that requests hold, 0..1, the null block left out."""
        total = self.num_gpu_blocks - 1
        return 1.0 - self.get_num_free_blocks() / total if total else 0.0

    def tier_of(self, block: KVCacheBlock) -> Tier | None:
        """Return the tier a free block stands in; None for a held block and the null block."""
        tier = self._tier_of[block.block_id]
        return None if tier == _HELD else Tier(tier)

    def keys_of(self, block: KVCacheBlock) -> Sequence[BlockHash]:
        """Return a dense block's keys in ascending order of position."""
        entry = self._keys.get(block.block_id)
        return entry[1] if entry is not None else ()

    def records_of(self, block: KVCacheBlock) -> Sequence[Checkpoint]:
        """Return the checkpoint records a window block belongs to."""
        return self._records.get(block.block_id, ())

    # ---- taking and giving back --------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take free blocks, lowest tier first, dropping what was cached in them.

        Raises:
            ValueError: Fewer are free than asked for; nothing was taken.
        """
        if num_blocks > self.get_num_free_blocks():
            raise ValueError(
                f"Cannot get {num_blocks} blocks: only {self.get_num_free_blocks()} are free."
            )
        if self.pinned is not None:
            self._demote_pins(self.pinned, num_blocks)
        # Scratch blocks cache nothing, so they go in one piece.
        scratch = self._scratch
        taken = scratch.popleft_n(min(num_blocks, scratch.num_free_blocks))
        for block in taken:
            self._tier_of[block.block_id] = _HELD
            block.ref_cnt = 1
        while len(taken) < num_blocks:
            # One at a time: a checkpoint that loses a block gives its others to scratch.
            block = self._pop_lowest()
            self._forget(block)
            block.ref_cnt = 1
            taken.append(block)
        return taken

    def _pop_lowest(self) -> KVCacheBlock:
        for tier in self.tiers:
            if tier.num_free_blocks:
                block = tier.popleft()
                self._tier_of[block.block_id] = _HELD
                return block
        raise ValueError("No free blocks available")

    def _forget(self, block: KVCacheBlock) -> None:
        """Drop what a block caches, because its rows are about to be overwritten."""
        entry = self._keys.pop(block.block_id, None)
        if entry is not None:
            group_id, hashes = entry
            self._num_evicted += 1
            for prefix_hash in hashes:
                self._remove_key(group_id, prefix_hash, block)
                self.ghosts.add(prefix_hash, self._num_evicted)
                self._record_removed(prefix_hash, group_id)
                if group_id == self._lineage_group:
                    self._forget_lineage(prefix_hash)
        for record in list(self._records.get(block.block_id, ())):
            self.checkpoint_ghosts.add(record.prefix_hash)
            self.dissolve(record)

    def _remove_key(self, group_id: int, prefix_hash: BlockHash, block: KVCacheBlock) -> None:
        index, duplicates = self.index[group_id], self._duplicates[group_id]
        others = duplicates.get(prefix_hash)
        if others is None:
            del index[prefix_hash]
            return
        if index[prefix_hash] is block:
            index[prefix_hash] = others.pop()
        else:
            others.remove(block)
        if not others:
            del duplicates[prefix_hash]

    def _forget_lineage(self, prefix_hash: BlockHash) -> None:
        if prefix_hash in self.index[self._lineage_group]:
            return  # another block still holds it
        parent = self._parents.pop(prefix_hash)
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold cached blocks for one more user; free ones leave their tier."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                tier = self._tier_of[block.block_id]
                self.tiers[tier].remove(block)
                self._tier_of[block.block_id] = _HELD
            if block.block_id in self._keys:
                self.regular.set_standing(block, Standing.HIT)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Give blocks back, in the order in which they should be reused.

        Those nobody holds any more join the tier of what they serve.
        """
        keys, records, tier_of = self._keys, self._records, self._tier_of
        # Nearly all of a prompt's blocks go to one of two tiers: those are joined in one piece.
        useless: list[KVCacheBlock] = []
        useful: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, f"block {block.block_id} freed too often"
            if block.ref_cnt:
                continue
            block_id = block.block_id
            if block_id in keys:
                tier_of[block_id] = _REGULAR
                useful.append(block)
            elif block_id in records:
                self._enqueue(block, self._tier_for(block))
            else:
                tier_of[block_id] = _SCRATCH
                useless.append(block)
        self.regular.append_n(useful)
        # Freed last, taken first; see ``_enqueue``.
        useless.reverse()
        self._scratch.prepend_n(useless)

    def _tier_for(self, block: KVCacheBlock) -> Tier:
        """Return where a free block belongs: with the best of what it serves."""
        if block.block_id in self._keys:
            return Tier.REGULAR
        records = self._records.get(block.block_id)
        if not records:
            return Tier.SCRATCH
        if self.pinned is not None and self.pinned.holds(block):
            return Tier.PINNED
        return max([checkpoint_tier(record) for record in records])

    def _standing_for(self, block: KVCacheBlock) -> Standing:
        """Return what is known of a window block: the best of its checkpoints, or of their rows."""
        index = self.index[self._lineage_group] if self._lineage_group >= 0 else {}
        best = Standing.NEW
        for record in self._records[block.block_id]:
            if record.num_hits or record.is_junction:
                return Standing.HIT
            dense = index.get(record.prefix_hash)
            if dense is not None:
                best = max(best, self.regular.standing_of(dense))
        return best

    def _enqueue(self, block: KVCacheBlock, tier: Tier) -> None:
        self._tier_of[block.block_id] = int(tier)
        if tier is Tier.SCRATCH:
            # Last in, first out: on a CPU the pool's memory is committed on first touch, so a
            # small working set of scratch blocks keeps the process small and its cache warm.
            self._scratch.prepend_n([block])
        else:
            if tier is Tier.REGULAR and block.block_id not in self._keys:
                self.regular.set_standing(block, self._standing_for(block))
            self.tiers[tier].append(block)

    def _move(self, block: KVCacheBlock, tier: Tier) -> None:
        self.tiers[self._tier_of[block.block_id]].remove(block)
        self._enqueue(block, tier)

    # ---- prefix keys of dense groups ---------------------------------------------------------

    def get_cached_block(self, prefix_hash: BlockHash, group_id: int) -> KVCacheBlock | None:
        """Return a block that holds the group's rows up to a prefix's end, or None."""
        return self.index[group_id].get(prefix_hash)

    def add_keys(
        self,
        blocks: Sequence[KVCacheBlock],
        group_id: int,
        prefix_hashes: Sequence[BlockHash],
        parents: Sequence[BlockHash | None],
    ) -> None:
        """Publish that held blocks have all their group's rows up to some prefixes' ends.

        Args:
            blocks: For each prefix the block with its last rows.
            group_id: Their dense group.
            prefix_hashes: Hashes of the prefixes, ascending in position.
            parents: For each the hash of the prefix one unit shorter; None for the first unit.
        """
        for block, prefix_hash in zip(blocks, prefix_hashes, strict=True):
            entry = self._keys.get(block.block_id)
            if entry is None:
                assert not block.is_null
                self._keys[block.block_id] = (group_id, [prefix_hash])
                self.regular.set_standing(block, self._first_standing(group_id, prefix_hash))
            else:
                assert entry[0] == group_id
                entry[1].append(prefix_hash)
        index = self.index[group_id]
        if index.keys().isdisjoint(prefix_hashes):
            index.update(zip(prefix_hashes, blocks, strict=True))
        else:
            duplicates = self._duplicates[group_id]
            for prefix_hash, block in zip(prefix_hashes, blocks, strict=True):
                old = index.setdefault(prefix_hash, block)
                if old is not block:
                    duplicates.setdefault(prefix_hash, []).append(block)
                    if self.drops_duplicates and old.ref_cnt == 0:
                        self._give_up_key(old, group_id, prefix_hash)
        self.ghosts.discard(prefix_hashes)
        if group_id == self._lineage_group:
            known, num_children = self._parents, self._num_children
            for prefix_hash, parent in zip(prefix_hashes, parents, strict=True):
                if prefix_hash not in known:
                    known[prefix_hash] = parent
                    num_children[parent] = num_children.get(parent, 0) + 1

    def _give_up_key(self, block: KVCacheBlock, group_id: int, prefix_hash: BlockHash) -> None:
        """Take a key from a free block: a held one has the same rows."""
        self._remove_key(group_id, prefix_hash, block)
        self._record_removed(prefix_hash, group_id)
        hashes = self._keys[block.block_id][1]
        hashes.remove(prefix_hash)
        if not hashes:
            del self._keys[block.block_id]
            self._move(block, Tier.SCRATCH)

    def _first_standing(self, group_id: int, prefix_hash: BlockHash) -> Standing:
        """Return what is known of a prefix that is about to be published."""
        if prefix_hash in self.index[group_id]:
            return Standing.HIT
        evicted = self.ghosts.time_of(prefix_hash)
        if evicted is not None and self._num_evicted - evicted < self.num_gpu_blocks:
            return Standing.RETURNED
        return Standing.NEW

    def add_key(
        self,
        block: KVCacheBlock,
        group_id: int,
        prefix_hash: BlockHash,
        parent: BlockHash | None = None,
    ) -> None:
        """Publish one prefix; see ``add_keys``."""
        self.add_keys((block,), group_id, (prefix_hash,), (parent,))

    def has_other_continuation(self, prefix_hash: BlockHash, next_hash: BlockHash | None) -> bool:
        """Whether a cached prefix goes on with other tokens than those of ``next_hash``."""
        others = self._num_children.get(prefix_hash, 0)
        return others > (1 if next_hash is not None and next_hash in self._parents else 0)

    def parent_of(self, prefix_hash: BlockHash) -> BlockHash | None:
        """Return the prefix one unit shorter of a cached one; None for a first unit."""
        return self._parents.get(prefix_hash)

    def holds_key(self, group_id: int, prefix_hash: BlockHash, block: KVCacheBlock) -> bool:
        """Whether the index leads from a prefix to this very block, perhaps among others."""
        others = self._duplicates[group_id].get(prefix_hash, ())
        return self.index[group_id].get(prefix_hash) is block or any(b is block for b in others)

    def num_index_entries(self) -> int:
        """Return how many (key, block) pairs the index of all dense groups holds."""
        duplicates = (more for group in self._duplicates.values() for more in group.values())
        return sum(len(index) for index in self.index.values()) + sum(map(len, duplicates))

    # ---- checkpoints of window groups --------------------------------------------------------

    def add_checkpoint(self, record: Checkpoint) -> bool:
        """Publish a checkpoint unless one of the same prefix exists.

        Returns:
            Whether the record was entered; else the one that exists is kept if this one is.
        """
        existing = self.checkpoints.get(record.prefix_hash)
        if existing is not None:
            existing.is_kept = existing.is_kept or record.is_kept
            existing.is_junction = existing.is_junction or record.is_junction
            if existing.is_spare and not record.is_spare:
                # As if it were made now.
                existing.is_spare, existing.is_cold = False, record.is_cold
                self._place_free_blocks(existing, even_if_unchanged=False)
            self.set_cold(existing, existing.is_cold and record.is_cold)
            return False
        self.checkpoints[record.prefix_hash] = record
        for group_id in self._groups_of(record):
            self.record_stored((record.prefix_hash,), None, (), 0, group_id)
        self.checkpoint_ghosts.discard((record.prefix_hash,))
        for block in record.all_blocks():
            assert not block.is_null
            self._records.setdefault(block.block_id, []).append(record)
        return True

    def dissolve(self, record: Checkpoint) -> None:
        """Withdraw a checkpoint; free blocks that serve nothing else fall to SCRATCH."""
        if self.checkpoints.get(record.prefix_hash) is not record:
            return
        del self.checkpoints[record.prefix_hash]
        if self.pinned is not None:
            self.pinned.discard(record)
        for group_id in self._groups_of(record):
            self._record_removed(record.prefix_hash, group_id)
        for block in record.all_blocks():
            records = self._records[block.block_id]
            records.remove(record)
            if not records:
                del self._records[block.block_id]
            if self._tier_of[block.block_id] != _HELD:
                tier = self._tier_for(block)
                if tier != self._tier_of[block.block_id]:
                    self._move(block, tier)

    def set_cold(self, record: Checkpoint, is_cold: bool) -> None:
        """Give a checkpoint up before others, or not; its free blocks change tiers."""
        if record.is_cold == is_cold or self.checkpoints.get(record.prefix_hash) is not record:
            return
        record.is_cold = is_cold
        self._place_free_blocks(record, even_if_unchanged=False)

    def promote(self, record: Checkpoint) -> None:
        """Keep a spare checkpoint that was hit as others are kept."""
        record.is_spare = False
        self._place_free_blocks(record, even_if_unchanged=False)

    def refresh(self, record: Checkpoint) -> None:
        """Let a checkpoint's free blocks age from now."""
        if self.checkpoints.get(record.prefix_hash) is record:
            self._place_free_blocks(record, even_if_unchanged=True)

    # ---- pins --------------------------------------------------------------------------------

    def pin(self, record: Checkpoint) -> bool:
        """Let allocation reach a checkpoint's blocks last; the oldest pins give way to the cap.

        A pin outlives hits: touched blocks leave the tier and come back to its end.

        Returns:
            Whether it is pinned; one that is larger than the cap, or gone, is not.
        """
        pinned = self.pinned
        assert pinned is not None, "pins are off"
        if self.checkpoints.get(record.prefix_hash) is not record or not pinned.can_hold(record):
            return False
        while pinned.num_excess(record) > 0:
            self.unpin(self._oldest_pin(pinned))
        pinned.add(record)
        self._place_free_blocks(record, even_if_unchanged=True)
        return True

    def unpin(self, record: Checkpoint) -> None:
        """Take a checkpoint's pin away; its free blocks become the youngest of a lower tier."""
        if self.pinned is not None and self.pinned.discard(record):
            self._place_free_blocks(record, even_if_unchanged=False)

    def _demote_pins(self, pinned: PinnedCheckpoints, num_blocks: int) -> None:
        """Unpin, oldest first, until the lower tiers hold as many blocks."""
        while sum(tier.num_free_blocks for tier in self.tiers[: Tier.PINNED]) < num_blocks:
            self.unpin(self._oldest_pin(pinned))

    def _oldest_pin(self, pinned: PinnedCheckpoints) -> Checkpoint:
        """Return the pin that gives way next: of those with free blocks, the one freed first."""
        block = self.tiers[Tier.PINNED].peekleft()
        if block is None:
            return next(iter(pinned))
        return next(record for record in self.records_of(block) if record in pinned)

    def _place_free_blocks(self, record: Checkpoint, *, even_if_unchanged: bool) -> None:
        for block in record.all_blocks():
            current = self._tier_of[block.block_id]
            if current == _HELD:
                continue
            tier = self._tier_for(block)
            if even_if_unchanged or tier != current:
                self._move(block, tier)

    # ---- events ------------------------------------------------------------------------------

    def _groups_of(self, record: Checkpoint) -> list[int]:
        """Return the window groups in which a checkpoint holds blocks, if events are on."""
        if not self.enable_kv_cache_events:
            return []
        groups = zip(self._window_group_ids, record.blocks, strict=True)
        return [group_id for group_id, blocks in groups if blocks]

    def record_stored(
        self,
        prefix_hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        token_ids: Sequence[int],
        unit: int,
        group_id: int,
        cache_salt: str | None = None,
    ) -> None:
        """Record that prefixes became reusable; nothing unless events are on.

        Args:
            prefix_hashes: Hashes of consecutive prefixes, ``unit`` tokens apart.
            parent: Hash of the prefix before the first; None at a prompt's start and for
                checkpoints.
            token_ids: The tokens between them; none for checkpoints, whose prefix the dense
                groups' events describe.
            unit: Tokens between two hashes; 0 for checkpoints.
            group_id: The group.
            cache_salt: What the first of the hashes holds besides tokens, at a prompt's start.
        """
        if not self.enable_kv_cache_events or not prefix_hashes:
            return
        self._events.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(h) for h in prefix_hashes],
                parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                token_ids=list(token_ids),
                block_size=unit,
                lora_id=None,
                medium=MEDIUM_GPU,
                lora_name=None,
                extra_keys=_event_keys(cache_salt, len(prefix_hashes)),
                group_idx=group_id,
            )
        )

    def _record_removed(self, prefix_hash: BlockHash, group_id: int) -> None:
        if self.enable_kv_cache_events:
            converted = maybe_convert_block_hash(prefix_hash)
            self._events.append(BlockRemoved([converted], medium=MEDIUM_GPU, group_idx=group_id))

    def take_events(self) -> list[KVCacheEvent]:
        """Drain the events, in the order in which things happened."""
        events, self._events = self._events, []
        return events

    # ---- reset -------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached.

        Returns:
            False, with nothing changed, while a request holds blocks.
        """
        if self.get_num_free_blocks() != self.num_gpu_blocks - 1:
            return False
        num_events = len(self._events)
        for record in list(self.checkpoints.values()):
            self.dissolve(record)
        for block_id in list(self._keys):
            block = self.blocks[block_id]
            self._forget(block)
            self._move(block, Tier.SCRATCH)
        self.ghosts.clear()
        self.checkpoint_ghosts.clear()
        if self.enable_kv_cache_events:
            # One event says it all: a full pool would give as many as it has keys.
            self._events[num_events:] = [AllBlocksCleared()]
        return True


def _event_keys(cache_salt: str | None, num_hashes: int) -> list[tuple[str, ...] | None] | None:
    """Return what an event tells of a salt: its digest, beside the first hash."""
    if not cache_salt:
        return None
    return [(salt_digest(cache_salt),), *[None] * (num_hashes - 1)]
