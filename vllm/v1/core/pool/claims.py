"""What waiting requests are about to hit: reused only when nothing else is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from vllm.v1.core.values.free_block_queue import KVCacheBlock


class ClaimedBlocks(Protocol):
    """The free blocks of a pool, as claims see them."""

    def rejoin(self, blocks: Sequence[KVCacheBlock], change: Callable[[], None]) -> None:
        """Let a change happen to free blocks that may put them into another tier."""
        ...


class Claims:
    """The claims of waiting requests on what they would hit.

        reused first   SCRATCH | ... | REGULAR | LIVE | CLAIMED | PINNED   reused last
                                                  <- given up, a claim at a time, the last first

    What waits is served before whatever comes later, so nothing that is cached is used sooner or
    more certainly. Claimed blocks count as free: they keep nobody from running. When nothing else
    is left, the request that came last, and will be served last, loses its claim as a whole.

    Owns: the claims.

    Args:
        pool: Where the blocks stand.
    """

    __slots__ = ("_blocks", "_claims_of", "_pool")

    def __init__(self, pool: ClaimedBlocks) -> None:
        self._pool = pool
        # By request, in the order in which they came.
        self._blocks: dict[str, tuple[KVCacheBlock, ...]] = {}
        # Block id -> the requests that claim it.
        self._claims_of: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._blocks

    def holds(self, block: KVCacheBlock) -> bool:
        """Whether a request claims the block."""
        return block.block_id in self._claims_of

    def claim(self, request_id: str, blocks: Iterable[KVCacheBlock]) -> None:
        """Let allocation reach blocks after all that nobody claims.

        Args:
            request_id: Who waits; it has no claim yet.
            blocks: Something is cached in each, in the order in which they shall be reused.
        """
        assert request_id not in self._blocks
        wanted = tuple(dict.fromkeys(blocks))
        if wanted:
            self._pool.rejoin(wanted, lambda: self._enter(request_id, wanted))

    def _enter(self, request_id: str, blocks: tuple[KVCacheBlock, ...]) -> None:
        self._blocks[request_id] = blocks
        for block in blocks:
            self._claims_of.setdefault(block.block_id, []).append(request_id)

    def release(self, request_id: str) -> None:
        """Give a claim up, if there is one; its free blocks become the youngest of their tiers."""
        blocks = self._blocks.get(request_id)
        if blocks is not None:
            only = [b for b in blocks if self._claims_of.get(b.block_id) == [request_id]]
            self._pool.rejoin(only, lambda: self._discard(request_id))

    def release_last(self) -> None:
        """Give up the claim of the request that came last; there is one."""
        self.release(next(reversed(self._blocks)))

    def forget(self, block: KVCacheBlock) -> None:
        """Give up the claims on a block that is about to lose what is in it."""
        for request_id in tuple(self._claims_of.get(block.block_id, ())):
            self.release(request_id)

    def drop(self, block: KVCacheBlock) -> None:
        """Take a block in which nothing is cached any more out of all claims."""
        for request_id in self._claims_of.pop(block.block_id, ()):
            self._blocks[request_id] = tuple(b for b in self._blocks[request_id] if b is not block)

    def clear(self) -> None:
        """Forget all claims."""
        self._blocks.clear()
        self._claims_of.clear()

    def _discard(self, request_id: str) -> None:
        for block in self._blocks.pop(request_id):
            claims = self._claims_of[block.block_id]
            claims.remove(request_id)
            if not claims:
                del self._claims_of[block.block_id]

    def find_faults(self) -> Iterator[str]:
        """Say where claims and blocks disagree."""
        covered: dict[int, list[str]] = {}
        for request_id, blocks in self._blocks.items():
            for block in blocks:
                covered.setdefault(block.block_id, []).append(request_id)
        if covered != self._claims_of:
            believed = sorted(self._claims_of)
            yield f"requests claim the blocks {sorted(covered)}, believed are {believed}"
