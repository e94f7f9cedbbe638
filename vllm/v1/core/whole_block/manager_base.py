"""What the managers of all attention kinds share: a group's request -> blocks tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.whole_block.masks import sliding_window_block_mask

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request


@dataclass(slots=True)
class HitQuery:
    """A lookup in groups of one spec; see ``find_longest_cache_hit``."""

    block_hashes: BlockHashList
    max_length: int
    group_ids: list[int]
    block_pool: BlockPool
    drop_eagle_block: bool
    alignment_tokens: int
    num_context_ranks: int

    def cached_row(self, index: int) -> list[KVCacheBlock] | None:
        """Return the groups' blocks at an index, or None unless all are cached."""
        return self.block_pool.get_cached_block(self.block_hashes[index], self.group_ids)

    def num_blocks(self, block_size: int) -> int:
        """Return the most blocks a hit can have."""
        return min(max(self.max_length, 0) // block_size, len(self.block_hashes))

    def find_last_run(
        self, num_blocks: int, need: int, step: int, phase: int
    ) -> tuple[int, list[list[KVCacheBlock]]]:
        """Find the last admissible end whose ``need`` blocks below it are all cached.

        Returns:
            The index of the first of them and, per block from there to the end, one per group.

        An end is admissible where ``end % step == phase % step``. The far block of each candidate
        window is looked up first: if it is missing, no end less than ``need`` blocks above it can
        do, so that a prompt nobody has seen costs ``num_blocks / need`` lookups.

            end            v                need 4:  F missing -> next end <= F
            blocks  . . F . . . |           else walk from end - 1 down to F; X missing -> end <= X
        """
        end = num_blocks - (num_blocks - phase) % step
        while end > 0:
            far = max(end - need, 0)
            missing = far
            far_row = self.cached_row(far)
            if far_row is not None:
                rows = []
                for missing in range(end - 1, far, -1):
                    row = self.cached_row(missing)
                    if row is None:
                        break
                    rows.append(row)
                else:
                    rows.append(far_row)
                    rows.reverse()
                    return far, rows
            end = missing - (missing - phase) % step
        return 0, []


class SingleTypeKVCacheManager:
    """Block tables of one KV-cache group.

    A kind of its own answers ``find_longest_cache_hit``, or ``_find_hit``, which it asks.

    A table is a list indexed by block position, padded with the null block where nothing is stored:

        block    0     1     2     3     4     5
        table  null  null   17     4    23    23'     null: skipped, below the window
               |<-- skipped -->|<- held, cached ->|<- held, not yet full

    Owns: ``req_to_blocks``, ``num_cached_block``.

    Args:
        kv_cache_spec: The group's spec.
        block_pool: The pool shared by all groups.
        enable_caching: Whether prefix caching is on.
        kv_cache_group_id: The group's index, part of its hash keys.
        scheduler_block_size: Tokens on whose multiples a hit of all groups ends.
        dcp_world_size: Ranks among which decode context parallelism spreads a block's tokens.
        pcp_world_size: The same for prefill.
        max_admission_blocks_per_request: Most blocks a request holds at once; None if that grows
            with its length.
    """

    # Whether tables follow the encoder's tokens instead of the request's own.
    counts_encoder_tokens: ClassVar[bool] = False
    # Whether a lookup drops the last matched block for a drafter. A state that stands for all
    # tokens before it cannot be shortened by a block, so such groups look up the candidate itself.
    drops_eagle_block: ClassVar[bool] = True
    # Whether blocks below a request's last tokens are given back while it runs.
    drops_skipped_blocks: ClassVar[bool] = True
    # Whether it matters to a group where one step ends and the next begins.
    minds_steps: ClassVar[bool] = False
    # Whether a hit of n tokens implies one at every aligned length below n.
    is_downward_closed: ClassVar[bool] = False

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        enable_caching: bool,
        kv_cache_group_id: int,
        scheduler_block_size: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        max_admission_blocks_per_request: int | None = None,
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.block_pool = block_pool
        self.enable_caching = enable_caching
        self.kv_cache_group_id = kv_cache_group_id
        self.scheduler_block_size = scheduler_block_size
        self.block_size = kv_cache_spec.block_size * dcp_world_size * pcp_world_size
        self.max_admission_blocks_per_request = max_admission_blocks_per_request
        self.use_eagle = False
        self.req_to_blocks: defaultdict[str, list[KVCacheBlock]] = defaultdict(list)
        # Blocks from the table's start that caching is done with, masked ones included. A request
        # in it has been admitted: it will adopt no more hits.
        self.num_cached_block: dict[str, int] = {}
        # Blocks taken since the step began; groups of one model may share the list.
        self.taken_blocks: list[KVCacheBlock] = []
        self._null_block = block_pool.null_block
        # Ranks between which a block's tokens are spread make it as many times as large.
        self._spec_over_ranks = kv_cache_spec
        if self.block_size != kv_cache_spec.block_size:
            self._spec_over_ranks = kv_cache_spec.copy_with_new_block_size(self.block_size)
        self._configure(kv_cache_spec)

    def _configure(self, spec: Any) -> None:
        """Take from the group's spec what tables of its kind need besides.

        Raises:
            ConfigError: It does not fit the blocks.
        """
        return

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
        """Return how many blocks leave the free queue if the request is given ``num_tokens`` slots.

        Args:
            request_id: The request.
            num_tokens: Tokens that need a slot, lookahead included.
            new_computed_blocks: Hits it would adopt; those free now leave the queue too.
            total_computed_tokens: Computed tokens with hits, local and external.
            num_tokens_main_model: ``num_tokens`` less lookahead for a drafter.
            apply_admission_cap: Count what the request holds at most at once instead.
        """
        # Asked in every step of every request and group: rounded up in place.
        num_required = -(-num_tokens // self.block_size)
        if apply_admission_cap and self.max_admission_blocks_per_request is not None:
            num_required = min(num_required, self.max_admission_blocks_per_request)
        num_held = len(self.req_to_blocks.get(request_id, ()))
        if request_id in self.num_cached_block:
            assert not new_computed_blocks
            return num_required - num_held if num_required > num_held else 0
        num_skipped = max(self.get_num_skipped_tokens(total_computed_tokens), 0) // self.block_size
        num_present = num_held + len(new_computed_blocks)
        num_new = max(num_required - max(num_skipped, num_present), 0)
        return num_new + self._num_evictable(new_computed_blocks, max(num_skipped - num_held, 0))

    @staticmethod
    def _num_evictable(blocks: Sequence[KVCacheBlock], start: int = 0) -> int:
        """Count the blocks from ``start`` on that stand in the free queue now."""
        return sum(
            1 for i in range(start, len(blocks)) if blocks[i].ref_cnt == 0 and not blocks[i].is_null
        )

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Adopt a request's hits, then take blocks for tokens a connector will load.

        Does nothing for an admitted request.
        """
        if request_id in self.num_cached_block:
            assert not new_computed_blocks
            return
        num_total = num_local_computed_tokens + num_external_computed_tokens
        self.adopt_computed_blocks(request_id, new_computed_blocks, num_total)
        if num_external_computed_tokens > 0:
            self.allocate_external_blocks(request_id, num_total)

    def adopt_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], num_total_tokens: int
    ) -> None:
        """Hold a new request's hits; blocks below what ``num_total_tokens`` needs become null."""
        table = self.req_to_blocks[request_id]
        assert not table, f"Request {request_id} holds blocks before its hits are adopted."
        num_skipped = max(self.get_num_skipped_tokens(num_total_tokens), 0) // self.block_size
        table.extend([self._null_block] * num_skipped)
        needed = new_computed_blocks[num_skipped:]
        if self.enable_caching:
            self.block_pool.touch(needed)
        else:
            assert not needed, "There are no hits without prefix caching."
        table.extend(needed)
        self.num_cached_block[request_id] = len(table)

    def allocate_external_blocks(self, request_id: str, num_total_tokens: int) -> None:
        """Take blocks up to ``num_total_tokens``, for a connector to fill."""
        table = self.req_to_blocks[request_id]
        num_new = cdiv(num_total_tokens, self.block_size) - len(table)
        if num_new > 0:
            self._extend_table(table, num_new)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Give a request slots for ``num_tokens`` tokens and return the blocks this took."""
        table = self.req_to_blocks[request_id]
        num_new = cdiv(num_tokens, self.block_size) - len(table)
        return self._extend_table(table, num_new) if num_new > 0 else []

    def _extend_table(self, table: list[KVCacheBlock], num_new: int) -> list[KVCacheBlock]:
        new_blocks = self.block_pool.get_new_blocks(num_new)
        table.extend(new_blocks)
        self.taken_blocks += new_blocks
        return new_blocks

    # ---- caching -----------------------------------------------------------------------------

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = None
    ) -> None:
        """Cache the request's blocks that are full at ``num_tokens`` and that a hit can reach.

        A block is judged once: masked ones count as done.
        """
        num_done = self.num_cached_block.get(request.request_id, 0)
        num_full = num_tokens // self.block_size
        if num_done >= num_full:
            return
        mask = self.reachable_block_mask(
            start_block=num_done,
            end_block=num_full,
            alignment_tokens=self.scheduler_block_size,
            kv_cache_spec=self._spec_over_ranks,
            use_eagle=self.use_eagle,
            retention_interval=retention_interval,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=self.req_to_blocks[request.request_id],
            num_cached_blocks=num_done,
            num_full_blocks=num_full,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
            block_mask=mask,
        )
        self.num_cached_block[request.request_id] = num_full

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
        window = cls._window_of(kv_cache_spec)
        if window is None:
            return None
        return sliding_window_block_mask(
            start_block,
            end_block,
            block_size=kv_cache_spec.block_size,
            window=window,
            alignment_tokens=alignment_tokens,
            use_eagle=use_eagle,
            retention_interval=retention_interval,
            num_prompt_tokens=num_prompt_tokens,
        )

    @classmethod
    def _window_of(cls, spec: Any) -> int | None:
        """Return the tokens a token attends to, itself included; None: all before it."""
        return None

    # ---- freeing -----------------------------------------------------------------------------

    def free(self, request_id: str) -> None:
        """Give all blocks of a request back, its tail to be reused before its head."""
        self.block_pool.free_blocks(reversed(self.req_to_blocks.pop(request_id, [])))
        self.num_cached_block.pop(request_id, None)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return how many leading tokens the next token does not attend to."""
        return 0

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Free the blocks that no later token attends to and put the null block in their place."""
        num_skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        if num_skipped <= 0:
            return
        table = self.req_to_blocks.get(request_id)
        if table is None:
            return
        end = min(num_skipped, len(table))
        # From the right, so that a step pays only for what it skips: left of the first null block
        # all is null. Compared by identity, which does not load the block.
        first = end
        null_block = self._null_block
        while first > 0 and table[first - 1] is not null_block:
            first -= 1
        if first == end:
            return
        removed = table[first:end]
        removed.reverse()
        table[first:end] = [null_block] * (end - first)
        self._drop(request_id, removed)

    def _drop(self, request_id: str, removed: Sequence[KVCacheBlock]) -> None:
        """Free blocks a running request needs no more, the last one first."""
        self.block_pool.free_unhashed_first(removed)

    # ---- queries -----------------------------------------------------------------------------

    def get_num_common_prefix_blocks(self, request_id: str) -> int:
        """Return how many leading blocks all requests with blocks share."""
        return 0

    def new_step_starts(self) -> None:
        """Begin a scheduling step.

        New blocks nobody asked for belong to the step that ended; dropping them here bounds the
        list for models that need no zeroing.
        """
        self.taken_blocks.clear()

    def take_new_block_ids(self) -> list[int]:
        """Return the ids of blocks taken since the last call or the step's start."""
        block_ids = [block.block_id for block in self.taken_blocks]
        self.taken_blocks.clear()
        return block_ids

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
        """Find the longest prefix that groups of one spec have cached.

        Args:
            block_hashes: One hash per block of the spec's size.
            max_length: Tokens the hit may have at most.
            kv_cache_group_ids: Groups that must all have it.
            block_pool: The pool.
            kv_cache_spec: The groups' spec.
            drop_eagle_block: Drop the last matched block, to be recomputed for a drafter.
            alignment_tokens: The hit's length is a multiple of it.
            dcp_world_size: As in the constructor.
            pcp_world_size: As in the constructor.

        Returns:
            One list of blocks per group, all of the hit's length, null where nothing is needed.
        """
        query = HitQuery(
            block_hashes,
            max_length,
            kv_cache_group_ids,
            block_pool,
            drop_eagle_block,
            alignment_tokens,
            dcp_world_size * pcp_world_size,
        )
        return cls._find_hit(kv_cache_spec, query)

    @classmethod
    def _find_hit(cls, spec: Any, query: HitQuery) -> tuple[list[KVCacheBlock], ...]:
        """Answer ``find_longest_cache_hit`` for groups of this kind.

        Raises:
            NotImplementedError: The kind answers neither.
        """
        del spec, query
        raise NotImplementedError(f"{cls.__name__} does not define find_longest_cache_hit.")
