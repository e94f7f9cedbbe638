"""All requests of a scheduler: which queue each stands in, and how it moves between them.

    add --> waiting / skipped_waiting --admit--> running --ended--> finished_ids --forget--> gone
              ^    |       ^                        |
              |    +-load--+                        |
              +---------------preempt---------------+

``Requests`` holds no blocks; ``Holdings`` knows who does, and gives them back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.encoder_inputs import EncoderPlanner
from vllm.v1.core.sched.request_queue import (
    RequestQueue,
    SchedulingPolicy,
    create_request_queue,
)
from vllm.v1.messages import EngineCoreEventType
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)


class Requests:
    """The requests and their places.

    Owns: the queues, the running list, what must still be told of ended requests.

    Attributes:
        policy: Order of the queues.
        by_id: Every request that is alive, or ended with blocks still held for a transfer.
        waiting: Requests that wait for room.
        skipped_waiting: Requests that wait for something else; they came before ``waiting``.
        running: Requests with blocks, in the order they are scheduled.
        prefilling: Admitted requests whose tokens are not all scheduled yet, loading ones included.
        loaded_ids: Requests whose KV has arrived from the connector.
        failed_load_ids: Requests of which some KV did not arrive.
        preempted_ids: Requests that lost their blocks since the last step, for the workers.
        finished_ids: Requests that ended since the last step, for the workers.
        finished_ids_by_client: The same by client; None unless clients want to know.
        refused: Ended with an error that the client is told at the next update.

    Args:
        policy: Order of the queues.
        joint_prompt_tokens: Tokens that prompts may have in a step together; None: any number.
        notes_events: Whether requests note their stages.
        tells_clients: Whether clients want to know which requests ended.
    """

    def __init__(
        self,
        policy: SchedulingPolicy = SchedulingPolicy.FCFS,
        *,
        joint_prompt_tokens: int | None = None,
        notes_events: bool = False,
        tells_clients: bool = False,
    ) -> None:
        self.policy = policy
        self._joint_prompt_tokens = joint_prompt_tokens
        self.by_id: dict[str, Request] = {}
        self.waiting: RequestQueue = create_request_queue(policy)
        self.skipped_waiting: RequestQueue = create_request_queue(policy)
        self.running: list[Request] = []
        self.prefilling: set[Request] = set()
        self.loaded_ids: set[str] = set()
        self.failed_load_ids: set[str] = set()
        self.preempted_ids: set[str] = set()
        self.finished_ids: set[str] = set()
        self.finished_ids_by_client: dict[int, set[str]] | None = (
            defaultdict(set) if tells_clients else None
        )
        self.refused: list[Request] = []
        self._notes_events = notes_events
        # The prompt that had to wait last, and whom it waits for.
        self._made_way_id = ""
        self._waits_for: frozenset[str] = frozenset()

    # ---- counts ------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """How many requests wait, for whatever reason."""
        return len(self.waiting) + len(self.skipped_waiting)

    def has_changes(self) -> bool:
        """Whether workers or clients must still be told of ended requests."""
        return bool(self.finished_ids or self.refused)

    def find_alive(self, request_ids: str | Iterable[str] | None) -> list[Request]:
        """Return those of one, several or all (None) requests that have not ended, each once."""
        if request_ids is None:
            request_ids = list(self.by_id)
        elif isinstance(request_ids, str):
            request_ids = (request_ids,)
        named = (self.by_id.get(request_id) for request_id in dict.fromkeys(request_ids))
        return [request for request in named if request is not None and not request.is_finished()]

    # ---- in ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.by_id[request.request_id] = request
        queue = self.skipped_waiting if request.is_blocked else self.waiting
        queue.add_request(request)
        self._note(request, EngineCoreEventType.QUEUED)

    def next_queue(self) -> RequestQueue | None:
        """Return the queue whose head is next; None if nobody waits."""
        waiting, skipped = self.waiting, self.skipped_waiting
        if not waiting or not skipped:
            return skipped or waiting or None
        if self.policy is SchedulingPolicy.FCFS:
            return skipped  # they came first
        return waiting if waiting.peek_request() < skipped.peek_request() else skipped

    def admit(self, request: Request, num_computed_tokens: int, timestamp: float) -> None:
        """Let a request that left its queue run, with this many tokens found in caches."""
        self.running.append(request)
        self.prefilling.add(request)
        self._note(request, EngineCoreEventType.SCHEDULED, timestamp)
        request.start_running(num_computed_tokens)

    def start_loading(self, request: Request, num_computed_tokens: int) -> None:
        """Let a connector load a request; it stands in ``skipped_waiting`` meanwhile."""
        self.prefilling.add(request)
        request.start_loading(num_computed_tokens)

    def end_prefill(self, request: Request) -> None:
        """All tokens that are known of the request are scheduled."""
        self.prefilling.discard(request)

    def take_displaced(self, max_num_seqs: int) -> Request | None:
        """Take out of ``running`` one whose place is due to one that waits; None: nobody's is.

        Args:
            max_num_seqs: Places that there are.
        """
        return None

    def order_running(self) -> Sequence[Request]:
        """Bring running requests into the order of this step.

        Returns:
            The last ones that go on only with what waiting ones leave of the step: none.
        """
        return ()

    def find_chunk_cap(
        self, request: Request, num_scheduled_tokens: Mapping[str, int]
    ) -> int | None:
        """Return how many tokens of a request a step may have; None: as many as it has room for.

        Args:
            request: The request.
            num_scheduled_tokens: Of the step so far, by request.
        """
        return None

    def may_join(
        self, request: Request, num_new_tokens: int, num_scheduled_tokens: Mapping[str, int]
    ) -> bool:
        """Whether a request may have tokens in a step beside the prompts in it.

        Where a step takes as long as it has tokens, each prompt in it only waits for the others:

            together   |a b c|              first tokens at 3, 3, 3
            in turn    |a| b | c |                       at 1, 2, 3

        So few tokens may be of several prompts that one alone would take nearly as long. Tokens of
        answers count for nothing, and always may. Nor do prompts that came in since a request
        first had to wait: else one of a few tokens in each step would keep it waiting for ever.

        Args:
            request: The request.
            num_new_tokens: What it would have.
            num_scheduled_tokens: Of the step so far, by request.
        """
        most = self._joint_prompt_tokens
        if most is None or (
            request.status is RequestStatus.RUNNING and request not in self.prefilling
        ):
            return True
        others = (other.request_id for other in self.prefilling)
        if request.request_id == self._made_way_id:
            others = (other for other in others if other in self._waits_for)
        taken = sum(num_scheduled_tokens.get(other, 0) for other in others)
        return taken == 0 or taken + num_new_tokens <= most

    def make_way(self, request: Request, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Let a request that waits do so for the prompts in a step, and for no later ones."""
        if request.status is RequestStatus.RUNNING or request.request_id == self._made_way_id:
            return
        self._made_way_id = request.request_id
        others = {other.request_id for other in self.prefilling}
        self._waits_for = frozenset(others.intersection(num_scheduled_tokens))

    def end_deferral(self) -> None:
        """Whoever waits may have what is left of the step."""

    # ---- loads -------------------------------------------------------------------------------

    def find_loading(self) -> list[Request]:
        """Return the requests that a connector loads."""
        loading = RequestStatus.WAITING_FOR_REMOTE_KVS
        return [request for request in self.skipped_waiting if request.status is loading]

    def is_loading(self, request: Request) -> bool:
        """Whether a connector may still write into the request's blocks."""
        return (
            request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            and request.request_id not in self.loaded_ids
        )

    def take_loaded(self, request: Request) -> bool:
        """Forget that the request's KV arrived; returns whether some of it did not."""
        self.loaded_ids.discard(request.request_id)
        has_failed = request.request_id in self.failed_load_ids
        self.failed_load_ids.discard(request.request_id)
        return has_failed

    # ---- out ---------------------------------------------------------------------------------

    def choose_victim(self) -> Request:
        """Return the running request to preempt first."""
        if self.policy is SchedulingPolicy.PRIORITY:
            return max(self.running, key=lambda request: (request.priority, request.arrival_time))
        return self.running[-1]

    def preempt(self, request: Request, timestamp: float) -> None:
        """Send a request that left ``running`` back to the front of its queue."""
        assert request.status is RequestStatus.RUNNING
        self.prefilling.discard(request)
        self.preempted_ids.add(request.request_id)
        request.preempt()
        self._note(request, EngineCoreEventType.PREEMPTED, timestamp)
        self.waiting.prepend_request(request)

    def remove(self, requests: list[Request]) -> None:
        """Take requests that have not ended out of wherever they stand."""
        running = {r for r in requests if r.status is RequestStatus.RUNNING}
        self.leave_running(running)
        self.leave_queues([request for request in requests if request not in running])

    def leave_running(self, requests: set[Request]) -> None:
        """Take requests out of the running list."""
        if requests:
            self.running = [request for request in self.running if request not in requests]

    def leave_queues(self, requests: list[Request]) -> None:
        """Take requests out of the queues; those not queued are passed over."""
        if requests:
            self.waiting.remove_requests(requests)
            self.skipped_waiting.remove_requests(requests)

    def note_end(self, request: Request) -> None:
        """Remember to tell that a request, in no queue any more, has ended."""
        self.prefilling.discard(request)
        self.loaded_ids.discard(request.request_id)
        self.failed_load_ids.discard(request.request_id)
        self.preempted_ids.discard(request.request_id)
        self.finished_ids.add(request.request_id)
        if self.finished_ids_by_client is not None:
            self.finished_ids_by_client[request.client_index].add(request.request_id)

    def forget(self, request: Request) -> None:
        """Forget an ended request: its blocks are free."""
        assert request.is_finished()
        del self.by_id[request.request_id]

    def take_preempted_ids(self) -> set[str]:
        """Drain the requests that lost their blocks since the last step, to a reset or in it."""
        ids, self.preempted_ids = self.preempted_ids, set()
        return ids

    def take_finished_ids(self) -> set[str]:
        """Drain the requests that ended since the last step."""
        ids, self.finished_ids = self.finished_ids, set()
        return ids

    def take_finished_by_client(self) -> dict[int, set[str]]:
        """Drain the ended requests by client; empty if clients do not want to know."""
        if not self.finished_ids_by_client:
            return {}
        ids, self.finished_ids_by_client = self.finished_ids_by_client, defaultdict(set)
        return ids

    def take_refused(self) -> list[Request]:
        """Drain the refused requests."""
        refused, self.refused = self.refused, []
        return refused

    def _note(
        self, request: Request, event_type: EngineCoreEventType, timestamp: float | None = None
    ) -> None:
        if self._notes_events:
            request.record_event(event_type, timestamp)


@dataclass(frozen=True, slots=True)
class Holdings:
    """The requests with the caches in which they hold something.

    Made anew for each step, of what the scheduler has then: outsiders exchange parts of it.

    Attributes:
        requests: All requests.
        manager: Holds their KV blocks.
        encoder: Holds their encoder outputs.
        connector: The KV connector's scheduler side, if any.
    """

    requests: Requests
    manager: KVCacheManager
    encoder: EncoderPlanner
    connector: Any

    def preempt(self, request: Request, timestamp: float) -> None:
        """Take everything from a request that the caller removed from ``running``."""
        self.manager.free(request)
        self.encoder.cache.free(request)
        self.requests.preempt(request, timestamp)

    def end(self, request: Request, *, delay_free_blocks: bool = False) -> dict[str, Any] | None:
        """Let an ended request, in no queue any more, go of everything.

        Args:
            request: The request.
            delay_free_blocks: Whether a transfer into its blocks is under way.

        Returns:
            What the connector wants the client to know.
        """
        assert request.is_finished()
        keeps_blocks, kv_transfer_params = self._tell_connector(request)
        self.encoder.cache.free(request)
        self.encoder.leave(request)
        self.requests.note_end(request)
        if not keeps_blocks and not delay_free_blocks:
            self.free_blocks(request)
        return kv_transfer_params

    def _tell_connector(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the connector keeps the request's blocks, and its message."""
        if self.connector is None:
            return False, None
        block_ids = self.manager.get_block_ids(request.request_id)
        if isinstance(self.connector, SupportsHMA):
            return self.connector.request_finished_all_groups(request, block_ids)
        keeps, params = self.connector.request_finished(request, block_ids[0] if block_ids else [])
        return bool(keeps), params

    def free_blocks(self, request: Request) -> None:
        """Free the blocks of an ended request, and forget it."""
        self.manager.free(request)
        self.requests.forget(request)

    def refuse(self, request: Request, reason: str) -> None:
        """End a request, in no queue any more, with an error its client is told."""
        logger.warning("Request %s is refused: %s", request.request_id, reason)
        request.fail(reason)
        self.end(request)
        self.requests.refused.append(request)
