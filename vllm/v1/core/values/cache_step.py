"""What passes between the scheduler, the KV cache manager and a coordinator in one step.

scheduler   -- look_up(request) -->  Lookup         what is cached; takes no block
            -- StepRequest ------->  StepPlan       what to take; changes nothing
                                     commit(plan)   takes it
            <-- StepWork ----------                 what the worker must know and do first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm.utils.hashing import BlockHash
from vllm.v1.core.retention.policy import Spare
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.values.hit import PartialAdoption, PrefixHit
from vllm.v1.core.values.kv_cache_blocks import KVCacheBlocks

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Lookup(NamedTuple):
    """What the cache holds of a request.

    Attributes:
        blocks: The hit's blocks by group, whole ones only.
        num_tokens: Tokens of the hit.
    """

    blocks: KVCacheBlocks
    num_tokens: int = 0

    @property
    def hit(self) -> PrefixHit | None:
        """With hits at one unit, all that the hit needs."""
        return self.blocks.hit


@dataclass(slots=True)
class StepRequest:
    """One step of one request, as the scheduler wants it.

        | computed | hit | external |  new  | lookahead |
        |<-------- start --------->|               positions, in tokens
        |<-------- main_end -------------->|
        |<-------- alloc_end ------------------------->|

    Attributes:
        request: The request; before its first step it holds nothing.
        start: Tokens computed before the step, hits and loaded tokens included.
        main_end: Tokens computed after it, drafts included.
        end: The same without drafts, which are not known to be accepted.
        alloc_end: Tokens that need a slot, a drafter's lookahead included.
        lookup: What its first step resumes from; None: nothing, or not the first.
        num_external_tokens: Tokens behind the hit that a connector loads.
        num_encoder_tokens: Encoder tokens, for cross attention.
        delays_caching: Whether nothing is published yet: a connector is still writing.
    """

    request: Request
    start: int
    main_end: int
    end: int
    alloc_end: int
    lookup: Lookup | None = None
    num_external_tokens: int = 0
    num_encoder_tokens: int = 0
    delays_caching: bool = False


@dataclass(slots=True)
class StepPlan:
    """What one request's step takes. Making one changes nothing.

    Attributes:
        step: What was asked for.
        num_blocks: Free blocks that leave the pool, those of the hit included.
        num_new_blocks: Of those, blocks to take for new rows and copies.
        is_short: Whether it appends to tables and publishes nothing, as a decode step.
        num_dense: Per dense group the blocks to take, copies' destinations left out.
        window_indices: Per window group the block indices to fill.
        boundaries: Boundaries inside the step whose checkpoints it leaves behind.
        spares: Boundaries of checkpoints that nobody asked for, besides.
        publishes: Whether the step completes a unit.
        first: What a request's first step takes besides.
    """

    step: StepRequest
    num_blocks: int = 0
    num_new_blocks: int = 0
    is_short: bool = False
    num_dense: Sequence[int] = ()
    window_indices: Sequence[Sequence[int]] = ()
    boundaries: tuple[int, ...] = ()
    spares: Sequence[Spare] = ()
    publishes: bool = False
    first: FirstStep | None = None


@dataclass(frozen=True, slots=True)
class FirstStep:
    """What a request's first step takes besides, from its hit if it has one.

    Attributes:
        hit: The hit; None: it resumes nowhere.
        wanted: Boundaries whose checkpoints the request keeps.
        junctions: Those of them where prompts were seen to part.
        parts_at_hit: Whether prompts were seen to part at the hit's checkpoint.
        partials: What becomes of the hit's partly covered blocks.
        rebuilt: Window groups whose last row of the hit is made anew, in a private copy.
        full_from: From this boundary on checkpoints hold the rows of all layers; see
            ``RowBounds.output_from``. 0: all do.
    """

    hit: PrefixHit | None
    wanted: set[int]
    junctions: set[int]
    parts_at_hit: bool
    partials: tuple[PartialAdoption, ...]
    rebuilt: tuple[int, ...]
    full_from: int = 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A whole-block copy that the next step runs before its forward pass; both ends are held."""

    group_id: int
    source: KVCacheBlock
    destination: KVCacheBlock
    keys: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class WindowTable:
    """The live blocks of one request in one window group, replacing what the worker held.

    Attributes:
        group_id: Index of the KV cache group.
        base: Index (token position // block size) of the first block.
        block_ids: Ids of blocks base, base + 1, ...; 0 marks rows that are not stored.
    """

    group_id: int
    base: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class RowBounds:
    """What a step writes and reads that computes tokens again whose rows partly exist.

    Attributes:
        write_from: By KV cache group, the position from which rows are written.
        read_from: The first position whose window rows are stored; attention sees none before.
        output_from: The first position that anything reads of all layers; before it some may leave
            rows out. 0: all is read.
    """

    write_from: tuple[int, ...]
    read_from: int = 0
    output_from: int = 0


@dataclass(frozen=True, slots=True)
class StepWork:
    """What the worker must know of the cache before it runs a step.

    Attributes:
        copies: (source, destination) block ids to copy before the forward pass.
        window_tables: Window tables that changed, by request.
        drafter_rebuilds: Requests whose drafter makes its hit's last row anew, and the block that
            row was in.
        new_block_ids: Blocks to zero first: those taken in this step, where pages must be, and
            those that held what nobody may read again.
        row_bounds: Requests that compute window rows again, and what they write and read.
    """

    copies: list[tuple[int, int]] = field(default_factory=list)
    window_tables: dict[str, tuple[WindowTable, ...]] = field(default_factory=dict)
    drafter_rebuilds: dict[str, int] = field(default_factory=dict)
    new_block_ids: list[int] | None = None
    row_bounds: dict[str, RowBounds] = field(default_factory=dict)


# What most steps take of it: shared, and never written.
NO_WORK = StepWork()
