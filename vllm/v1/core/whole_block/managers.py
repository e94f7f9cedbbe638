"""The managers of full and of windowed attention: a group's tables, hits at whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import gcd
from typing import TYPE_CHECKING, ClassVar

from vllm.exceptions import ConfigError
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.whole_block.manager_base import HitQuery, SingleTypeKVCacheManager
from vllm.v1.core.whole_block.masks import num_window_tail_blocks, pinned_tail
from vllm.v1.kv_cache_interface import KVCacheSpec, SinkFullAttentionSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from vllm.v1.request import Request


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

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = None
    ) -> None:
        """Cache what a hit can reach; with pinning, also what a pin would keep."""
        if self.block_pool.pins is None:
            super().cache_blocks(request, num_tokens, retention_interval)
            return
        num_done = self.num_cached_block.get(request.request_id, 0)
        super().cache_blocks(request, num_tokens, retention_interval)
        num_new = num_tokens // self.block_size - num_done
        if num_new > 0:
            self._cache_tail(request, num_tokens, num_new)

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
