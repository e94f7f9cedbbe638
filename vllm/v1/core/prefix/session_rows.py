"""Which dense blocks only one session used: they may go first when it is over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from vllm.utils.hashing import BlockHash
from vllm.v1.core.values.free_block_queue import KVCacheBlock


class _Use(NamedTuple):
    """Who used a block's rows.

    Attributes:
        key: The block's first key when it was noted: with another, it holds other rows.
        session: The number of the only session; None: several, or requests that named none.
    """

    key: BlockHash
    session: int | None


class SessionRows:
    """Remembers of dense blocks whether one session alone used them.

    Nothing is remembered until a request names a session.

    Owns: the memory, one entry for each block at most.

    Args:
        blocks: Of the pool, by id.
    """

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        self._blocks = blocks
        self._uses: dict[int, _Use] = {}

    def note_hit(self, blocks: Iterable[KVCacheBlock], session: int | None) -> None:
        """A request resumes behind rows that others, or earlier requests of its own, left."""
        if session is None and not self._uses:
            return
        for block in blocks:
            if block.key is None:
                continue
            use = self._find(block)
            if use is None or use.session != session:
                self._uses[block.block_id] = _Use(block.key, None)

    def note_left(self, blocks: Iterable[KVCacheBlock], session: int) -> None:
        """A session leaves rows: those that nobody else is known to have used are its own."""
        for block in blocks:
            if block.key is not None and self._find(block) is None:
                self._uses[block.block_id] = _Use(block.key, session)

    def list_own(self, session: int) -> list[KVCacheBlock]:
        """Return the free blocks that only a session used, in the order for reuse: ends first."""
        own = [
            block
            for block_id, use in self._uses.items()
            if use.session == session
            and self._find(block := self._blocks[block_id]) is use
            and not block.ref_cnt
        ]
        return own[::-1]

    def clear(self) -> None:
        """Forget everything."""
        self._uses.clear()

    def _find(self, block: KVCacheBlock) -> _Use | None:
        """Return what is known of the rows that a block holds now."""
        use = self._uses.get(block.block_id)
        return use if use is not None and use.key == block.key else None
