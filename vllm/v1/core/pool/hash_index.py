"""Cached prefixes by whole blocks: a full block has one key, its chained hash and its group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from vllm.utils.hashing import BlockHash
from vllm.v1.core.kv_cache_utils import (
    BlockHashList,
    BlockHashListWithBlockSize,
    event_extra_keys,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from vllm.v1.core.pool.events import KVEventWriter
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.free_block_queue import BlockHashWithGroupId, KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.request import Request


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


class HashIndex:
    """The ``BlockIndex`` of hits at whole blocks.

    There is one order of free blocks: useless ones join its front and cached ones its back.

    Owns: the map from keys to blocks, the blocks' hashes, the views of the hashes asked for last.

    Args:
        hash_block_size: Tokens under one hash of ``Request.block_hashes``.
        events: Hears of blocks that are cached and of those that are not any more.
    """

    def __init__(self, hash_block_size: int, events: KVEventWriter) -> None:
        self.hash_block_size = hash_block_size
        self.map = BlockHashToBlockMap()
        # One queue stands for all tiers.
        self.spare_ids: frozenset[int] = frozenset()
        self.events = events
        # The hashes that hashes_at was last asked about, and their views by block size.
        self._viewed_hashes: list[BlockHash] | None = None
        self._views: dict[int, BlockHashListWithBlockSize] = {}

    # ---- what the pool asks ------------------------------------------------------------------

    def forget(self, block: KVCacheBlock, *, is_held: bool = False) -> Sequence[KVCacheBlock]:
        """Drop a block's key, if it has one."""
        del is_held
        key = block.block_hash
        if key is not None and self.map.pop(key, block.block_id) is not None:
            block.reset_hash()
            self.events.removed(get_block_hash(key), get_group_id(key))
        return ()

    def is_cached(self, block: KVCacheBlock) -> bool:
        """Whether the block has a key that leads to it."""
        key = block.block_hash
        return key is not None and self.map.holds(key, block)

    def tier(self, block: KVCacheBlock) -> Tier:
        """Return the back of the one queue for cached blocks, its front for others."""
        return Tier.SCRATCH if block._block_hash is None else Tier.REGULAR

    def tiers(self, blocks: Sequence[KVCacheBlock]) -> Sequence[Tier]:
        """Return where many blocks belong."""
        return [self.tier(block) for block in blocks]

    def clear(self) -> None:
        """Forget all keys; blocks lose their hashes one by one, as the pool resets them."""
        self.map = BlockHashToBlockMap()

    def find_faults(self, blocks: Sequence[KVCacheBlock]) -> Iterator[str]:
        """Say where keys and blocks disagree."""
        hashed = [block for block in blocks if block.block_hash is not None]
        for block in hashed:
            if block.is_null:
                yield "the null block has a hash"
            if not self.is_cached(block):
                yield (f"block {block.block_id} has a hash under which the index does not know it")
        if self.map.num_blocks() != len(hashed):
            yield f"the index holds {self.map.num_blocks()} blocks, {len(hashed)} have a hash"

    # ---- caching -----------------------------------------------------------------------------

    def cache_run(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        run: range,
        block_size: int,
        group_id: int,
        mask: Sequence[bool] | None,
    ) -> None:
        """Enter the blocks at the indices of ``run``; see ``BlockPool.cache_full_blocks``."""
        if not run:
            return
        candidates: Iterable[int] = run if mask is None else compress(run, mask)
        stored = [index for index in candidates if not blocks[index].is_null]
        if not stored:
            return
        block_hashes = self.hashes_at(request.block_hashes, block_size)
        assert len(block_hashes) >= run.stop, (
            f"Request {request.request_id} has {len(block_hashes)} block hashes, "
            f"{run.stop} full blocks."
        )
        # The length was checked above, for all. From here on without properties and NewTypes: they
        # cost calls, and a chunk may enter hundreds of blocks.
        hash_at: Callable[[int], Any] = (
            block_hashes.merged
            if isinstance(block_hashes, BlockHashListWithBlockSize)
            else block_hashes.__getitem__
        )
        insert = self.map.insert
        suffix = make_block_hash_with_group_id(BlockHash(b""), group_id)
        for index in stored:
            key = hash_at(index) + suffix
            block = blocks[index]
            assert block._block_hash is None, f"Block {block.block_id} is cached already."
            block._block_hash = key
            insert(key, block)
        if not self.events.is_on:
            return
        self._record_stored(request, block_hashes, stored, group_id)

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
        group_id: int,
    ) -> None:
        """Write the events of the blocks that were entered: one for each unbroken run of them.

        What a mask or a null block leaves out is not announced, neither its hash nor its tokens, so
        a hash stands for as many tokens as its block holds.
        """
        block_size = self.hash_block_size
        if isinstance(block_hashes, BlockHashListWithBlockSize):
            block_size *= block_hashes.scale_factor
        for run in _unbroken_runs(stored):
            self.events.stored(
                [block_hashes[index] for index in run],
                # The parent is logical: the physical block before may be the null block by now.
                block_hashes[run.start - 1] if run.start > 0 else None,
                request.all_token_ids[run.start * block_size : run.stop * block_size],
                block_size,
                group_id,
                lora=request.lora_request,
                extra_keys=event_extra_keys(request, [i * block_size for i in run], block_size),
            )


def _unbroken_runs(indices: Sequence[int]) -> Iterator[range]:
    """Cut ascending indices into ranges without gaps."""
    start = 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or indices[i] != indices[i - 1] + 1:
            yield range(indices[start], indices[i - 1] + 1)
            start = i
