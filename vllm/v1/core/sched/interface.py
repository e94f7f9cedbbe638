"""What the engine core asks of a scheduler, and what a scheduler asks of a KV cache manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput, WindowTable
    from vllm.v1.messages import EngineCoreOutputs, PrefillStats
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus


class SchedulerInterface(ABC):
    """Decides what each step computes, and reads what it gave."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queue a request."""

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Decide the next step; requests advance as if it had run."""

    @abstractmethod
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take the tokens of a step; returns the outputs by client."""

    @abstractmethod
    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take draft tokens for the next step."""

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[tuple[str, int]]:
        """End requests from outside; returns (request, client) of those that were alive."""

    @abstractmethod
    def get_num_unfinished_requests(self) -> int:
        """Return how many requests wait or run."""

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """Whether ended requests must still be told to the workers or clients."""

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return self.get_num_unfinished_requests() > 0

    def has_requests(self) -> bool:
        """Whether there is a reason for another step."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    @abstractmethod
    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes; False, with nothing forgotten, while blocks are in use."""

    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """Return how many requests run and how many wait."""

    @abstractmethod
    def make_stats(self) -> SchedulerStats | None:
        """Return the state after a step; None when statistics are off."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop what the scheduler started."""


class KVManager(Protocol):
    """A KV cache manager: the contract's, or the one that hits at one unit.

    Chosen once, by ``make_kv_cache_manager``; see those classes for the promises.
    """

    empty_kv_cache_blocks: KVCacheBlocks

    @property
    def block_pool(self) -> Any: ...

    @property
    def coordinator(self) -> Any: ...

    @property
    def usage(self) -> float: ...

    def new_step_starts(self) -> None: ...

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]: ...

    def chunk_end(self, request: Request, num_new_tokens: int) -> int: ...

    def should_wait(self, request: Request, looked_up: KVCacheBlocks) -> bool: ...

    def can_ever_fit(self, request: Request) -> bool: ...

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
    ) -> KVCacheBlocks | None: ...

    def free(self, request: Request) -> None: ...

    def get_blocks(self, request_id: str) -> KVCacheBlocks: ...

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]: ...

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None: ...

    def commit_step(self) -> None: ...

    def take_block_copies(self) -> list[tuple[int, int]]: ...

    def take_window_tables(self) -> dict[str, tuple[WindowTable, ...]]: ...

    def take_drafter_rebuilds(self) -> dict[str, int]: ...

    def take_new_block_ids(self) -> list[int]: ...

    def take_prefill_stats(self, request_id: str) -> PrefillStats | None: ...

    def take_events(self) -> list[Any]: ...

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]: ...

    def reset_prefix_cache(self) -> bool: ...

    def check_invariants(self, num_computed: dict[str, int] | None = None) -> None: ...
