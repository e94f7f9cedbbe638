"""What the KV cache manager asks of a coordinator."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from vllm.utils.hashing import BlockHash
from vllm.v1.core.block_pool import TieredPool
from vllm.v1.core.pool.exports import Exports, PlacedCheckpoint, PrefixBlocks
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.values.cache_step import Lookup, StepPlan, StepRequest, StepWork
from vllm.v1.core.values.free_block_queue import KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.messages import HeldPrefix, PrefillStats
    from vllm.v1.metrics.stats import CachePolicyStats
    from vllm.v1.request import Request


class Coordinator(Protocol):
    """What the KV cache manager asks of the groups of a model.

    Chosen once, by ``make_coordinator``; each method does for all groups what a table does for one.

    Attributes:
        block_pool: The pool of all groups.
        exports: The prefixes held for other engines.
        resumes_anywhere: Whether a request can go back to any token of what it holds; else only a
            lookup finds where it can go on.
    """

    block_pool: TieredPool
    exports: Exports
    resumes_anywhere: bool

    def look_up(self, request: Request, max_tokens: int) -> Lookup:
        """Find a request's longest cached prefix of at most ``max_tokens``; takes no block."""
        ...

    def claim(self, request: Request) -> None:
        """Let what a request that begins to wait would hit be reused last, until it is admitted."""
        ...

    def should_wait(self, request: Request, found: Lookup) -> bool:
        """Whether a running prefill is about to publish more of a waiting request's prefix."""
        ...

    def announce(self, request: Request) -> None:
        """Let running prefills leave what a request that waits would hit; there is no room yet."""
        ...

    def make_record(self, request: Request, found: Lookup, num_cached_tokens: int) -> PrefillStats:
        """Say where an admitted request's tokens come from."""
        ...

    def num_blocks_in_full(self, step: StepRequest) -> int:
        """Return the free blocks a request would use until its prompt is computed."""
        ...

    def advance(self, step: StepRequest) -> bool:
        """Take note of what was accepted since the last step; give back what is not needed.

        Returns:
            Whether that is all: the request has the blocks of the step, and publishes nothing.
        """
        ...

    def is_ready(self, request: Request, start: int, main_end: int, alloc_end: int) -> bool:
        """Whether a step needs nothing at all: ``advance`` would do nothing and say that is all.

        Most decode steps are such; the arguments are those of a ``StepRequest``.
        """
        ...

    def plan(self, step: StepRequest, num_available: int) -> StepPlan:
        """Work out what a step takes; changes nothing."""
        ...

    def commit(self, plan: StepPlan) -> tuple[Sequence[KVCacheBlock], ...]:
        """Apply a plan that fits the pool, all of it or nothing; returns the new blocks by group.

        Raises:
            NoFreeBlocksError: The pool refuses all the same; nobody holds more than before.
        """
        ...

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish what a delayed allocation did not."""
        ...

    def cache_rows(self, request: Request, num_tokens: int) -> None:
        """Publish dense rows that a connector has written, without anything to resume at."""
        ...

    @property
    def rebuild_tokens(self) -> int | None:
        """Tokens before the end of dense rows to compute again to resume there; None: it cannot."""
        ...

    def export_prefix(self, name: str, request: Request) -> PrefixBlocks | None:
        """Hold the longest cached prefix of a request for another engine to read.

        Args:
            name: Of the hold, for ``exports.release``.
            request: The request; at least its last prompt token is left to the other engine.

        Returns:
            Where its rows lie; None, with nothing held, if none is cached.
        """
        ...

    def find_import(
        self,
        request: Request,
        num_tokens: int,
        num_external_tokens: int,
        next_token: int | None = None,
    ) -> PrefixBlocks:
        """Return where a connector shall write the rows of an allocated request's prefix.

        Args:
            request: The request, which is about to load.
            num_tokens: Tokens of the prefix.
            num_external_tokens: Of those, tokens that its local hit does not have.
            next_token: The token that followed where the rows were made, if it is not the
                request's own; a drafter's last row is of it.
        """
        ...

    def list_checkpoints(
        self, block_hashes: Sequence[BlockHash], end: int
    ) -> Sequence[PlacedCheckpoint]:
        """Return the checkpoints in the first ``end`` tokens of a prompt, the first one first."""
        ...

    def find_standing(
        self, block_hashes: Sequence[BlockHash], position: int
    ) -> CheckpointStanding | None:
        """Return what the checkpoint at a boundary is to the cache; None: there is none."""
        ...

    def locate_rows(
        self, block_hashes: Sequence[BlockHash], first: int, end: int
    ) -> PrefixBlocks | None:
        """Return where the dense rows of tokens ``[first, end)`` lie; None: not all are cached."""
        ...

    def locate_checkpoint(
        self, block_hashes: Sequence[BlockHash], position: int, dense_from: int
    ) -> PrefixBlocks | None:
        """Return where lies what resuming at a boundary takes, dense rows from a token on.

        None: not all of it is cached.
        """
        ...

    def free(self, request_id: str) -> None:
        """Give back everything a request holds; what is cached stays cached."""
        ...

    def get_blocks(self, request_id: str) -> tuple[Sequence[KVCacheBlock], ...]:
        """Return a request's blocks by group."""
        ...

    def find_first_token(self, request_id: str, block_ids: Collection[int]) -> int | None:
        """Return the first token of a request with rows in one of the blocks; None: none has."""
        ...

    def list_blocks_from(self, request_id: str, num_tokens: int) -> set[int]:
        """Return the ids of a request's blocks with rows of tokens from ``num_tokens`` on."""
        ...

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return per group how many leading blocks all requests with blocks share."""
        ...

    def chunk_end(self, request: Request, num_new_tokens: int) -> int:
        """Return how many of ``num_new_tokens`` a prefill chunk should compute."""
        ...

    def max_blocks_of(self, num_tokens: int) -> int:
        """Return the most blocks one request of a length holds at once."""
        ...

    def new_step_starts(self) -> None:
        """Begin a ``schedule()``."""
        ...

    def commit_step(self) -> None:
        """End a ``schedule()``: publish what it allocated."""
        ...

    def take_step_work(self) -> StepWork:
        """Drain what the worker must know before it runs the step."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached; False while blocks are held."""
        ...

    def held_prefixes(self) -> Sequence[HeldPrefix]:
        """Return the prefixes that somebody asked to keep."""
        ...

    def forget_prefix(self, name: str) -> bool:
        """Let go of such a prefix; returns whether there is one of the name."""
        ...

    def end_session(self, session: int) -> int:
        """Make spare what only a session used; return how many checkpoints, or blocks, that is."""
        ...

    def take_new_block_ids(self) -> list[int]:
        """Drain the ids of blocks taken in this step, for a worker that zeroes them."""
        ...

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Free the blocks no later token of the request attends to; ``advance`` does, too."""
        ...

    def find_faults(self, num_computed: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Say which invariant does not hold, and where: I4 beyond what the index sees, and I5.

        Args:
            num_computed: Tokens computed and accepted, by the requests to check for I5.
        """
        ...

    def policy_stats(self) -> CachePolicyStats | None:
        """Return what was learnt of the traffic; None where nothing is."""
        ...

    def held_blocks(self) -> Iterator[KVCacheBlock]:
        """Iterate over the blocks that tables and copies hold, once per hold."""
        ...
