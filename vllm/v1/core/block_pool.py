"""The pool of KV-cache blocks: ref counts, the free queue, the hash index, KV events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress, groupby
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashList,
    BlockHashListWithBlockSize,
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    generate_event_extra_keys,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.core.pinned_tier import PinnedTier

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
    from vllm.v1.request import Request

logger = init_logger(__name__)


class BlockHashToBlockMap:
    """Hash key to the blocks cached under it.

    Nearly every key has one block, so the value is that block itself, and a dict by block id only
    once two requests computed the same tokens side by side. Such a dict stays a dict when it
    shrinks, which keeps ``pop`` free of a second conversion.
    """

    def __init__(self) -> None:
        self._cache: dict[BlockHashWithGroupId, KVCacheBlock | dict[int, KVCacheBlock]] = {}

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """Return any block cached under a key (the first entered), or None."""
        found = self._cache.get(key)
        if isinstance(found, dict):
            return next(iter(found.values()))
        return found

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        """Enter a block under a key, beside the ones that are there."""
        found = self._cache.setdefault(key, block)
        if found is block:
            return
        if isinstance(found, dict):
            found[block.block_id] = block
        else:
            self._cache[key] = {found.block_id: found, block.block_id: block}

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        """Take one block out; None, with nothing changed, if it is not cached under the key."""
        found = self._cache.get(key)
        if found is None:
            return None
        if not isinstance(found, dict):
            if found.block_id != block_id:
                return None
            del self._cache[key]
            return found
        block = found.pop(block_id, None)
        if not found:
            del self._cache[key]
        return block

    def __len__(self) -> int:
        return len(self._cache)

    def holds(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> bool:
        """Whether this very block is cached under a key."""
        found = self._cache.get(key)
        return (found.get(block.block_id) if isinstance(found, dict) else found) is block

    def num_blocks(self) -> int:
        """Return the number of blocks under all keys; O(keys), for invariants."""
        return sum(len(found) if isinstance(found, dict) else 1 for found in self._cache.values())


class BlockPool:
    """All blocks of the KV cache.

    Owns: every block's ref count and hash, the free queue, the pinned tier (if there is one), the
    hash index, pending KV events, the views of the hashes asked for last.

    The free queue is also the eviction order: a freed block keeps its hash, and serves hits, until
    it reaches the front and is handed out again. Block 0 is the null block, the placeholder for
    rows nobody needs: it is never hashed, never queued, and its ref count is not kept.

    Args:
        num_gpu_blocks: Blocks in all, the null block included.
        enable_caching: Whether freed blocks keep their hashes.
        hash_block_size: Tokens under one hash of ``Request.block_hashes``.
        enable_kv_cache_events: Whether to record stored and removed blocks.
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
        assert num_gpu_blocks > 0, f"A pool of {num_gpu_blocks} blocks has no null block."
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        # Blocks that belong to the model rather than to a request; never given back.
        self.num_reserved_blocks = 0
        self.enable_kv_cache_events = enable_kv_cache_events
        self.kv_event_queue: list[KVCacheEvent] = []
        self.metrics_collector = metrics_collector
        # Free blocks stand in the free queue or here; None: nothing is ever pinned.
        self.pinned: PinnedTier | None = None
        # The hashes that hashes_at was last asked about, and their views by block size.
        self._viewed_hashes: list[BlockHash] | None = None
        self._views: dict[int, BlockHashListWithBlockSize] = {}

    def enable_pinning(self, max_pinned: int, min_drop_blocks: int) -> None:
        """Keep windows that long prompts leave behind in a tier that allocation reaches last.

        Args:
            max_pinned: Most blocks pinned at once.
            min_drop_blocks: Blocks a window must drop at once for that.
        """
        assert self.pinned is None
        self.pinned = PinnedTier(self.free_block_queue, max_pinned, min_drop_blocks)

    # ---- the hash index ----------------------------------------------------------------------

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        """Return one cached block per group, or None unless every group has one."""
        get_one_block = self.cached_block_hash_to_block.get_one_block
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
        if num_cached_blocks >= num_full_blocks:
            return
        candidates: Iterable[int] = range(num_cached_blocks, num_full_blocks)
        if block_mask is not None:
            candidates = compress(candidates, block_mask)
        stored = [index for index in candidates if not blocks[index].is_null]
        if not stored:
            return
        block_hashes = self.hashes_at(request.block_hashes, block_size)
        assert len(block_hashes) >= num_full_blocks, (
            f"Request {request.request_id} has {len(block_hashes)} block hashes, "
            f"{num_full_blocks} full blocks."
        )
        # The length was checked above, for all. From here on without properties and NewTypes: they
        # cost calls, and a chunk may enter hundreds of blocks.
        hash_at: Callable[[int], Any] = (
            block_hashes.merged
            if isinstance(block_hashes, BlockHashListWithBlockSize)
            else block_hashes.__getitem__
        )
        insert = self.cached_block_hash_to_block.insert
        suffix = make_block_hash_with_group_id(BlockHash(b""), kv_cache_group_id)
        for index in stored:
            key = hash_at(index) + suffix
            block = blocks[index]
            assert block._block_hash is None, f"Block {block.block_id} is cached already."
            block._block_hash = key
            insert(key, block)
        if not self.enable_kv_cache_events:
            return
        runs = [(num_cached_blocks, num_full_blocks, stored)]
        if block_mask is not None and not all(block_mask):
            # What the mask left out is not in the cache: each run gets its own parent and tokens.
            runs = [(run[0], run[-1] + 1, run) for run in _contiguous_runs(stored)]
        for first, end, indices in runs:
            self._record_stored(
                request, block_hashes, indices, (first, end), block_size, kv_cache_group_id
            )

    def hashes_at(self, block_hashes: list[BlockHash], block_size: int) -> BlockHashList:
        """Return a request's hashes, one for each block of ``block_size`` tokens.

        All groups ask in turn about one request: those of one block size share a view, and so do
        a lookup and the caching that follows it.
        """
        if block_size == self.hash_block_size:
            return block_hashes
        if self._viewed_hashes is not block_hashes:
            self._viewed_hashes, self._views = block_hashes, {}
        view = self._views.get(block_size)
        if view is None:
            view = BlockHashListWithBlockSize(block_hashes, self.hash_block_size, block_size)
            self._views[block_size] = view
        return view

    def _record_stored(
        self,
        request: Request,
        block_hashes: BlockHashList,
        stored: Sequence[int],
        block_range: tuple[int, int],
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Queue one BlockStored for a run of blocks of which ``stored`` were entered."""
        first, end = block_range
        # The parent is logical: the physical block before may be the null block by now.
        parent = maybe_convert_block_hash(block_hashes[first - 1]) if first > 0 else None
        extra_keys = []
        mm_index = 0
        for index in stored:
            keys, mm_index = generate_event_extra_keys(
                request, index * block_size, (index + 1) * block_size, mm_index
            )
            extra_keys.append(keys)
        lora = request.lora_request
        self.kv_event_queue.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(block_hashes[index]) for index in stored],
                parent_block_hash=parent,
                token_ids=request.all_token_ids[first * block_size : end * block_size],
                block_size=block_size,
                lora_id=lora.lora_int_id if lora is not None else None,
                medium=MEDIUM_GPU,
                lora_name=lora.lora_name if lora is not None else None,
                extra_keys=extra_keys,
                group_idx=kv_cache_group_id,
            )
        )

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Drop a block's index entry; False if it had none."""
        if self.metrics_collector is not None:
            self.metrics_collector.on_block_evicted(block)
        key = block.block_hash
        if key is None or self.cached_block_hash_to_block.pop(key, block.block_id) is None:
            return False
        block.reset_hash()
        if self.pinned is not None:
            self.pinned.unpin(block)
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(
                BlockRemoved(
                    block_hashes=[maybe_convert_block_hash(get_block_hash(key))],
                    medium=MEDIUM_GPU,
                    group_idx=get_group_id(key),
                )
            )
        return True

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
        """Forget every hash.

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
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        if self.pinned is not None:
            self.pinned.clear()
        for block in self.blocks:
            block.reset_hash()
        if self.metrics_collector is not None:
            self.metrics_collector.reset()
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())
        logger.info("The prefix cache was reset")
        return True

    # ---- taking and giving back --------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks from the front of the free queue, dropping what was cached in them.

        Raises:
            ValueError: Fewer are free than asked for; nothing was taken.
        """
        num_free_blocks = self.get_num_free_blocks()
        if num_blocks > num_free_blocks:
            raise ValueError(
                f"Cannot get {num_blocks} free blocks from the pool: only {num_free_blocks} are "
                "free. Ask get_num_free_blocks() first."
            )
        if self.pinned is not None:
            # Every way to a block leads through here, so pins give way to any admission.
            self.pinned.demote_n(max(num_blocks - self.free_block_queue.num_free_blocks, 0))
        blocks = self.free_block_queue.popleft_n(num_blocks)
        collector = self.metrics_collector
        if collector is None:
            for block in blocks:
                # The field, not the property: a prompt takes thousands of blocks.
                if block._block_hash is not None:
                    self._maybe_evict_cached_block(block)
                block.ref_cnt = 1
            return blocks
        for block in blocks:
            # Sampling also hears of the end of blocks that have no entry to drop.
            self._maybe_evict_cached_block(block)
            block.ref_cnt = 1
            collector.on_block_allocated(block)
        return blocks

    def reserve_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks for good, for what belongs to the model itself (attention sinks).

        They count neither as used nor as a reason to refuse a reset.
        """
        blocks = self.get_new_blocks(num_blocks)
        self.num_reserved_blocks += num_blocks
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold cached blocks for one more user; free ones leave the queue.

        Mutates: ``ref_cnt`` of the blocks, and the free queue.
        """
        for block in blocks:
            is_free = block.ref_cnt == 0 and not block.is_null
            if is_free and (self.pinned is None or not self.pinned.on_touched(block)):
                self.free_block_queue.remove(block)
            block.ref_cnt += 1
            if self.metrics_collector is not None:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock], prepend: bool = False) -> None:
        """Give blocks back; those nobody holds any more join the free queue.

        Args:
            ordered_blocks: In the order in which they shall be reused.
            prepend: Join at the front, to be reused before anything else, instead of at the back.
        """
        freed = []
        for block in ordered_blocks:
            # No check that the count is positive: managers may be handed blocks of no pool, whose
            # counts then fall below zero and which join no queue.
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                freed.append(block)
        if self.pinned is not None:
            freed = self.pinned.on_freed(freed)
        if prepend:
            self.free_block_queue.prepend_n(freed)
        else:
            self.free_block_queue.append_n(freed)

    def free_unhashed_first(self, ordered_blocks: Sequence[KVCacheBlock]) -> None:
        """Give blocks back: those no hit can find to the queue's front, the hashed to its back.

        Args:
            ordered_blocks: In the order in which they shall be reused, on either side.
        """
        unhashed: list[KVCacheBlock] = []
        hashed: list[KVCacheBlock] = []
        for block in ordered_blocks:
            block.ref_cnt = ref_cnt = block.ref_cnt - 1
            if ref_cnt == 0 and not block.is_null:
                if block._block_hash is None:
                    unhashed.append(block)
                else:
                    hashed.append(block)
        if self.pinned is not None:
            # Only hashed blocks are pinned.
            hashed = self.pinned.on_freed(hashed)
        self.free_block_queue.prepend_n(unhashed)
        self.free_block_queue.append_n(hashed)

    # ---- counts and events -------------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        """Return how many blocks allocation can take, cached and pinned ones included."""
        num_free_blocks = self.free_block_queue.num_free_blocks
        if self.pinned is not None:
            num_free_blocks += self.pinned.queue.num_free_blocks
        return num_free_blocks

    def get_usage(self) -> float:
        """Return the share of blocks that requests hold, 0..1, the null block left out."""
        num_usable_blocks = self.num_gpu_blocks - 1 - self.num_reserved_blocks
        if num_usable_blocks == 0:
            return 0.0
        return 1.0 - self.get_num_free_blocks() / num_usable_blocks

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events since the last call; none when events are off."""
        if not self.enable_kv_cache_events:
            return []
        events = self.kv_event_queue
        self.kv_event_queue = []
        return events


def _contiguous_runs(indices: Sequence[int]) -> list[list[int]]:
    """Split ascending indices where one is left out.

    3 4 7 8 9 -> [3 4] [7 8 9]
    """
    return [
        [index for _, index in run]
        # Index minus place is constant along a run.
        for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0])
    ]
