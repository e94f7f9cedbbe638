"""Everything the cache knows of one request, with hits at one unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.exceptions import InvariantError
from vllm.v1.core.retention.policy import Spare
from vllm.v1.core.retention.rebuild import Rebuild
from vllm.v1.core.single_type_kv_cache_manager import DenseTable, LiveWindow
from vllm.v1.core.values.cache_step import BlockCopy, WindowTable
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.values.hit import Checkpoint

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Pending:
    """What a step will have computed, published when ``schedule()`` ends."""

    start: int
    end: int
    boundaries: tuple[int, ...]
    spares: Sequence[Spare] = ()


@dataclass(slots=True)
class Publications:
    """What a request has published, and wants to.

    Attributes:
        num_units: Units whose keys are out, those of its hit included.
        trailing: Checkpoints it carries along and replaces as it advances.
        kept: Checkpoints it made that outlive its advance; only ever appended to.
        num_closed: How many of them were told that it may give back their blocks.
        wanted: Boundaries it wants kept: replay boundaries and junctions.
        junctions: Those of them where prompts part.
        spared: Boundaries near its prompt's end where it left spare checkpoints, and their kinds.
        unfollowed: A checkpoint it made before the token that follows was known.
    """

    num_units: int = 0
    trailing: list[Checkpoint] = field(default_factory=list)
    kept: list[Checkpoint] = field(default_factory=list)
    num_closed: int = 0
    wanted: set[int] = field(default_factory=set)
    junctions: set[int] = field(default_factory=set)
    spared: dict[int, int] = field(default_factory=dict)
    unfollowed: Checkpoint | None = None


@dataclass(slots=True, eq=False)
class RequestCache:
    """One request's tables, publications and work of the current ``schedule()``.

    Owns: all of it; giving its blocks back and dropping this object frees a request.

    Attributes:
        request: The request.
        is_admitted: Whether it holds tables; else it only waits.
        dense: Its tables, by dense group.
        windows: Its tables, by window group.
        ready_until: Position up to which its tables need no change.
        published: What it has published.
        origins: The checkpoint it resumed at, and the lean one below that.
        is_resumed: Whether it was preempted before, and goes on with the turn it was at.
        wait_deadline: The step in which it stops waiting for another's prefill.
        pending: What this step publishes.
        copies: Copies that this step runs.
        spared_until: Where a step ends that leaves spare checkpoints; 0: it leaves none.
        rebuild: Tokens of its hit whose window rows it computes again.
        full_from: From this boundary on its checkpoints hold the rows of all layers; 0: all do.
        rebuilt_block_id: Block of the checkpoint whose last row its drafter makes anew.
        dense_from: While a connector writes its rows: below this token dense rows were there.
        loaded_next_token: The token that followed where what is loaded was made, if it was told.
        is_unannounced: Whether the worker has not heard of the request, which loads.
    """

    request: Request
    is_admitted: bool = False
    dense: tuple[DenseTable, ...] = ()
    windows: tuple[LiveWindow, ...] = ()
    ready_until: int = 0
    published: Publications = field(default_factory=Publications)
    origins: tuple[Checkpoint, ...] = ()
    is_resumed: bool = False
    wait_deadline: int | None = None
    pending: Pending | None = None
    copies: list[BlockCopy] = field(default_factory=list)
    spared_until: int = 0
    rebuild: Rebuild | None = None
    full_from: int = 0
    rebuilt_block_id: int | None = None
    dense_from: int | None = None
    loaded_next_token: int | None = None
    is_unannounced: bool = False

    @property
    def num_accepted(self) -> int:
        """The computed tokens that stand, whatever the steps in flight bring."""
        return self.request.num_computed_tokens - self.request.num_output_placeholders

    @property
    def exact_from(self) -> int:
        """The first boundary at which its window rows are those of its tokens; 0: everywhere."""
        return self.rebuild.end if self.rebuild is not None else 0

    def holds_rows(self, window: LiveWindow, position: int) -> bool:
        """Whether a checkpoint of its at a boundary holds rows of a window's layers."""
        return not window.geometry.lazy_reach or position >= self.full_from

    @property
    def is_loading(self) -> bool:
        """Whether a connector still writes its rows: nothing of them may be published."""
        return self.dense_from is not None

    def check_alone(self) -> None:
        """Check that nobody else holds what a connector writes: before it begins, after it ended.

        A block that begins below ``dense_from`` was cached in part, and may be copied meanwhile.

        Raises:
            InvariantError: Somebody does, who would read rows while they are written.
        """
        assert self.dense_from is not None
        for table in self.tables():
            first = self.dense_from if isinstance(table, DenseTable) else 0
            for token, block in table.places():
                if token >= first and not block.is_null and block.ref_cnt != 1:
                    raise InvariantError(
                        f"I2 does not hold: block {block.block_id}, into which request "
                        f"{self.request.request_id} loads, is held {block.ref_cnt} times."
                    )

    def set_ready(self, alloc_end: int) -> None:
        """Remember up to where the tables need no change; ``alloc_end`` if there is no table."""
        if alloc_end > self.ready_until:
            self.ready_until = min((t.capacity() for t in self.tables()), default=alloc_end)

    def tables(self) -> tuple[DenseTable | LiveWindow, ...]:
        """Return the tables of all groups, the dense ones first."""
        return (*self.dense, *self.windows)

    def list_places(self, num_tokens: int = 0) -> Iterator[tuple[int, int]]:
        """Iterate over its blocks with rows of tokens from ``num_tokens`` on.

        Yields:
            (first token that a block covers, block id).
        """
        for table in self.tables():
            for token, block in table.places():
                if token + table.geometry.block_size > num_tokens and not block.is_null:
                    yield token, block.block_id

    def take_spared(self) -> list[KVCacheBlock]:
        """Take out what only spare checkpoints need, those near the prompt's end last.

        The step that the tables are for writes their rows; what takes the blocks next writes later.
        """
        end, self.spared_until = self.spared_until, 0
        return [block for w in self.windows for block in reversed(w.drop_below(end))]

    def take_window_tables(self) -> Iterator[WindowTable]:
        """Drain the window tables that the worker has not seen as they are."""
        for window in self.windows:
            if window.is_dirty:
                yield WindowTable(window.geometry.group_id, window.base, window.block_ids[:])
                window.is_dirty = False

    def held_blocks(self) -> Iterator[KVCacheBlock]:
        """Iterate over the blocks of its tables and copies, once per hold."""
        for table in self.tables():
            yield from table.blocks
        for copy in self.copies:
            yield from (copy.source, copy.destination)

    def find_uncovered(self, num_computed: int) -> Iterator[str]:
        """Say which rows it needs to go on have no block (I5)."""
        request_id = self.request.request_id
        for table in self.dense:
            needed = table.geometry.num_dense_blocks(num_computed)
            if len(table.blocks) < needed or any(block.is_null for block in table.blocks):
                yield (
                    f"request {request_id} holds {len(table.blocks)} blocks of dense group "
                    f"{table.geometry.group_id}, {num_computed} tokens need {needed}"
                )
        for window in self.windows:
            missing = window.find_holes(window.geometry.rows_below(num_computed))
            if missing:
                yield (
                    f"request {request_id} at {num_computed} tokens lacks blocks {missing} of "
                    f"window group {window.geometry.group_id}"
                )
