"""A pool of which tenants have shares: what is guaranteed to one, no other can flush."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, cast

from typing_extensions import override

from vllm.exceptions import NoFreeBlocksError
from vllm.v1.core.block_pool import TieredPool, check_free
from vllm.v1.core.pool.block_index import BlockIndex
from vllm.v1.core.pool.regular_tier import RegularTier
from vllm.v1.core.pool.tier_queue import TierQueue
from vllm.v1.core.retention.cache_shares import COMMON, CacheShares, Owned, choose_giver, num_kept
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.free_block_queue import FreeKVCacheBlockQueue, KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

_SCRATCH, _FILLER, _REGULAR, _PINNED = Tier.SCRATCH, Tier.FILLER, Tier.REGULAR, Tier.PINNED
# Of a block in which nothing is cached.
_NOBODY = -1
_Queue = FreeKVCacheBlockQueue | RegularTier


class Parts:
    """A tier's blocks by partition, with the verbs of a queue.

    Owns: the partitions' queues.

    Args:
        queues: By partition.
        owner: Partitions by block id.
    """

    def __init__(self, queues: Sequence[_Queue], owner: Sequence[int]) -> None:
        self.queues = tuple(queues)
        self._owner = owner

    @property
    def num_free_blocks(self) -> int:
        """Return how many blocks there are."""
        return sum(queue.num_free_blocks for queue in self.queues)

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks last in their partitions' queues."""
        for queue, members in self._by_queue(blocks):
            queue.append_n(members)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks first in their partitions' queues, which are in the order of use."""
        for queue, members in self._by_queue(blocks):
            assert isinstance(queue, FreeKVCacheBlockQueue)
            queue.prepend_n(members)

    def _by_queue(
        self, blocks: Sequence[KVCacheBlock]
    ) -> Iterable[tuple[_Queue, list[KVCacheBlock]]]:
        members: dict[int, list[KVCacheBlock]] = {}
        for block in blocks:
            members.setdefault(self._owner[block.block_id], []).append(block)
        return [(self.queues[partition], theirs) for partition, theirs in members.items()]

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out."""
        self.queues[self._owner[block.block_id]].remove(block)

    def popleft(self) -> KVCacheBlock:
        """Take the first block of the partition that has most."""
        return max(self.queues, key=lambda queue: queue.num_free_blocks).popleft()

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Return all blocks; for tests and checks."""
        return [block for queue in self.queues for block in queue.get_all_free_blocks()]


class SharedPool(TieredPool):
    """``TieredPool`` with partitions.

    Blocks in which nothing is cached belong to nobody. A request takes those first, then what
    ``choose_giver`` says.

    Owns: which partition each block belongs to, and how many each has, besides.

    Args:
        num_gpu_blocks: Blocks in all, the null block included.
        enable_caching: Whether freed blocks keep what is cached in them.
        index: Which prefixes blocks hold.
        make_ranked: Makes the tier of free blocks that are given up as a policy says; None: they
            are given up in the order of use.
        metrics_collector: Samples block lifetimes, if given.
        shares: The partitions.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        index: BlockIndex,
        make_ranked: Callable[[], RegularTier] | None,
        metrics_collector: KVCacheMetricsCollector | None,
        shares: CacheShares,
    ) -> None:
        self.shares = shares
        self.num_partitions = len(shares.guaranteed)
        self._owner = [_NOBODY] * num_gpu_blocks
        # By partition, blocks held or cached.
        self._totals = [0] * self.num_partitions
        # Partitions whose counts a block that is taken has changed.
        self._changed: set[int] = set()
        self._taker = COMMON
        self._regular = [] if make_ranked is None else [make_ranked() for _ in shares.guaranteed]
        self._parts: list[Parts] = []
        ranked = self._regular[COMMON] if self._regular else None
        super().__init__(num_gpu_blocks, enable_caching, index, ranked, metrics_collector)

    def _lay_out_tiers(self) -> tuple[tuple[TierQueue, ...], tuple[TierQueue, ...]]:
        tiers, used = super()._lay_out_tiers()
        shared: dict[TierQueue, TierQueue] = {}
        for queue in tiers[_FILLER:_PINNED]:
            queues: Sequence[_Queue] = [FreeKVCacheBlockQueue([]) for _ in self.shares.guaranteed]
            if queue is tiers[_REGULAR] and self._regular:
                queues = self._regular
            shared[queue] = part = Parts(queues, self._owner)
            if queue in used:
                self._parts.append(part)
        self._filler = cast("Parts", shared[tiers[_FILLER]])
        return (
            tuple(shared.get(queue, queue) for queue in tiers),
            tuple(shared.get(queue, queue) for queue in used),
        )

    # ---- who has what ------------------------------------------------------------------------

    def owned(self) -> list[Owned]:
        """Return what each partition has."""
        return [self._count_owned(partition) for partition in self._range]

    def _count_owned(self, partition: int) -> Owned:
        free = sum(part.queues[partition].num_free_blocks for part in self._parts)
        return Owned(self._totals[partition] - free, free)

    @property
    def _range(self) -> range:
        return range(self.num_partitions)

    def owner_of(self, block: KVCacheBlock) -> int | None:
        """Return the partition a block belongs to; None: nothing is cached in it."""
        owner = self._owner[block.block_id]
        return None if owner == _NOBODY else owner

    def serve(self, tenant: str | None) -> None:
        """Blocks are taken for a tenant's request from now on."""
        self._taker = taker = self.shares.find(tenant)
        kept = self.shares.guaranteed
        self.num_kept = sum(
            num_kept(kept[i], mine) for i, mine in enumerate(self.owned()) if i != taker
        )

    @property
    @override
    def proven_share(self) -> float:
        num_free = sum(tier.num_free_blocks for tier in self._regular)
        proven = sum(tier.proven_share * tier.num_free_blocks for tier in self._regular)
        return proven / num_free if num_free else 0.0

    # ---- taking and giving back --------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take free blocks: those that cache nothing, then from whom it may be taken.

        Raises:
            NoFreeBlocksError: (a ValueError) Fewer are free than asked for; nothing was taken.
        """
        if num_blocks > self.get_num_free_blocks():
            return super().get_new_blocks(num_blocks)
        self._make_room(num_blocks)
        taken: list[KVCacheBlock] = []
        owned = self.owned()
        while len(taken) < num_blocks:
            mine = owned[self._taker]
            room = self.shares.at_most[self._taker] - mine.held - mine.free
            num = min(num_blocks - len(taken), self.num_scratch_blocks)
            if mine.free:
                # At its most it replaces what it has.
                num = min(num, max(0, room))
            self._changed.clear()
            try:
                new = super().get_new_blocks(num) if num else [self._take_from(owned)]
            except NoFreeBlocksError:
                self.free_blocks(reversed(taken))
                raise
            for block in new:
                self._disown(block)
                self._owner[block.block_id] = self._taker
            self._totals[self._taker] += len(new)
            taken += new
            for partition in {self._taker, *self._changed} - {_NOBODY}:
                owned[partition] = self._count_owned(partition)
        return taken

    def _take_from(self, owned: Sequence[Owned]) -> KVCacheBlock:
        """Take a cached block, of the lowest tier of whoever gives one."""
        giver = choose_giver(self.shares, owned, self._taker)
        queues = [p.queues[giver] for p in self._parts] if giver is not None else self._queues
        # Without a giver all is kept or pinned: who counts on what there is gets it all the same.
        block = next(queue for queue in queues if queue.num_free_blocks).popleft()
        self._num_free -= 1
        check_free(block)
        block.ref_cnt = 1
        self._forget(block)
        if self.metrics_collector is not None:
            self.metrics_collector.on_block_allocated(block)
        return block

    def _disown(self, block: KVCacheBlock) -> None:
        owner = self._owner[block.block_id]
        self._changed.add(owner)
        if owner != _NOBODY:
            self._totals[owner] -= 1
            self._owner[block.block_id] = _NOBODY

    def _join(self, blocks: Sequence[KVCacheBlock], tier: Tier) -> None:
        if tier is _SCRATCH:
            for block in blocks:
                self._disown(block)
        else:
            self._changed.update(self._owner[block.block_id] for block in blocks)
        super()._join(blocks, tier)
