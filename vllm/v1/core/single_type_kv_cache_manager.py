"""A group's block tables: of hits at one unit by request, of hits at whole blocks by group.

With hits at one unit a request has one table per group, ``DenseTable`` or ``LiveWindow``. With hits
at whole blocks a group has a manager that keeps the tables of all requests, by the kind of its
spec: names, registration and construction of those are here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.exceptions import ConfigError
from vllm.v1.core.geometry import GroupGeometry
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.managers.base import HitQuery, SingleTypeKVCacheManager
from vllm.v1.core.managers.interface_only import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    MambaManager,
)
from vllm.v1.core.policy.masks import (
    num_window_tail_blocks,
    pinned_tail,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CompressorStateSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    TQFullAttentionSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = [
    "ChunkedLocalAttentionManager",
    "CrossAttentionManager",
    "DenseTable",
    "FullAttentionManager",
    "LiveWindow",
    "MambaManager",
    "SingleTypeKVCacheManager",
    "SinkFullAttentionManager",
    "SlidingWindowManager",
    "get_manager_for_kv_cache_spec",
    "register_all_kvcache_specs",
]


# ---- tables of one request, hits at one unit -------------------------------------------------


class DenseTable:
    """One request's blocks of a group that keeps every row.

    Owns: ``blocks``; block i covers tokens ``[i, i + 1) * block_size``.
    """

    __slots__ = ("blocks", "geometry")

    def __init__(self, geometry: GroupGeometry) -> None:
        self.geometry = geometry
        self.blocks: list[KVCacheBlock] = []

    def num_missing(self, alloc_end: int, num_adopted: int = 0) -> int:
        """Return the blocks to take so that rows of tokens below ``alloc_end`` have a slot."""
        missing = self.geometry.num_dense_blocks(alloc_end) - len(self.blocks) - num_adopted
        return missing if missing > 0 else 0

    def capacity(self) -> int:
        """Return up to which position the rows of tokens have slots."""
        return len(self.blocks) * self.geometry.block_size + self.geometry.ratio - 1

    def blocks_below(self, ends: Iterable[int]) -> list[KVCacheBlock]:
        """Return for each position the block that holds the last row of the tokens below it."""
        blocks, block_size = self.blocks, self.geometry.block_size
        return [blocks[(end - 1) // block_size] for end in ends]


class LiveWindow:
    """One request's live range of a group that needs only the tail.

    Owns: block ``base + i`` is ``blocks[i]``, the null block where nothing is stored.

    Attributes:
        is_dirty: Whether the worker has not seen the table as it is now.
    """

    __slots__ = ("_null_block", "base", "blocks", "geometry", "is_dirty")

    def __init__(self, geometry: GroupGeometry, null_block: KVCacheBlock) -> None:
        self.geometry = geometry
        self.base = 0
        self.blocks: list[KVCacheBlock] = []
        self.is_dirty = True
        self._null_block = null_block

    def adopt(self, position: int, blocks: Sequence[KVCacheBlock]) -> None:
        """Begin with a checkpoint's blocks, already touched for the request."""
        assert not self.blocks
        span = self.geometry.rows_below(position)
        assert len(span) == len(blocks)
        self.base, self.blocks = span.start, list(blocks)

    def replace_last(self, block: KVCacheBlock) -> KVCacheBlock:
        """Put a block in the place of the last one; returns that."""
        replaced, self.blocks[-1] = self.blocks[-1], block
        self.is_dirty = True
        return replaced

    def drop_below(self, position: int) -> list[KVCacheBlock]:
        """Take out the blocks that going on at ``position`` does not need, the last one first."""
        # Where nothing is needed below the position, the whole table is below it.
        end = self.geometry.first_needed(position) // self.geometry.block_size - self.base
        if end <= 0 or not self.blocks:
            return []
        end = min(end, len(self.blocks))
        # Between checkpoints far from each other most of a table is null.
        null_block = self._null_block
        dropped = [block for block in self.blocks[end - 1 :: -1] if block is not null_block]
        del self.blocks[:end]
        self.base += end
        # The worker need not hear of it: it reads nothing below first_needed.
        return dropped

    def find_missing(self, needed: Sequence[int], adopted: range = range(0)) -> list[int]:
        """Return which of the needed block indices are neither held nor about to be adopted."""
        if not self.blocks:
            return [i for i in needed if i not in adopted]
        base, blocks = self.base, self.blocks
        end = base + len(blocks)
        return [i for i in needed if not (base <= i < end) or blocks[i - base].is_null]

    def insert(self, indices: Sequence[int], blocks: Sequence[KVCacheBlock]) -> None:
        """Place new blocks at ascending block indices, null blocks in between."""
        if not indices:
            return
        if not self.blocks:
            self.base = indices[0]
        below = self.base - indices[0]
        if below > 0:
            # Another boundary inside a chunk that is not computed yet.
            self.blocks[:0] = [self._null_block] * below
            self.base = indices[0]
        gap = indices[-1] + 1 - self.base - len(self.blocks)
        if gap > 0:
            self.blocks.extend([self._null_block] * gap)
        for index, block in zip(indices, blocks, strict=True):
            self.blocks[index - self.base] = block
        self.is_dirty = True

    def find_appended(self, end: int, alloc_end: int) -> range | None:
        """Return the block indices a short step appends.

        Args:
            end: Tokens computed when the step ends, drafts not counted.
            alloc_end: ``end`` with drafts and lookahead.

        Returns:
            None if the step would leave a hole, which ``find_missing`` can deal with.
        """
        if self.blocks and alloc_end <= self.capacity():
            return range(0)  # most groups, most times
        needed = self.geometry.block_range(self.geometry.first_needed(end), alloc_end)
        if not self.blocks or not needed:
            return needed
        held = self.base + len(self.blocks)
        return range(held, max(held, needed.stop)) if needed.start <= held else None

    def capacity(self) -> int:
        """Return the position up to which the table has blocks; 0 for an empty table."""
        return (self.base + len(self.blocks)) * self.geometry.block_size if self.blocks else 0

    @property
    def end(self) -> int:
        """The index behind the last block."""
        return self.base + len(self.blocks)

    def blocks_for(self, position: int) -> tuple[KVCacheBlock, ...]:
        """Return the blocks a checkpoint at ``position`` needs; all are held."""
        span = self.geometry.rows_below(position)
        if not span:
            return ()
        found = tuple(self.blocks[span.start - self.base : span.stop - self.base])
        assert len(found) == len(span)
        return found


# ---- managers of groups, hits at whole blocks ------------------------------------------------


class FullAttentionManager(SingleTypeKVCacheManager):
    """Tables of a group that needs all blocks from the first to the last."""

    is_downward_closed: ClassVar[bool] = True
    drops_skipped_blocks: ClassVar[bool] = False

    @classmethod
    def _find_hit(cls, spec: KVCacheSpec, query: HitQuery) -> tuple[list[KVCacheBlock], ...]:
        """Walk left to right until a miss, drop for the drafter, align down."""
        block_size = spec.block_size * query.num_context_ranks
        get_cached_block = query.block_pool.get_cached_block
        rows: list[list[KVCacheBlock]] = []
        for block_hash in islice(query.block_hashes, max(query.max_length, 0) // block_size):
            row = get_cached_block(block_hash, query.group_ids)
            if row is None:
                break
            rows.append(row)
        num_blocks = len(rows)
        if query.drop_eagle_block and num_blocks:
            num_blocks -= 1
        while num_blocks * block_size % query.alignment_tokens:
            num_blocks -= 1
        return tuple([row[i] for row in rows[:num_blocks]] for i in range(len(query.group_ids)))

    def get_num_common_prefix_blocks(self, request_id: str) -> int:
        """Return how many leading blocks are held by every request that has blocks."""
        num_requests = len(self.req_to_blocks)
        table = self.req_to_blocks.get(request_id, ())
        if num_requests == 1:
            # Asked in every step: a request that runs alone must not pay for its whole context.
            return len(table)
        num_common = 0
        for block in table:
            if block.ref_cnt != num_requests:
                break
            num_common += 1
        return num_common


class SinkFullAttentionManager(FullAttentionManager):
    """Tables of a full-attention group whose sink entries live in blocks held for good.

    Owns: ``sink_blocks``.
    """

    def _configure(self, spec: SinkFullAttentionSpec) -> None:
        sink_len = spec.sink_len
        if not sink_len or sink_len < 0 or sink_len % self.block_size:
            raise ConfigError(
                f"sink_len={sink_len} is not a positive multiple of the block size "
                f"{self.block_size}: choose a block size that divides it."
            )
        self.sink_blocks = self.block_pool.reserve_blocks(sink_len // self.block_size)


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Tables of a group that needs the last ``sliding_window - 1`` tokens to go on.

    Attributes:
        pin_min_drop_blocks: With pinning: blocks a window must drop at once to pin its next ones.
    """

    pin_min_drop_blocks = 0

    def _configure(self, spec: SlidingWindowSpec) -> None:
        self.sliding_window = spec.sliding_window
        # With pinning: by request, the blocks to resume at the last boundary it cached.
        self._tails: dict[str, list[KVCacheBlock]] = {}
        # The boundary, where that tail lacks the block a drafter's hit drops: it is not full yet.
        self._open_boundaries: dict[str, int] = {}

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return the tokens before the window of the next token.

        window 4, 7 computed:   0 1 2 3 | 4 5 6 [7]     skipped 4 = 7 - 4 + 1
        """
        return max(0, num_computed_tokens - self.sliding_window + 1)

    def free(self, request_id: str) -> None:
        """Give all blocks back: what no hit can find to the front, the cached tail to the back."""
        self._tails.pop(request_id, None)
        self._open_boundaries.pop(request_id, None)
        table = self.req_to_blocks.pop(request_id, [])
        self.block_pool.free_unhashed_first(
            [block for block in reversed(table) if not block.is_null]
        )
        self.num_cached_block.pop(request_id, None)

    def _cache_tail(self, request: Request, num_tokens: int, num_new_blocks: int) -> None:
        """Cache the tail to resume at the last boundary, whatever the interval masks.

        A pin without a hash would serve nobody. The tail is remembered as blocks, because the drop
        that pins it may take its first ones from the table: the boundary is at or below the tokens
        computed.

            boundary    v                 tail needed there   # # #
            table  . . . . . . |          still held              # # # .
        """
        request_id = request.request_id
        if num_new_blocks >= self.pin_min_drop_blocks:
            boundary = num_tokens - num_tokens % self.scheduler_block_size
            self._tails[request_id] = self._cache_tail_at(request, boundary, num_tokens)
            return
        # A decode step, or a chunk so short that its drop will pin nothing: but it may have filled
        # the block that a drafter's hit drops.
        boundary = self._open_boundaries.get(request_id, num_tokens)
        if num_tokens >= boundary + self.block_size:
            tail = self._cache_tail_at(request, boundary, num_tokens)
            if request_id in self._tails:
                self._tails[request_id] = tail
            else:
                # The drop has been; the rest of the tail is pinned.
                self._pin(tail)

    def _cache_tail_at(
        self, request: Request, boundary: int, num_tokens: int
    ) -> list[KVCacheBlock]:
        """Cache and return the blocks to resume at a boundary, as far as they are full."""
        first, end = pinned_tail(
            boundary,
            num_tokens,
            block_size=self.block_size,
            window=self.sliding_window,
            use_eagle=self.use_eagle,
        )
        table = self.req_to_blocks[request.request_id]
        tail = table[first:end]
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=table,
            num_cached_blocks=first,
            num_full_blocks=end,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
            block_mask=[block.block_hash is None for block in tail],
        )
        if self.use_eagle and end * self.block_size <= boundary:
            self._open_boundaries[request.request_id] = boundary
        else:
            self._open_boundaries.pop(request.request_id, None)
        return tail

    def _drop(self, request_id: str, removed: Sequence[KVCacheBlock]) -> None:
        """Free blocks below the window; a large drop pins the tail of the last boundary."""
        if self.block_pool.pins is not None:
            tail = self._tails.pop(request_id, ())
            if len(removed) >= self.pin_min_drop_blocks:
                self._pin(tail)
            else:
                # From here on blocks of the tail may be gone: it is not remembered any longer.
                self._open_boundaries.pop(request_id, None)
        self.block_pool.free_unhashed_first(removed)

    def _pin(self, tail: Sequence[KVCacheBlock]) -> None:
        """Pin the blocks of a tail one by one; one without a hash serves no hit."""
        pins = self.block_pool.pins
        assert pins is not None
        pins.pin({b: (b,) for b in tail if b.block_hash is not None and not b.is_null})

    @classmethod
    def _window_of(cls, spec: SlidingWindowSpec) -> int:
        return spec.sliding_window

    @classmethod
    def _find_hit(cls, spec: SlidingWindowSpec, query: HitQuery) -> tuple[list[KVCacheBlock], ...]:
        """Find the right-most aligned end whose window below it is cached.

        An end whose window reaches block 0 needs no more than the blocks there are.
        """
        drops = query.drop_eagle_block
        block_size = spec.block_size * query.num_context_ranks
        need = num_window_tail_blocks(spec.sliding_window, block_size, drops)
        # Blocks between two lengths a hit may have.
        step = query.alignment_tokens // gcd(query.alignment_tokens, block_size)
        # A window of one token needs nothing below it, but without a block there is no hit.
        far, rows = query.find_last_run(
            query.num_blocks(block_size), max(need, 1), step, int(drops)
        )
        end = far + len(rows)
        if 0 < end < need:
            end -= end % step
        if drops and end:
            end -= 1
        end -= end % step
        # Only null blocks are left of the run: no loop over them, there may be thousands.
        skipped = [query.block_pool.null_block] * min(far, end)
        kept = rows[: max(end - far, 0)]
        return tuple(skipped + [row[i] for row in kept] for i in range(len(query.group_ids)))


# ---- registration and construction -----------------------------------------------------------

# (spec, its manager, the spec whose subclasses may share a group with it)
_BUILT_IN: tuple[
    tuple[type[KVCacheSpec], type[SingleTypeKVCacheManager], type[KVCacheSpec]], ...
] = (
    (FullAttentionSpec, FullAttentionManager, FullAttentionSpec),
    (TQFullAttentionSpec, FullAttentionManager, FullAttentionSpec),
    (MLAAttentionSpec, FullAttentionManager, FullAttentionSpec),
    (HiddenStateCacheSpec, FullAttentionManager, FullAttentionSpec),
    (SinkFullAttentionSpec, SinkFullAttentionManager, FullAttentionSpec),
    (SlidingWindowSpec, SlidingWindowManager, SlidingWindowSpec),
    (SlidingWindowMLASpec, SlidingWindowManager, SlidingWindowMLASpec),
    (CompressorStateSpec, SlidingWindowManager, CompressorStateSpec),
    (ChunkedLocalAttentionSpec, ChunkedLocalAttentionManager, ChunkedLocalAttentionSpec),
    (MambaSpec, MambaManager, MambaSpec),
    (CrossAttentionSpec, CrossAttentionManager, CrossAttentionSpec),
)


def register_all_kvcache_specs(vllm_config: VllmConfig | None) -> None:
    """Register the built-in specs, then those of the current platform.

    Args:
        vllm_config: Handed to the platform; None registers the built-ins only.
    """
    for spec_class, manager_class, base in _BUILT_IN:
        KVCacheSpecRegistry.register(spec_class, manager_class, base)
    if vllm_config is not None:
        # Finding the platform may load torch, which v1/core does without.
        from vllm.platforms import current_platform  # noqa: PLC0415

        current_platform.register_custom_kv_cache_specs(vllm_config)


def get_manager_for_kv_cache_spec(
    kv_cache_spec: KVCacheSpec,
    max_num_batched_tokens: int,
    max_model_len: int,
    **kwargs: Any,
) -> SingleTypeKVCacheManager:
    """Build the manager registered for a spec.

    Args:
        kv_cache_spec: The group's spec.
        max_num_batched_tokens: Tokens of a step; bounds what a window group holds at once.
        max_model_len: Tokens of a request.
        **kwargs: The manager's other constructor arguments.

    Raises:
        ConfigError: Nothing is registered for the spec.
    """
    manager_class = KVCacheSpecRegistry.get_manager_class(kv_cache_spec)
    if manager_class is None:
        raise ConfigError(
            f"Unsupported KV cache spec type {type(kv_cache_spec).__name__}: register it with "
            "register_kv_cache_spec."
        )
    if isinstance(kv_cache_spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        kwargs["max_admission_blocks_per_request"] = kv_cache_spec.max_admission_blocks_per_request(
            max_num_batched_tokens, max_model_len
        )
    return manager_class(kv_cache_spec, **kwargs)
