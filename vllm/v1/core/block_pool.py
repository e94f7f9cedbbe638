"""The pool of KV-cache blocks: ref counts, the tiers of free ones, pins, KV events.

Engines have a ``TieredPool``, or with tenants' shares a ``SharedPool``. ``BlockPool`` is the pool
of hits at whole blocks, under vLLM 0.23's name: the same counts and pins over one queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import AnyKVCacheEvent
from vllm.exceptions import InvariantError, NoFreeBlocksError
from vllm.logger import init_logger
from vllm.utils.hashing import BlockHash
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.pool.block_index import BlockIndex
from vllm.v1.core.pool.claims import Claims
from vllm.v1.core.pool.events import KVEventWriter
from vllm.v1.core.pool.hash_index import BlockHashToBlockMap, HashIndex
from vllm.v1.core.pool.pins import Pins
from vllm.v1.core.pool.regular_tier import RegularTier
from vllm.v1.core.pool.tier_queue import FillerQueue, TierQueue
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.free_block_queue import FreeKVCacheBlockQueue, KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
    from vllm.v1.request import Request

__all__ = ["BlockHashToBlockMap", "BlockPool", "TieredPool"]

logger = init_logger(__name__)

_SCRATCH, _FILLER, _SPARE, _REGULAR = Tier.SCRATCH, Tier.FILLER, Tier.SPARE, Tier.REGULAR
_CLAIMED, _PINNED = Tier.CLAIMED, Tier.PINNED


_Tiers = tuple[TierQueue, ...]


def check_free(block: KVCacheBlock) -> None:
    """Refuse to hand out a block that somebody holds: what giving back promised (I3)."""
    if block.ref_cnt:
        raise InvariantError(
            f"I3 does not hold: block {block.block_id} stands among the free ones, and is held "
            f"{block.ref_cnt} times."
        )


def _check_ends(taken: Sequence[KVCacheBlock]) -> None:
    """Check the first and the last block; a prompt takes too many to look at each."""
    if taken:
        check_free(taken[0])
        check_free(taken[-1])


class TieredPool:
    """All blocks of the KV cache.

    A free block stands in one tier, and allocation takes the lowest tier that has one. A freed
    block keeps what is cached in it, and serves hits, until it is handed out again. Its index says
    what is cached in a block and so where it belongs.

    Block 0 is the null block, the placeholder for rows nobody needs: whoever passes it, it is never
    cached, counted, queued or freed; its ref count stays 0.

    Owns: every block's ref count, the tiers, the pins, the claims, the index, the KV events.

    Args:
        num_gpu_blocks: Blocks in all, the null block included.
        enable_caching: Whether freed blocks keep what is cached in them.
        index: Which prefixes blocks hold.
        ranked: Where free blocks stand that are given up as a policy says; None: all that can be
            hit are given up in the order of use.
        metrics_collector: Samples block lifetimes, if given.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        index: BlockIndex,
        ranked: RegularTier | None = None,
        metrics_collector: KVCacheMetricsCollector | None = None,
    ) -> None:
        assert num_gpu_blocks > 0, f"A pool of {num_gpu_blocks} blocks has no null block."
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        # Blocks that belong to the model rather than to a request; never given back.
        self.num_reserved_blocks = 0
        self.metrics_collector = metrics_collector
        self.index = index
        self.pins: Pins | None = None
        self.claims = Claims(self)
        self.ranked = ranked
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.pinned_queue = FreeKVCacheBlockQueue([])
        self._filler: FillerQueue = FreeKVCacheBlockQueue([])
        # By tier; and those that can have a block, the lowest first.
        self.tiers, self._queues = self._lay_out_tiers()
        self._scratch_stands_apart = self.tiers[_SCRATCH] is not self.tiers[_REGULAR]
        self._num_free = num_gpu_blocks - 1
        # Free blocks that are kept for others than whose request takes some now.
        self.num_kept = 0
        # Where a free block stands; of no meaning for a held one. Most have keys, and without pins
        # and claims these are in REGULAR, or SPARE if the index says so: of them it is not noted.
        self._tier_of: list[Tier] = [_SCRATCH] * num_gpu_blocks

    def _lay_out_tiers(self) -> tuple[_Tiers, _Tiers]:
        """Return the queue of every tier, and those queues that are used."""
        first, pinned = self.free_block_queue, self.pinned_queue
        low = [self._filler]
        low += [FreeKVCacheBlockQueue([]) for _ in range(_FILLER + 1, _REGULAR)]
        live = [FreeKVCacheBlockQueue([]) for _ in range(_REGULAR + 1, _PINNED)]
        regular = self.ranked or FreeKVCacheBlockQueue([])
        tiers = (first, *low, regular, *live, pinned)
        # Without ranks there is no filler, and checkpoints of running requests do not stand apart.
        few = (tiers[_SPARE], tiers[Tier.COLD], regular, tiers[_CLAIMED])
        used = tiers if self.ranked else (first, *few, pinned)
        return tiers, used

    # ---- counts ------------------------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        """Return how many blocks allocation can take, cached and pinned ones included."""
        return self._num_free

    @property
    def num_scratch_blocks(self) -> int:
        """Free blocks that cache nothing, where they stand apart."""
        return self.free_block_queue.num_free_blocks

    @property
    def num_spare_blocks(self) -> int:
        """Free blocks of spare prefixes."""
        return self.tiers[_FILLER].num_free_blocks + self.tiers[_SPARE].num_free_blocks

    @property
    def proven_share(self) -> float:
        """The part of the blocks in the regular tier that were hit or came back, 0..1."""
        return self.ranked.proven_share if self.ranked is not None else 0.0

    def get_usage(self) -> float:
        """Return the share of blocks that requests hold, 0..1, the null block left out."""
        num_usable_blocks = self.num_gpu_blocks - 1 - self.num_reserved_blocks
        if num_usable_blocks == 0:
            return 0.0
        return 1.0 - self.get_num_free_blocks() / num_usable_blocks

    def tier_of(self, block: KVCacheBlock) -> Tier | None:
        """Return the tier a free block stands in; None for a held block and the null block."""
        return None if block.ref_cnt or block.is_null else self._place_of(block)

    def _place_of(self, block: KVCacheBlock) -> Tier:
        """Return the tier of a free block."""
        if block.key is not None and self.pins is None:
            return self._place_of_keyed(block)
        return self._tier_of[block.block_id]

    def _place_of_keyed(self, block: KVCacheBlock) -> Tier:
        """Return the tier of a free block that has keys, or had them until now; without pins."""
        if self.claims.holds(block):
            return _CLAIMED
        return _SPARE if block.block_id in self.index.spare_ids else _REGULAR

    # ---- taking and giving back --------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take free blocks, lowest tier first, dropping what was cached in them.

        Raises:
            NoFreeBlocksError: (a ValueError) Fewer are free than asked for; nothing was taken.
        """
        if num_blocks > (num_free := self.get_num_free_blocks()):
            raise NoFreeBlocksError(
                f"Cannot get {num_blocks} free blocks from the pool: only {num_free} are free. "
                "Ask get_num_free_blocks() first."
            )
        self._make_room(num_blocks)
        self._num_free -= num_blocks
        taken = self._take_lowest(num_blocks)
        while len(taken) < num_blocks:
            # One at a time: a checkpoint that loses a block gives its others to scratch.
            block = next(q for q in self._queues if q.num_free_blocks).popleft()
            check_free(block)
            block.ref_cnt = 1
            self._forget(block)
            taken.append(block)
        if self.metrics_collector is not None:
            for block in taken:
                self.metrics_collector.on_block_allocated(block)
        return taken

    def _make_room(self, num_blocks: int) -> None:
        """Let pins and claims give way: every way to a block leads through here."""
        if self.pins is not None:
            self.pins.make_room(num_blocks)
        claimed, pinned = self.tiers[_CLAIMED], self.tiers[_PINNED]
        while (
            self.claims
            and claimed.num_free_blocks
            and (self._num_free - claimed.num_free_blocks - pinned.num_free_blocks < num_blocks)
        ):
            self.claims.release_last()

    def _take_lowest(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks of the lowest tier, at most so many; nothing is cached in scratch (I3)."""
        lowest = self.free_block_queue
        taken = lowest.popleft_n(min(num_blocks, lowest.num_free_blocks))
        _check_ends(taken)
        for block in taken:
            block.ref_cnt = 1
        if self.metrics_collector is not None:
            for block in taken:
                self._forget(block)
        return taken

    def reserve_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks for good, for what belongs to the model itself (attention sinks).

        They count neither as used nor as a reason to refuse a reset.
        """
        blocks = self.get_new_blocks(num_blocks)
        self.num_reserved_blocks += num_blocks
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold cached blocks for one more user; free ones leave their tier.

        Mutates: ``ref_cnt`` of the blocks, and the tiers.
        """
        null_block = self.null_block
        for block in blocks:
            if block is null_block:
                continue
            if block.ref_cnt == 0:
                tier = self._place_of(block)
                if tier is _SCRATCH and self._scratch_stands_apart:
                    raise InvariantError(
                        f"I3 does not hold: block {block.block_id} is held for what is cached in "
                        "it, and nothing is."
                    )
                self.tiers[tier].remove(block)
                self._num_free -= 1
                if tier is _PINNED:
                    self._tier_of[block.block_id] = _REGULAR
            if self.ranked is not None:
                self.ranked.note_hit(block)
            block.ref_cnt += 1
            if self.metrics_collector is not None:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Give blocks back; those nobody holds any more join the tier of what they serve.

        Args:
            ordered_blocks: In the order in which they shall be reused.
        """
        self._join_all(*self._release(ordered_blocks))

    def free_and_age(
        self, ordered_blocks: Iterable[KVCacheBlock], youngest: Iterable[KVCacheBlock]
    ) -> None:
        """Give blocks back; some that nobody holds become the youngest of their tiers.

        Args:
            ordered_blocks: In the order in which they shall be reused.
            youngest: In the same order, those to age from now, given back or free before.
        """
        keyed, others = self._release(ordered_blocks)
        last = {block: None for block in youngest if not block.ref_cnt}
        if not last:
            self._join_all(keyed, others)
            return
        self._join_all(
            [block for block in keyed if block not in last],
            [block for block in others if block not in last],
        )
        for block in last:
            if block.next_free_block is not None:
                self.tiers[self._place_of(block)].remove(block)
                self._num_free -= 1
        blocks = list(last)
        self._enqueue(blocks, self.index.tiers(blocks))

    def _join_all(self, keyed: Sequence[KVCacheBlock], others: Sequence[KVCacheBlock]) -> None:
        """Let blocks that stand in no tier join theirs."""
        if self.pins is not None or self.claims or self.index.spare_ids:
            keyed, others = (), [*keyed, *others]
        if keyed:
            self._num_free += len(keyed)
            self.tiers[_REGULAR].append_n(keyed)
        if others:
            self._enqueue(others, self.index.tiers(others))

    def _release(
        self, blocks: Iterable[KVCacheBlock]
    ) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        """Count one holder less (I2); returns the blocks nobody holds, those with keys first.

        Raises:
            InvariantError: A block is given back that nobody holds.
        """
        keyed: list[KVCacheBlock] = []
        others: list[KVCacheBlock] = []
        null_block = self.null_block
        for block in blocks:
            block.ref_cnt = ref_cnt = block.ref_cnt - 1
            if ref_cnt == 0:
                if block.key is not None:
                    keyed.append(block)
                else:
                    others.append(block)
            elif ref_cnt < 0:
                block.ref_cnt = 0
                if block is not null_block:
                    raise InvariantError(
                        f"I2 does not hold: block {block.block_id} is given back, and nobody holds "
                        "it."
                    )
        return keyed, others

    def _enqueue(self, freed: Sequence[KVCacheBlock], tiers: Sequence[Tier]) -> None:
        """Let blocks that stand in no tier join theirs, each tier's in one piece."""
        first = tiers[0]
        if self.pins is None and not self.claims and tiers.count(first) == len(tiers):
            # Most often all are of one kind.
            self._join(freed, first)
            return
        by_tier: dict[Tier, list[KVCacheBlock]] = {}
        for block, tier in zip(freed, tiers, strict=True):
            tier = self._lift(block, tier)
            if (members := by_tier.get(tier)) is None:
                members = by_tier[tier] = []
            members.append(block)
        for tier, members in by_tier.items():
            self._join(members, tier)

    def _join(self, blocks: Sequence[KVCacheBlock], tier: Tier) -> None:
        """Put blocks that stand in no tier into one: filler at the front, most at the back.

        Scratch is last in, first out: on a CPU the pool's memory is committed on first touch, so a
        small working set of scratch blocks keeps the process small and its cache warm.
        """
        tier_of = self._tier_of
        for block in blocks:
            tier_of[block.block_id] = tier
        self._num_free += len(blocks)
        if tier is _SCRATCH:
            self.free_block_queue.prepend_n(blocks[::-1])
        elif tier is _FILLER:
            self._filler.prepend_n(blocks)
        else:
            self.tiers[tier].append_n(blocks)

    def replace(self, blocks: Iterable[KVCacheBlock], *, even_if_unchanged: bool = False) -> None:
        """Move free blocks to the tier they belong in now, as its youngest.

        Args:
            blocks: The blocks; held ones stay where they are.
            even_if_unchanged: Let blocks that stay in their tier age from now, too.
        """
        tiers, tier_of = self.tiers, self._tier_of
        moved: list[KVCacheBlock] = []
        for block in blocks:
            if block.ref_cnt or block.is_null:
                continue
            current = self._place_of(block)
            tier = self._lift(block, self.index.tier(block))
            if even_if_unchanged or tiers[tier] is not tiers[current]:
                tiers[current].remove(block)
                # A block may come up again before it stands anywhere.
                tier_of[block.block_id] = tier
                moved.append(block)
        if moved:
            self._num_free -= len(moved)
            self._enqueue(moved, [tier_of[block.block_id] for block in moved])

    def _lift(self, block: KVCacheBlock, tier: Tier) -> Tier:
        """Return where a free block stands that belongs to a tier but for pins and claims."""
        if self.pins is not None and self.pins.holds(block):
            return _PINNED
        if not self.claims.holds(block):
            return tier
        if tier is not _SCRATCH:
            return _CLAIMED
        self.claims.drop(block)
        return tier

    def rejoin(self, blocks: Sequence[KVCacheBlock], change: Callable[[], None]) -> None:
        """Let a change happen to free blocks that may put them into another tier.

        Args:
            blocks: In the order in which they shall be reused; held ones stay where they are.
            change: Of claims, or of what the index says of them.
        """
        free = [block for block in blocks if not block.ref_cnt and not block.is_null]
        for block in free:
            self.tiers[self._place_of(block)].remove(block)
        self._num_free -= len(free)
        change()
        if free:
            self._enqueue(free, self.index.tiers(free))

    def replace_emptied(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Move blocks that have just lost their keys."""
        if self.pins is None:
            for block in blocks:
                self._tier_of[block.block_id] = self._place_of_keyed(block)
        self.replace(blocks)

    # ---- what is cached ----------------------------------------------------------------------

    def _forget(self, block: KVCacheBlock, *, is_held: bool = False) -> None:
        """Drop what a block caches, and everything that was of use only together with it."""
        if self.metrics_collector is not None:
            self.metrics_collector.on_block_evicted(block)
        if self.claims:
            self.claims.forget(block)
        affected = self.index.forget(block, is_held=is_held)
        if self.pins is not None:
            self.pins.forget(block)
        if affected:
            self.replace(affected)

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Drop what a block caches, wherever it is; False if that is nothing."""
        was_cached, had_keys = self.index.is_cached(block), block.key is not None
        self._forget(block, is_held=block.ref_cnt > 0)
        (self.replace_emptied if had_keys else self.replace)((block,))
        return was_cached

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Un-cache blocks wherever they are; who holds them keeps them.

        Raises:
            ValueError: An id is outside the pool.
        """
        for block_id in block_ids:
            if not 0 <= block_id < self.num_gpu_blocks:
                raise ValueError(
                    f"Block {block_id} is outside the pool of {self.num_gpu_blocks} blocks."
                )
            self._maybe_evict_cached_block(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached.

        Returns:
            False, with nothing changed, while a request holds a block.
        """
        num_used_blocks = self.num_gpu_blocks - 1 - self.get_num_free_blocks()
        num_used_blocks -= self.num_reserved_blocks
        if num_used_blocks:
            logger.warning(
                "Failed to reset the prefix cache: %d blocks are still in use", num_used_blocks
            )
            return False
        free = self._note_places()
        self.claims.clear()
        self.index.clear()
        if self.pins is not None:
            self.pins.clear()
        for block in self.blocks:
            block.reset_hash()
        self.replace(free)
        if self.metrics_collector is not None:
            self.metrics_collector.reset()
        self.index.events.cleared()
        logger.info("The prefix cache was reset")
        return True

    def enable_pinning(self, max_pinned: int) -> None:
        """Let up to so many blocks be pinned."""
        assert self.pins is None
        self._note_places()
        self.pins = Pins(self, max_pinned)

    def _note_places(self) -> list[KVCacheBlock]:
        """Note of all free blocks where they stand; returns them."""
        free = [block for queue in self._queues for block in queue.get_all_free_blocks()]
        for block in free:
            self._tier_of[block.block_id] = self._place_of(block)
        return free

    def take_events(self) -> list[AnyKVCacheEvent]:
        """Drain the events; none when they are off."""
        return self.index.events.take()


class BlockPool(TieredPool):
    """All blocks of a KV cache that hits at whole blocks.

    One queue stands for all tiers but the pinned one: what no hit can find is reused from its
    front, what is cached joins its back.

    Owns: beside what every pool does, the keys of full blocks.

    Args:
        num_gpu_blocks: Blocks in all, the null block included.
        enable_caching: Whether freed blocks keep what is cached in them.
        hash_block_size: Tokens under one hash of ``Request.block_hashes``.
        enable_kv_cache_events: Whether stored and removed prefixes are recorded.
        metrics_collector: Samples block lifetimes, if given.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: KVCacheMetricsCollector | None = None,
    ) -> None:
        self.hash_block_size = hash_block_size
        self.hash_index = HashIndex(hash_block_size, KVEventWriter(enable_kv_cache_events))
        super().__init__(
            num_gpu_blocks, enable_caching, self.hash_index, metrics_collector=metrics_collector
        )
        self.enable_kv_cache_events = enable_kv_cache_events
        self.kv_event_queue = self.index.events.queue

    def _lay_out_tiers(
        self,
    ) -> tuple[tuple[FreeKVCacheBlockQueue, ...], tuple[FreeKVCacheBlockQueue, ...]]:
        """Return the one queue for all tiers but the last."""
        queue, pinned = self.free_block_queue, self.pinned_queue
        return (*[queue] * Tier.PINNED, pinned), (queue, pinned)

    @property
    def cached_block_hash_to_block(self) -> BlockHashToBlockMap:
        """The keys of full blocks."""
        return self.hash_index.map

    # ---- giving back -------------------------------------------------------------------------

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock], prepend: bool = False) -> None:
        """Give blocks back; those nobody holds any more join the queue.

        Args:
            ordered_blocks: In the order in which they shall be reused.
            prepend: Reuse them before anything else, whatever is cached in them.
        """
        freed: list[KVCacheBlock] = []
        null_block = self.null_block
        for block in ordered_blocks:
            if block is null_block:
                continue
            block.ref_cnt = ref_cnt = block.ref_cnt - 1
            if ref_cnt == 0:
                freed.append(block)
        if freed:
            self._place(freed, Tier.SCRATCH if prepend else Tier.REGULAR)

    def free_unhashed_first(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Give blocks back: those no hit can find to the queue's front, the hashed to its back.

        Args:
            ordered_blocks: In the order in which they shall be reused, on either side.
        """
        unhashed: list[KVCacheBlock] = []
        hashed: list[KVCacheBlock] = []
        null_block = self.null_block
        for block in ordered_blocks:
            if block is null_block:
                continue
            # A prompt's windows give back thousands: counted and sorted in one pass.
            block.ref_cnt = ref_cnt = block.ref_cnt - 1
            if ref_cnt == 0:
                (unhashed if block._block_hash is None else hashed).append(block)
        if unhashed:
            self._place(unhashed, Tier.SCRATCH)
        if hashed:
            self._place(hashed, Tier.REGULAR)

    def _place(self, freed: Sequence[KVCacheBlock], tier: Tier) -> None:
        """Let blocks that nobody holds join the queue, or stand under their pins."""
        if self.pins is None:
            self._join(freed, tier)
        else:
            self._enqueue(freed, [tier] * len(freed))

    def _take_lowest(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks of the one queue, at most so many, with what is cached in them."""
        queue, is_watched = self.free_block_queue, self.metrics_collector is not None
        taken = queue.popleft_n(min(num_blocks, queue.num_free_blocks))
        _check_ends(taken)
        for block in taken:
            block.ref_cnt = 1
            # The field, not the property: a prompt takes thousands of blocks.
            if is_watched or block._block_hash is not None:
                self._forget(block)
        return taken

    def _join(self, blocks: Sequence[KVCacheBlock], tier: Tier) -> None:
        """Put blocks that stand nowhere to the queue's front or back, in the order given."""
        if self.pins is not None:
            for block in blocks:
                self._tier_of[block.block_id] = tier
        self._num_free += len(blocks)
        if tier is Tier.SCRATCH:
            self.free_block_queue.prepend_n(blocks)
        else:
            self.tiers[tier].append_n(blocks)

    # ---- what is cached ----------------------------------------------------------------------

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        """Return one cached block per group, or None unless every group has one."""
        get_one_block = self.hash_index.map.get_one_block
        cached_blocks = []
        for group_id in kv_cache_group_ids:
            block = get_one_block(make_block_hash_with_group_id(block_hash, group_id))
            if block is None:
                return None
            cached_blocks.append(block)
        return cached_blocks

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        """Hash ``blocks[num_cached_blocks:num_full_blocks]`` and enter them in the index.

        Null blocks and masked ones are left out. An equal block may be cached already: both stay,
        because block ids in a request's table never change.

        Args:
            request: Whose tokens the blocks hold.
            blocks: The request's blocks of one group; those before ``num_cached_blocks`` are not
                looked at.
            num_cached_blocks: Blocks done by earlier calls.
            num_full_blocks: Blocks filled by now.
            block_size: Tokens of a block, a multiple of the pool's ``hash_block_size``.
            kv_cache_group_id: The group.
            block_mask: Entry i is for block ``num_cached_blocks + i``; None caches all.
        """
        run = range(num_cached_blocks, num_full_blocks)
        self.hash_index.cache_run(request, blocks, run, block_size, kv_cache_group_id, block_mask)
