"""A request's blocks by group, as the scheduler passes them about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, overload

from vllm.v1.core.values.free_block_queue import KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.core.values.hit import PrefixHit


@dataclass
class KVCacheBlocks:
    """Blocks by KV-cache group; hides from the scheduler how many groups there are.

    Attributes:
        blocks: ``blocks[g][i]`` is group g's i-th block. Groups may differ in length.
        hit: Where they are a lookup's: all that the hit needs, and what the lookup learnt.
    """

    blocks: tuple[Sequence[KVCacheBlock], ...]
    hit: PrefixHit | None = field(default=None, repr=False, compare=False)

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Return both, one after the other, group by group."""
        return KVCacheBlocks(
            tuple([*mine, *theirs] for mine, theirs in zip(self.blocks, other.blocks, strict=True))
        )

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...

    @overload
    def get_block_ids(self, allow_none: Literal[True]) -> tuple[list[int], ...] | None: ...

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Return the ids by group.

        Args:
            allow_none: Return None if there is no block at all.
        """
        if allow_none and not any(self.blocks):
            return None
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Return the ids of blocks that are not cached, of the only group."""
        assert len(self.blocks) == 1, "Several groups: use get_unhashed_block_ids_all_groups."
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Return by group the ids of blocks that are not cached, the null block left out."""
        return [
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> KVCacheBlocks:
        """Return no blocks for as many groups."""
        return KVCacheBlocks(tuple(() for _ in self.blocks))
