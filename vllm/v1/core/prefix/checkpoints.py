"""Checkpoints: the window rows a request needs to resume at a boundary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.prefix.tiers import Tier


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The window rows a request needs to resume at one boundary. Written by ``CheckpointStore``.

    Attributes:
        prefix_hash: Hash of the prefix of ``position`` tokens.
        position: The boundary, in tokens.
        blocks: Per window group (in group order) the blocks for rows
            ``[first_needed(position), position)``; empty where nothing is needed.
        next_token: The token that followed, if it was known: a drafter's last row depends on it.
        num_hits: Requests admitted here.
        num_live: Of those, requests that still run.
        is_kept: Whether it outlives the advance of the request that made it.
        is_junction: Whether continuations were seen to part here.
        is_cold: Whether it is given up before others.
        is_spare: Whether nobody asked for it, and nobody hit it yet.
        is_filler: Of a spare one: whether it is far from the prompt's end, and goes first.
        kind: Of one that was left as a spare near a prompt's end: which of those; see ``yields``.
        is_promising: Of a spare one: whether its kind is worth keeping.
        has_maker: Whether the request that made it to be kept still runs.
        num_owners: Requests that resumed here and still run, where that puts it off.
        older: The checkpoints that the request which made this one began at.
    """

    prefix_hash: BlockHash
    position: int
    blocks: tuple[tuple[KVCacheBlock, ...], ...]
    next_token: int | None = None
    num_hits: int = 0
    num_live: int = 0
    is_kept: bool = False
    is_junction: bool = False
    is_cold: bool = False
    is_spare: bool = False
    is_filler: bool = False
    kind: int | None = None
    is_promising: bool = False
    has_maker: bool = False
    num_owners: int = 0
    older: tuple[Checkpoint, ...] = ()

    def all_blocks(self) -> Iterable[KVCacheBlock]:
        """Iterate over the blocks of all groups."""
        return chain.from_iterable(self.blocks)


def checkpoint_tier(record: Checkpoint) -> Tier:
    """Return where a checkpoint's free blocks stand, pins left out."""
    if record.is_spare:
        if record.is_promising:
            return Tier.WARM
        return Tier.FILLER if record.is_filler else Tier.SPARE
    if record.is_cold:
        return Tier.COLD
    return Tier.LIVE if record.has_maker or record.num_owners else Tier.REGULAR
