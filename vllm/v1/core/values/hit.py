"""Where a prompt can resume: checkpoints, and hits on them and on dense rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from vllm.utils.hashing import BlockHash
from vllm.v1.core.retention.rebuild import Rebuild
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.free_block_queue import KVCacheBlock


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
        session: Number of the session that made it; None: it was not named.
        is_shared: Whether another session, or one that was not named, made or used it too.
        tier: Where its free blocks stand, pins left out: as the policy says of the above.
        is_partial: Whether it lacks the rows of layers that leave some out: whoever resumes here
            must read no output for a while.
        num_behind: A spare one's: tokens behind it in the prompt that left it.
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
    session: int | None = None
    is_shared: bool = False
    tier: Tier = Tier.REGULAR
    is_partial: bool = False
    num_behind: int = 0

    def all_blocks(self) -> Iterable[KVCacheBlock]:
        """Iterate over the blocks of all groups."""
        return chain.from_iterable(self.blocks)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Where a prompt can resume, and the blocks that make it possible.

    Attributes:
        position: Tokens that need not be computed: a boundary, or 0.
        full_blocks: Per dense group the blocks that lie wholly below ``position``.
        partial_blocks: Per dense group a block that holds the rows between the last full block
            and ``position``, with its key of the last of them; None where there are no such rows.
        checkpoint: The window rows; None when ``position`` is 0, and for models without windows.
        dense_match: How far the dense groups alone matched, in tokens; without any, how far the
            prompt was seen before.
        lean_checkpoint: That of the lean boundary below ``position``, if it is another one.
        given_up: Deepest boundary that could have been resumed but for the drafter's rows; 0: none.
        rebuild: Tokens whose window rows are computed again instead, up to ``position``.
        num_saved_tokens: Tokens that this saves compared with the deepest checkpoint.
        passed: The deepest checkpoint that would have done if it held the rows of all layers; None:
            that of the hit is the deepest.
    """

    position: int
    full_blocks: tuple[list[KVCacheBlock], ...]
    partial_blocks: tuple[tuple[KVCacheBlock, BlockHash] | None, ...]
    checkpoint: Checkpoint | None
    dense_match: int
    lean_checkpoint: Checkpoint | None = None
    given_up: int = 0
    rebuild: Rebuild | None = None
    num_saved_tokens: int = 0
    passed: Checkpoint | None = None

    @property
    def is_partial(self) -> bool:
        """Whether its checkpoint lacks the rows of layers that leave some out."""
        return self.checkpoint is not None and self.checkpoint.is_partial

    @property
    def start(self) -> int:
        """Where computing goes on: at ``position``, or earlier for window rows."""
        return self.position if self.rebuild is None else self.rebuild.start

    @classmethod
    def nothing(
        cls, num_dense_groups: int, dense_match: int = 0, passed: Checkpoint | None = None
    ) -> PrefixHit:
        """Return a hit of no token."""
        empty: tuple[list[KVCacheBlock], ...] = tuple([] for _ in range(num_dense_groups))
        return cls(0, empty, (None,) * num_dense_groups, None, dense_match, passed=passed)

    def num_free_blocks(self) -> int:
        """Return how many of the blocks it needs nobody holds."""
        blocks = [block for group in self.full_blocks for block in group]
        blocks += [entry[0] for entry in self.partial_blocks if entry is not None]
        if self.checkpoint is not None:
            blocks += self.checkpoint.all_blocks()
        return len({block.block_id for block in blocks if block.ref_cnt == 0})


@dataclass(frozen=True, slots=True)
class PartialAdoption:
    """What to do with a partly covered dense block of a hit.

    Attributes:
        dense_index: Position among the dense groups.
        block: The block that holds the rows.
        keys: Its keys at or below the boundary.
        is_copy: Copy it whole into a private block; else take it as it is, because nobody holds
            it and nothing above the boundary is cached in it.
    """

    dense_index: int
    block: KVCacheBlock
    keys: tuple[BlockHash, ...]
    is_copy: bool
