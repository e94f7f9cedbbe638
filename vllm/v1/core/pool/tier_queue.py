"""What the pool asks of the free blocks of a tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vllm.v1.core.values.free_block_queue import KVCacheBlock


class TierQueue(Protocol):
    """What the pool asks of the free blocks of a tier."""

    @property
    def num_free_blocks(self) -> int:
        """How many there are."""
        ...

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks last."""
        ...

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out."""
        ...

    def popleft(self) -> KVCacheBlock:
        """Take the next block; there is one."""
        ...

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Return all blocks; for tests and checks."""
        ...


class FillerQueue(TierQueue, Protocol):
    """Blocks that are given up first, the newest before the others."""

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks first."""
        ...
