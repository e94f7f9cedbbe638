"""Sliding-window attention: a token attends to the ``window`` tokens that end with itself."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
from vllm.v1.core.managers.base import SingleTypeKVCacheManager
from vllm.v1.core.retention_masks import (
    num_window_tail_blocks,
    pinned_tail,
    sliding_window_block_mask,
)
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from vllm.v1.request import Request


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Tables of a group that needs the last ``sliding_window - 1`` tokens to go on."""

    def __init__(
        self,
        kv_cache_spec: SlidingWindowSpec,
        block_pool: BlockPool,
        enable_caching: bool,
        kv_cache_group_id: int,
        scheduler_block_size: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        max_admission_blocks_per_request: int | None = None,
    ) -> None:
        super().__init__(
            kv_cache_spec,
            block_pool,
            enable_caching,
            kv_cache_group_id,
            scheduler_block_size,
            dcp_world_size,
            pcp_world_size,
            max_admission_blocks_per_request,
        )
        self.sliding_window = kv_cache_spec.sliding_window
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
        pinned = self.block_pool.pinned
        assert pinned is not None
        request_id = request.request_id
        if num_new_blocks >= pinned.min_drop_blocks:
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
                pinned.pin(tail)

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
        pinned = self.block_pool.pinned
        if pinned is not None:
            tail = self._tails.pop(request_id, ())
            if len(removed) >= pinned.min_drop_blocks:
                pinned.pin(tail)
            else:
                # From here on blocks of the tail may be gone: it is not remembered any longer.
                self._open_boundaries.pop(request_id, None)
        self.block_pool.free_unhashed_first(removed)

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: KVCacheSpec,
        use_eagle: bool,
        retention_interval: int | None = None,
        num_prompt_tokens: int | None = None,
    ) -> list[bool] | None:
        """Return which blocks of ``[start_block, end_block)`` a hit can reach; None for all."""
        assert isinstance(kv_cache_spec, SlidingWindowSpec)
        return sliding_window_block_mask(
            start_block,
            end_block,
            block_size=kv_cache_spec.block_size,
            window=kv_cache_spec.sliding_window,
            alignment_tokens=alignment_tokens,
            use_eagle=use_eagle,
            retention_interval=retention_interval,
            num_prompt_tokens=num_prompt_tokens,
        )

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Find the right-most aligned end whose window below it is cached.

        An end whose window reaches block 0 needs no more than the blocks there are.
        """
        assert isinstance(kv_cache_spec, SlidingWindowSpec)
        block_size = kv_cache_spec.block_size * dcp_world_size * pcp_world_size
        need = num_window_tail_blocks(kv_cache_spec.sliding_window, block_size, drop_eagle_block)
        num_blocks = min(max(max_length, 0) // block_size, len(block_hashes))
        # Blocks between two lengths a hit may have.
        step = alignment_tokens // gcd(alignment_tokens, block_size)
        far, rows = _find_last_run(
            block_hashes,
            num_blocks,
            # A window of one token needs nothing below it, but without a block there is no hit.
            max(need, 1),
            (step, int(drop_eagle_block)),
            kv_cache_group_ids,
            block_pool,
        )
        end = far + len(rows)
        if 0 < end < need:
            end -= end % step
        if drop_eagle_block and end:
            end -= 1
        end -= end % step
        # Only null blocks are left of the run: no loop over them, there may be thousands.
        skipped = [block_pool.null_block] * min(far, end)
        kept = rows[: max(end - far, 0)]
        return tuple(skipped + [row[i] for row in kept] for i in range(len(kv_cache_group_ids)))


def _find_last_run(
    block_hashes: BlockHashList,
    num_blocks: int,
    need: int,
    step_and_phase: tuple[int, int],
    kv_cache_group_ids: list[int],
    block_pool: BlockPool,
) -> tuple[int, list[list[KVCacheBlock]]]:
    """Find the last admissible end whose ``need`` blocks below it are all cached.

    Returns:
        The index of the first of them and, per block from there to the end, one per group.

    An end is admissible where ``end % step == phase % step``. The far block of each candidate
    window is looked up first: if it is missing, no end less than ``need`` blocks above it can do,
    so that a prompt nobody has seen costs ``num_blocks / need`` lookups.

        end            v                need 4:  F missing -> next end <= F
        blocks  . . F . . . |           else walk from end - 1 down to F; X missing -> end <= X
    """
    step, phase = step_and_phase
    end = num_blocks - (num_blocks - phase) % step
    while end > 0:
        far = max(end - need, 0)
        missing = far
        far_row = block_pool.get_cached_block(block_hashes[far], kv_cache_group_ids)
        if far_row is not None:
            rows = []
            for missing in range(end - 1, far, -1):
                row = block_pool.get_cached_block(block_hashes[missing], kv_cache_group_ids)
                if row is None:
                    break
                rows.append(row)
            else:
                rows.append(far_row)
                rows.reverse()
                return far, rows
        end = missing - (missing - phase) % step
    return 0, []
