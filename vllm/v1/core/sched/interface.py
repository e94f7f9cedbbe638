"""What the engine core asks of a scheduler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.messages import EngineCoreOutputs
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
