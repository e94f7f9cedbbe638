"""Checkpoints: the window rows a request needs to resume at a boundary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.retention.tiers import Tier


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The window rows a request needs to resume at one boundary. Written by ``CheckpointStore``.

    Attributes:
        prefix_hash: Hash of the prefix of ``position`` tokens.
        position: The boundary, in tokens.
        blocks: Per window group (in group order) the blocks for rows
            ``[first_needed(position), position)``; empty where nothing is needed.
        next_token: The token that followed, if it was known: a drafter's last row depends on it.
        standing: What it is to the cache.
        is_lean: Whether it needs no state of long compressors; else its lean one is near.
        kind: What the policy counts it as; None: not at all.
        num_hits: Requests admitted here.
        users: Requests that run and made it, to be kept, or resumed here.
        older: The checkpoints that the request which made this one began at.
        tier: Where its free blocks stand, pins left out: as the policy says of the above.
    """

    prefix_hash: BlockHash
    position: int
    blocks: tuple[tuple[KVCacheBlock, ...], ...]
    next_token: int | None = None
    standing: CheckpointStanding = CheckpointStanding.LEFT
    is_lean: bool = True
    kind: int | None = None
    num_hits: int = 0
    users: tuple[str, ...] = ()
    older: tuple[Checkpoint, ...] = ()
    tier: Tier = Tier.REGULAR

    def all_blocks(self) -> Iterable[KVCacheBlock]:
        """Iterate over the blocks of all groups."""
        return chain.from_iterable(self.blocks)
