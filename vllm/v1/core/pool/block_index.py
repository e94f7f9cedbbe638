"""What the block pool asks of the index of cached prefixes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from vllm.v1.core.pool.events import KVEventWriter
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.free_block_queue import KVCacheBlock


class BlockIndex(Protocol):
    """Which prefixes the blocks of a pool hold.

    ``HashIndex`` gives a full block one key; ``PrefixIndex`` a dense block one for every unit, and
    window blocks belong to checkpoints.
    """

    @property
    def events(self) -> KVEventWriter:
        """Hears of prefixes that become reusable and of those that are not any more."""
        ...

    @property
    def spare_ids(self) -> Collection[int]:
        """Ids of blocks that stand in the spare tier when free, if they carry keys."""
        ...

    def forget(self, block: KVCacheBlock, *, is_held: bool = False) -> Sequence[KVCacheBlock]:
        """Drop what a block caches: its rows are about to be overwritten, or turned out wrong.

        Args:
            block: The block.
            is_held: Whether a request may hold it; else it was free.

        Returns:
            Other blocks that serve less from now on, so that their tier may be another.
        """
        ...

    def is_cached(self, block: KVCacheBlock) -> bool:
        """Whether anything is cached in a block."""
        ...

    def tier(self, block: KVCacheBlock) -> Tier:
        """Return where a block belongs that nobody holds, pins left out."""
        ...

    def tiers(self, blocks: Sequence[KVCacheBlock]) -> Sequence[Tier]:
        """Return where many blocks belong that nobody holds."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...

    def find_faults(self, blocks: Sequence[KVCacheBlock]) -> Iterator[str]:
        """Say where index and blocks disagree (I4). Cost: O(pool)."""
        ...
