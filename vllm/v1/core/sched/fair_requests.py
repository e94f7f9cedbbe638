"""Requests of several tenants: fair queues, and whose prompts go on first.

running      decodes | prompts, by rank of their tenants |
                                    ^ better than who waits | worse: *deferred*
a step       decodes, prompts of better rank, who waits with a better rank, deferred prompts,
             then who else waits: while there is budget, someone gets it, unless only few tokens
             of a step may be of several prompts (``Requests.may_join``)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from typing_extensions import override

from vllm.config.tenants import BATCH_TENANT
from vllm.v1.core.sched.fair_shares import FairShares, Rank
from vllm.v1.core.sched.request_queue import (
    RequestQueue,
    SchedulingPolicy,
    create_request_queue,
)
from vllm.v1.core.sched.requests import Requests
from vllm.v1.core.sched.running_pass import RunningPass
from vllm.v1.core.values.kv_cache_blocks import KVCacheBlocks
from vllm.v1.request import Request

# Tokens of batches' prompts in a step beside answers of others.
_BATCH_TOKENS = 128
# Steps after which those who left are not expected back: batches get whole steps again.
_QUIET_STEPS = 100


class FairRequestQueue(RequestQueue):
    """A queue for each tenant; the next request is the first of the tenant with the lowest rank.

    Owns: the tenants' queues.

    Args:
        shares: Ranks tenants.
        policy: Order among the requests of one.
    """

    def __init__(self, shares: FairShares, policy: SchedulingPolicy) -> None:
        self._shares = shares
        self._make: Callable[[], RequestQueue] = lambda: create_request_queue(policy)
        self._queues: dict[str, RequestQueue] = {}
        self._size = 0

    def _queue_of(self, request: Request) -> RequestQueue:
        name = self._shares.name_of(request.tenant)
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = self._make()
        return queue

    def _next(self) -> RequestQueue:
        if not self._size:
            raise IndexError("an empty queue has no next request")
        rank = self._shares.rank
        return self._queues[min((n for n, queue in self._queues.items() if queue), key=rank)]

    def add_request(self, request: Request) -> None:
        """Add a request at its place among its tenant's."""
        self._queue_of(request).add_request(request)
        self._size += 1

    @override
    def pop_request(self) -> Request:
        request = self._next().pop_request()
        self._size -= 1
        return request

    @override
    def peek_request(self) -> Request:
        return self._next().peek_request()

    def prepend_request(self, request: Request) -> None:
        """Put a request in front of its tenant's (by priority: at its place)."""
        self._queue_of(request).prepend_request(request)
        self._size += 1

    def prepend_requests(self, requests: RequestQueue) -> None:
        """Put all requests of another queue in front of their tenants'."""
        for request in requests:
            self.prepend_request(request)

    @override
    def remove_request(self, request: Request) -> None:
        self._queue_of(request).remove_request(request)
        self._size -= 1

    @override
    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = list(requests)
        for queue in self._queues.values():
            before = len(queue)
            queue.remove_requests(gone)
            self._size -= before - len(queue)

    def __len__(self) -> int:
        return self._size

    def __bool__(self) -> bool:
        return self._size > 0

    def __iter__(self) -> Iterator[Request]:
        for queue in self._queues.values():
            yield from queue


class FairRequests(Requests):
    """``Requests`` of several tenants.

    Owns: the shares, and what of each answer was charged, besides.

    Args:
        shares: Counts what tenants are served.
        policy: Order among the requests of one tenant.
        joint_prompt_tokens: Tokens that prompts may have in a step together; None: any number.
        notes_events: Whether requests note their stages.
        tells_clients: Whether clients want to know which requests ended.
    """

    def __init__(
        self,
        shares: FairShares,
        policy: SchedulingPolicy,
        *,
        joint_prompt_tokens: int | None = None,
        notes_events: bool = False,
        tells_clients: bool = False,
    ) -> None:
        super().__init__(
            policy,
            joint_prompt_tokens=joint_prompt_tokens,
            notes_events=notes_events,
            tells_clients=tells_clients,
        )
        self.shares = shares
        self.waiting = FairRequestQueue(shares, policy)
        self.skipped_waiting = FairRequestQueue(shares, policy)
        # Output tokens of running requests that are charged.
        self._num_charged: dict[Request, int] = {}
        # The best rank of prompts that go on after those who wait with a better one.
        self._deferred_rank: Rank | None = None
        # Since a request was alive that is no batch's; at first nobody is expected.
        self._num_quiet_steps = _QUIET_STEPS

    def _name_of(self, request: Request) -> str:
        return self.shares.name_of(request.tenant)

    def _rank_of(self, request: Request) -> Rank:
        return self.shares.rank(self._name_of(request))

    # ---- in and out --------------------------------------------------------------------------

    @override
    def add(self, request: Request) -> None:
        self.shares.arrive(self._name_of(request))
        super().add(request)

    def admit(self, request: Request, num_computed_tokens: int, timestamp: float) -> None:
        """Let a request run; its tenant is charged for the prompt, once."""
        super().admit(request, num_computed_tokens, timestamp)
        if request not in self._num_charged:
            self._num_charged[request] = request.num_output_tokens
            num_cached = min(num_computed_tokens, request.num_tokens)
            self.shares.charge(
                self._name_of(request),
                num_input=request.num_tokens - num_cached,
                num_cached=num_cached,
            )

    def note_end(self, request: Request) -> None:
        """Remember to tell that a request has ended; what it got is charged."""
        super().note_end(request)
        self._charge_output(request)
        self._num_charged.pop(request, None)
        self.shares.leave(self._name_of(request))

    def _charge_output(self, request: Request) -> None:
        charged = self._num_charged.get(request)
        if charged is not None and request.num_output_tokens > charged:
            self._num_charged[request] = request.num_output_tokens
            num_new = request.num_output_tokens - charged
            self.shares.charge(self._name_of(request), num_output=num_new)

    # ---- who is next -------------------------------------------------------------------------

    def next_queue(self) -> RequestQueue | None:
        """Return the queue whose head is next; None if nobody waits, or deferred prompts go first.

        Of equals those that wait for something else came first.
        """
        waiting, skipped = self.waiting, self.skipped_waiting
        if not waiting and not skipped:
            return None
        queue = skipped or waiting
        if waiting and skipped:
            ours, theirs = waiting.peek_request(), skipped.peek_request()
            mine, other = self._rank_of(ours), self._rank_of(theirs)
            is_first = mine < other
            if mine == other and self.policy is SchedulingPolicy.PRIORITY:
                is_first = ours < theirs
            queue = waiting if is_first else skipped
        deferred = self._deferred_rank
        if deferred is not None and self._rank_of(queue.peek_request()) >= deferred:
            return None
        return queue

    def order_running(self) -> Sequence[Request]:
        """Charge what was generated, and bring running requests into the order of their tenants.

        Returns:
            The last ones, prompts of tenants that rank behind one who waits: they go on with what
            those leave of the step.
        """
        for request in self.running:
            self._charge_output(request)
        self._num_quiet_steps += 1
        if self.shares.has_others(BATCH_TENANT):
            self._num_quiet_steps = 0
        if not self.prefilling or not self.shares.are_contested:
            return ()
        prefilling = self.prefilling
        decodes = [request for request in self.running if request not in prefilling]
        prompts = [request for request in self.running if request in prefilling]
        prompts.sort(key=self._rank_of)
        self.running[:] = decodes + prompts
        queue = self.next_queue()
        if queue is None:
            return ()
        head = self._rank_of(queue.peek_request())
        deferred = [request for request in prompts if self._rank_of(request) > head]
        if deferred:
            self._deferred_rank = self._rank_of(deferred[0])
        return deferred

    def find_chunk_cap(
        self, request: Request, num_scheduled_tokens: Mapping[str, int]
    ) -> int | None:
        """Return how many tokens of a batch's prompt a step may have; see ``Requests``.

        A step takes as long as it has tokens, and whoever comes meanwhile waits for its end: so
        beside the work of others batches get little of a step, and nothing beside their prompts.
        """
        is_batch = self._name_of(request) == BATCH_TENANT
        if not is_batch or request.num_computed_tokens >= request.num_prompt_tokens:
            return None
        if self._num_quiet_steps > _QUIET_STEPS:
            return None
        if any(self._name_of(other) != BATCH_TENANT for other in self.prefilling):
            return 0
        taken = sum(
            count
            for request_id, count in num_scheduled_tokens.items()
            if count > 1 and self._name_of(self.by_id[request_id]) == BATCH_TENANT
        )
        return max(0, _BATCH_TOKENS - taken)

    @override
    def end_deferral(self) -> None:
        self._deferred_rank = None

    def take_displaced(self, max_num_seqs: int) -> Request | None:
        """Take out of ``running`` one whose place is due to one that waits; None: nobody's is.

        Places are held until answers end. So that a tenant with long answers cannot keep others
        waiting for so long, the tenant that has most of them for its weight gives one to a tenant
        that was served less, where it still has no fewer for its weight than that one afterwards.
        One of a later class gives a place to any of an earlier class.
        """
        if len(self.running) < max_num_seqs or not self.waiting:
            return None
        head = self.waiting.peek_request()
        if head.is_blocked or head.num_output_placeholders:
            # It could not use the place yet.
            return None
        name = self._name_of(head)
        last = max(map(self._name_of, self.running), key=self.shares.rank)
        if self.shares.rank(last)[0] > self.shares.rank(name)[0]:
            # Of a later class, whose work nobody of this one waits for.
            return self._displace(last)
        weight = self.shares.weight
        counts = Counter(map(self._name_of, self.running))
        most = max(counts, key=lambda name: (counts[name] / weight(name), self.shares.rank(name)))
        keeps, gets = (counts[most] - 1) / weight(most), (counts[name] + 1) / weight(name)
        if keeps < gets or self.shares.rank(most) <= self.shares.rank(name):
            return None
        return self._displace(most)

    def _displace(self, tenant: str) -> Request:
        """Take a tenant's newest request out of ``running``."""
        displaced = self._newest_of(tenant)
        self.running.remove(displaced)
        return displaced

    def choose_victim(self) -> Request:
        """Return the running request to preempt first: of the tenant that was served most."""
        return self._newest_of(max(map(self._name_of, self.running), key=self.shares.rank))

    def _newest_of(self, tenant: str) -> Request:
        """Return a tenant's running request that its others go before."""
        theirs = [request for request in self.running if self._name_of(request) == tenant]
        if self.policy is SchedulingPolicy.PRIORITY:
            return max(theirs, key=lambda request: (request.priority, request.arrival_time))
        return theirs[-1]


class DeferredPass(RunningPass):
    """Schedules deferred prompts with what others left; they take nobody's blocks for it."""

    def finish(self, deferred: Iterable[Request]) -> None:
        """Fill the step with them, in order."""
        running = set(self.held.requests.running)
        for request in deferred:
            if self.step.token_budget > 0 and request in running:
                self._schedule(request)
                running = set(self.held.requests.running)

    def _allocate(self, request: Request, num_new_tokens: int) -> KVCacheBlocks | None:
        if not self.step.num_scheduled_tokens:
            # Nobody else gets on: one of those that hold blocks must give way, as always.
            return super()._allocate(request, num_new_tokens)
        return self.held.manager.allocate_slots(
            request, num_new_tokens, num_lookahead_tokens=self.limits.num_lookahead_tokens
        )
