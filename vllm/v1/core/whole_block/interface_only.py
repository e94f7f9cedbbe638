"""Kinds of groups that no model served here has, for code written against the interface.

State-space layers, chunked local attention and cross attention: see docs/compat.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING, ClassVar

from vllm.utils.math_utils import cdiv
from vllm.v1.core.values.free_block_queue import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.core.whole_block.manager_base import HitQuery, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheSpec, MambaSpec

if TYPE_CHECKING:
    from vllm.v1.request import Request


class MambaManager(SingleTypeKVCacheManager):
    """Tables of a group whose block i holds the state after token ``(i + 1) * block_size``.

    In cache mode "align" a request holds the states its last two steps wrote, and blocks for
    drafts, at the end of a table otherwise null:

        chunk to 3 blocks    null null  S   d      S state, d draft (num_speculative_blocks 1)
        chunk to 6 blocks    null null  S  null null  S'  d     d moved along; S read by this step
        chunk to 9 blocks    null null null null null S' null null S"  d

    Owns: what its base owns, and per request which state the last step read.
    """

    drops_eagle_block: ClassVar[bool] = False
    minds_steps: ClassVar[bool] = True

    def _configure(self, spec: MambaSpec) -> None:
        self.num_speculative_blocks = spec.num_speculative_blocks
        self._aligned = spec.mamba_cache_mode == "align"
        # States registered in this step are written only when it runs, too late for a reader of
        # the same step: attention reads rows after all writes, a scan starts from its state.
        self.cached_blocks_this_step: set[BlockHashWithGroupId] = set()
        # "align": index of the state the last allocated step reads.
        self._last_state_index: dict[str, int] = {}
        # "align": requests that have a running state and draft blocks at their table's end.
        self._running: set[str] = set()

    # ---- sizing and allocation ---------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Return the blocks that leave the free queue, more than the pool has to make it wait.

        A hit on a state registered in this very step waits for the next.
        """
        if self.cached_blocks_this_step and any(
            block.block_hash in self.cached_blocks_this_step for block in new_computed_blocks
        ):
            return self.block_pool.num_gpu_blocks + 1
        if not self._aligned:
            return super().get_num_blocks_to_allocate(
                request_id,
                num_tokens + self.num_speculative_blocks * self.block_size,
                new_computed_blocks,
                total_computed_tokens,
                num_tokens_main_model,
                apply_admission_cap,
            )
        num_present = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        num_new = 0
        if self._num_required_aligned(num_tokens_main_model) > num_present:
            num_new = 1 if request_id in self._running else 1 + self.num_speculative_blocks
        return num_new + self._num_evictable(new_computed_blocks)

    def _num_required_aligned(self, num_tokens_main_model: int) -> int:
        # Lookahead tokens get no block of their own: with them a chunk that ends on a block's end
        # would be given the next block as its state.
        return cdiv(num_tokens_main_model, self.block_size) + self.num_speculative_blocks

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Give a request its running state and draft blocks; returns what its table grew by."""
        if not self._aligned:
            return super().allocate_new_blocks(
                request_id,
                num_tokens + self.num_speculative_blocks * self.block_size,
                num_tokens_main_model,
            )
        table = self.req_to_blocks[request_id]
        num_before = len(table)
        num_required = self._num_required_aligned(num_tokens_main_model)
        if num_required <= num_before:
            return []
        num_drafts = self.num_speculative_blocks if request_id in self._running else 0
        if num_before > 0:
            # The state this step reads: the running one, or the hit's.
            self._last_state_index[request_id] = num_before - num_drafts - 1
        state_index = num_required - self.num_speculative_blocks - 1
        table.extend([self._null_block] * (state_index - num_before))
        for i in range(num_before - num_drafts, min(num_before, state_index)):
            table.append(table[i])
            table[i] = self._null_block
        self._extend_table(table, num_required - len(table))
        self._running.add(request_id)
        return table[num_before:]

    # ---- caching and freeing -----------------------------------------------------------------

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = None
    ) -> None:
        """Cache the request's states at full blocks and remember them for this step."""
        request_id = request.request_id
        num_before = self.num_cached_block.get(request_id, 0)
        super().cache_blocks(request, num_tokens, retention_interval)
        num_after = self.num_cached_block.get(request_id, 0)
        for block in self.req_to_blocks.get(request_id, [])[num_before:num_after]:
            if block.block_hash is not None:
                self.cached_blocks_this_step.add(block.block_hash)

    def new_step_starts(self) -> None:
        """Begin a scheduling step: what the last one registered has been written."""
        super().new_step_starts()
        self.cached_blocks_this_step.clear()

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return all tokens but the last: the state after it stands for them."""
        return num_computed_tokens - 1

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Free the states no step will read again.

        Drafts among the computed tokens may yet be rejected, so they do not count.
        """
        num_tokens = max(total_computed_tokens - self.num_speculative_blocks, 0)
        super().remove_skipped_blocks(request_id, num_tokens)
        if not self._aligned:
            return
        # The state of two steps ago may stand behind nulls, where the walk above does not reach.
        index = self._last_state_index.get(request_id)
        if index is None or index >= cdiv(num_tokens, self.block_size) - 1:
            return
        table = self.req_to_blocks[request_id]
        if not table[index].is_null:
            block, table[index] = table[index], self._null_block
            self.block_pool.free_unhashed_first([block])

    def free(self, request_id: str) -> None:
        """Give all blocks of a request back, its last state to be reused first."""
        self._last_state_index.pop(request_id, None)
        self._running.discard(request_id)
        super().free(request_id)

    @classmethod
    def _find_hit(cls, spec: MambaSpec, query: HitQuery) -> tuple[list[KVCacheBlock], ...]:
        """Find the right-most cached state at an aligned length; no block is dropped."""
        assert query.num_context_ranks == 1
        block_size = spec.block_size
        step = query.alignment_tokens // gcd(query.alignment_tokens, block_size)
        num_blocks = query.num_blocks(block_size)
        for end in range(num_blocks - num_blocks % step, 0, -step):
            row = query.cached_row(end - 1)
            if row is not None:
                skipped = [query.block_pool.null_block] * (end - 1)
                return tuple([*skipped, block] for block in row)
        return tuple([] for _ in query.group_ids)


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Tables of a group whose tokens attend to those before them in their own chunk."""

    def _configure(self, spec: ChunkedLocalAttentionSpec) -> None:
        self.attention_chunk_size = spec.attention_chunk_size

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return the tokens in the chunks before the next token's.

        chunk 4, 6 computed:   0 1 2 3 | 4 5 [6] 7      skipped 4
        """
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size

    @classmethod
    def _find_hit(
        cls, spec: ChunkedLocalAttentionSpec, query: HitQuery
    ) -> tuple[list[KVCacheBlock], ...]:
        """Take the blocks of finished chunks for granted, then walk right until a miss."""
        block_size = spec.block_size
        assert not query.drop_eagle_block, "Chunked local attention has no drafter support."
        assert query.num_context_ranks == 1
        assert block_size == query.alignment_tokens, (
            "Chunked local attention needs groups of one block size to cache prefixes."
        )
        max_length = max(query.max_length, 0)
        chunk_size = spec.attention_chunk_size
        num_granted = max_length // chunk_size * chunk_size // block_size
        hit_blocks = tuple([query.block_pool.null_block] * num_granted for _ in query.group_ids)
        for i in range(num_granted, max_length // block_size):
            row = query.cached_row(i)
            if row is None:
                break
            for group_blocks, block in zip(hit_blocks, row, strict=True):
                group_blocks.append(block)
        return hit_blocks


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Tables as long as the encoder's output, written once and never shared."""

    counts_encoder_tokens: ClassVar[bool] = True
    drops_skipped_blocks: ClassVar[bool] = False

    def adopt_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], num_total_tokens: int
    ) -> None:
        """Adopt nothing: encoder entries depend on more than the request's tokens."""
        assert not new_computed_blocks

    def allocate_external_blocks(self, request_id: str, num_total_tokens: int) -> None:
        """Take nothing: a connector loads the decoder's tokens only."""

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = None
    ) -> None:
        """Refuse.

        Raises:
            ValueError: Always.
        """
        raise ValueError("Cross-attention blocks cannot be cached: turn prefix caching off.")

    @classmethod
    def _find_hit(cls, spec: KVCacheSpec, query: HitQuery) -> tuple[list[KVCacheBlock], ...]:
        """Refuse.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("Cross-attention blocks are never cached.")
