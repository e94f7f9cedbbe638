"""Cached prefixes that another engine reads, and those it writes here: where their rows lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from vllm.exceptions import InvariantError
from vllm.v1.core.pool.block_index import BlockIndex
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.values.free_block_queue import KVCacheBlock


@dataclass(frozen=True, slots=True)
class PrefixBlocks:
    """Where the rows lie that a request needs to resume behind a prefix.

    Attributes:
        num_tokens: Tokens of the prefix.
        dense_from: Rows of dense groups below this token are left out: they are there already.
        bases: Per KV cache group the index (token position // block size) of its first block.
        block_ids: Per group the ids of blocks base, base + 1, ...; empty: nothing is needed.
        next_token: The token that followed when a drafter's last row was made, if it was known.
    """

    num_tokens: int
    dense_from: int
    bases: tuple[int, ...]
    block_ids: tuple[tuple[int, ...], ...]
    next_token: int | None = None


@dataclass(frozen=True, slots=True)
class PlacedCheckpoint:
    """A checkpoint, as those see it who keep prefixes elsewhere.

    Attributes:
        position: The boundary, in tokens.
        standing: What it is to the cache.
        next_token: The token that followed, if it is known.
    """

    position: int
    standing: CheckpointStanding
    next_token: int | None


class HeldBlocks(Protocol):
    """The blocks of a pool, as holds see them."""

    index: BlockIndex

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold cached blocks for one more user."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Give blocks back, in the order in which they shall be reused."""
        ...


class Exports:
    """The prefixes that are held for other engines to read.

    Owns: a hold on each of their blocks, from ``hold`` to ``release``.

    Args:
        pool: Where the blocks are.
    """

    def __init__(self, pool: HeldBlocks) -> None:
        self._pool = pool
        self._held: dict[str, tuple[KVCacheBlock, ...]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, name: str, tables: Sequence[Sequence[KVCacheBlock]]) -> None:
        """Keep blocks from being reused; ``name`` is not in use.

        Raises:
            InvariantError: Nothing is cached in one: another engine would read what is not there.
        """
        assert name not in self._held
        blocks = tuple(block for block in chain.from_iterable(tables) if not block.is_null)
        for block in blocks:
            if not self._pool.index.is_cached(block):
                raise InvariantError(f"block {block.block_id} is exported, and nothing is in it")
        self._pool.touch(blocks)
        self._held[name] = blocks

    def release(self, name: str) -> bool:
        """Let go of a prefix; what is cached of it stays cached. False: there is none.

        Raises:
            InvariantError: Somebody gave back a block that was still read.
        """
        blocks = self._held.pop(name, None)
        if blocks is None:
            return False
        for block in blocks:
            if block.ref_cnt < 1:
                raise InvariantError(f"block {block.block_id} was given back while it was exported")
        # A sequence's tail is reused before its head.
        self._pool.free_blocks(tuple(reversed(blocks)))
        return True

    def held_blocks(self) -> Iterator[KVCacheBlock]:
        """Iterate over the blocks, once per hold."""
        return chain.from_iterable(self._held.values())
