"""The second half of ``schedule()``: waiting requests enter, with what the caches hold of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from vllm.v1.core.cache_step import Lookup
from vllm.v1.core.sched.request_queue import (
    RequestQueue,
    SchedulingPolicy,
    create_request_queue,
)
from vllm.v1.core.sched.running_pass import fit_chunk
from vllm.v1.messages import EngineCoreEventType
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.encoder_inputs import EncoderDecision, EncoderPlanner
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.sched.step_plan import StepPlan
    from vllm.v1.request import Request


class Outcome(Enum):
    """What became of one waiting request."""

    DONE = auto()  # it left the queue: scheduled, loading, or refused for good
    SKIP = auto()  # it waits for something other than room; others may pass
    STOP = auto()  # there is no room: nobody passes it


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """What the caches hold of a request.

    Attributes:
        local: Local hit, to be handed to the allocation; None: it was not asked for.
        num_external_tokens: Tokens beyond it that the connector can load.
        load_async: Whether loading takes longer than this step.
        is_fresh: Whether the connector was asked in this step.
    """

    local: Lookup | None = None
    num_external_tokens: int = 0
    load_async: bool = False
    is_fresh: bool = False

    @property
    def num_local_tokens(self) -> int:
        """Tokens of the local hit."""
        return 0 if self.local is None else self.local.num_tokens


class AdmissionPass:
    """Admits waiting requests while there is room.

    Owns: the requests passed over in this step.

    Args:
        scheduler: Whose requests they are.
        plan: The step to fill.
        encoder: Chooses encoder inputs.
    """

    def __init__(self, scheduler: Scheduler, plan: StepPlan, encoder: EncoderPlanner) -> None:
        self.scheduler = scheduler
        self.plan = plan
        self.encoder = encoder
        self._skipped = create_request_queue(scheduler.limits.policy)

    def run(self) -> None:
        """Fill the plan until the budget, the running set or the pool is full."""
        scheduler = self.scheduler
        while self.plan.token_budget > 0:
            if len(scheduler.running) >= scheduler.limits.max_num_seqs:
                break
            queue = self._choose_queue()
            if queue is None:
                break
            outcome = self._try_admit(queue)
            if outcome is Outcome.STOP:
                break
            if outcome is Outcome.SKIP:
                self._skipped.prepend_request(queue.pop_request())
        if self._skipped:
            scheduler.skipped_waiting.prepend_requests(self._skipped)

    def _choose_queue(self) -> RequestQueue | None:
        """Return the queue whose head is next."""
        waiting, skipped = self.scheduler.waiting, self.scheduler.skipped_waiting
        if not waiting or not skipped:
            return skipped or waiting or None
        if self.scheduler.limits.policy is SchedulingPolicy.FCFS:
            return skipped  # they came first
        return waiting if waiting.peek_request() < skipped.peek_request() else skipped

    def _try_admit(self, queue: RequestQueue) -> Outcome:
        request = queue.peek_request()
        if not self.scheduler._try_promote(request):
            return Outcome.SKIP
        if request.num_output_placeholders > 0:
            # Preempted while a step was in flight: its token must arrive first.
            return Outcome.SKIP
        lookup = self._look_up(request)
        if lookup is None:
            return Outcome.SKIP
        outcome = self._admit(queue, request, lookup)
        if outcome is Outcome.STOP and self._is_idle() and self._may_drop_hit(lookup):
            # Nothing will free a block: the hit itself must be what does not fit.
            lookup = PrefixLookup()
            outcome = self._admit(queue, request, lookup)
        if outcome is Outcome.STOP and self._can_never_run(request):
            queue.pop_request()
            self.scheduler._refuse(request)
            return Outcome.DONE
        return outcome

    def _is_idle(self) -> bool:
        return not self.scheduler.running and not self.plan.num_scheduled_tokens

    @staticmethod
    def _may_drop_hit(lookup: PrefixLookup) -> bool:
        # What the connector promised beyond the hit cannot be taken without it.
        return lookup.num_local_tokens > 0 and lookup.num_external_tokens == 0

    def _can_never_run(self, request: Request) -> bool:
        """Whether waiting would not help the request that just found no room."""
        if not self._is_idle():
            # Nobody passes it, so the running requests drain and it is asked again.
            return False
        manager = self.scheduler.kv_cache_manager
        # With every block free and the whole budget left, nothing better can come. Blocks in use
        # belong to transfers, which will free them.
        return manager.usage == 0 or not manager.can_ever_fit(request)

    # ------------------------------------------------------------------ lookup

    def _look_up(self, request: Request) -> PrefixLookup | None:
        """Ask the caches; None if the answer is not known yet."""
        scheduler = self.scheduler
        manager = scheduler.kv_cache_manager
        if request.num_computed_tokens > 0:
            # Its KV was loaded by the connector: it holds the blocks already.
            lookup = PrefixLookup()
        else:
            local = manager.look_up(request)
            if not self._is_idle() and manager.should_wait(request, local):
                return None
            num_external, load_async = 0, False
            if scheduler.connector is not None:
                found, load_async = scheduler.connector.get_num_new_matched_tokens(
                    request, local.num_tokens
                )
                if found is None:
                    return None
                num_external = found
            lookup = PrefixLookup(local, num_external, load_async, is_fresh=True)
        ec_connector = scheduler.ec_connector
        if ec_connector is not None and request.has_encoder_inputs:
            start = self._start(request, lookup)
            if not ec_connector.ensure_cache_available(request, start):
                return None
        return lookup

    @staticmethod
    def _start(request: Request, lookup: PrefixLookup) -> int:
        return request.num_computed_tokens + lookup.num_local_tokens + lookup.num_external_tokens

    # --------------------------------------------------------------- admission

    def _admit(self, queue: RequestQueue, request: Request, lookup: PrefixLookup) -> Outcome:
        if lookup.load_async:
            return self._start_loading(queue, request, lookup)
        start = self._start(request, lookup)
        decision = self._choose_tokens(request, start)
        if decision is None:
            return Outcome.STOP
        if self._allocate(request, lookup, decision.num_new_tokens, decision) is None:
            return Outcome.STOP
        queue.pop_request()
        self._after_allocation(request, lookup)
        self._start_running(request, start, decision)
        return Outcome.DONE

    def _choose_tokens(self, request: Request, start: int) -> EncoderDecision | None:
        """Return the chunk and its encoder inputs; None if the budget allows none."""
        limits, plan = self.scheduler.limits, self.plan
        wanted = limits.cap_chunk(request.num_tokens - start)
        if not limits.enable_chunked_prefill and wanted > plan.token_budget:
            return None
        wanted = min(wanted, plan.token_budget)
        assert wanted > 0, f"{request} has nothing left to compute."
        decision = self.encoder.decide(request, start, wanted, plan.encoder_budget)
        if decision.num_new_tokens > 0:
            decision.num_new_tokens = fit_chunk(
                self.scheduler, plan, request, start, decision.num_new_tokens
            )
        return decision if decision.num_new_tokens > 0 else None

    def _allocate(
        self,
        request: Request,
        lookup: PrefixLookup,
        num_new_tokens: int,
        decision: EncoderDecision | None = None,
        reserved_blocks: int = 0,
    ) -> KVCacheBlocks | None:
        scheduler = self.scheduler
        # A first chunk drafts nothing; a decode that continues loaded KV may.
        has_started = request.num_computed_tokens > 0
        num_encoder_tokens = (
            0 if decision is None else self.encoder.num_encoder_tokens(request, decision)
        )
        return scheduler.kv_cache_manager.allocate_slots(
            request,
            num_new_tokens,
            num_lookahead_tokens=scheduler.limits.num_lookahead_tokens if has_started else 0,
            num_external_computed_tokens=lookup.num_external_tokens,
            delay_cache_blocks=lookup.load_async,
            num_encoder_tokens=num_encoder_tokens,
            # A preempted request that did not fit would begin, fail and begin again for ever.
            full_sequence_must_fit=scheduler.limits.reserve_full_isl or request.num_preemptions > 0,
            reserved_blocks=reserved_blocks,
            lookup=lookup.local,
        )

    def _after_allocation(self, request: Request, lookup: PrefixLookup) -> None:
        """Tell the connector and the statistics what was admitted."""
        scheduler = self.scheduler
        scheduler._inflight_prefills.add(request)
        if scheduler.connector is not None:
            scheduler.connector.update_state_after_alloc(
                request,
                scheduler.kv_cache_manager.get_blocks(request.request_id),
                lookup.num_external_tokens,
            )
            stats = scheduler.connector_prefix_cache_stats
            if stats is not None and lookup.is_fresh:
                stats.record(
                    num_tokens=request.num_tokens - lookup.num_local_tokens,
                    num_hits=lookup.num_external_tokens,
                    preempted=request.num_preemptions > 0,
                )
        if request.num_computed_tokens == 0:
            start = self._start(request, lookup)
            record = scheduler.kv_cache_manager.record_admission(request, lookup.local, start)
            scheduler._record_admission(request, record)

    def _start_running(self, request: Request, start: int, decision: EncoderDecision) -> None:
        scheduler, plan = self.scheduler, self.plan
        group = plan.resumed if request.status is RequestStatus.PREEMPTED else plan.new
        scheduler.running.append(request)
        if scheduler.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED, plan.timestamp)
        request.start_running(start)
        blocks = scheduler.kv_cache_manager.get_blocks(request.request_id)
        plan.add(group, request, decision.num_new_tokens, blocks)
        if decision.compute or decision.external:
            self.encoder.commit(request, decision)
        if decision.compute:
            plan.add_encoder_inputs(request, decision.compute, decision.budget)

    def _start_loading(
        self, queue: RequestQueue, request: Request, lookup: PrefixLookup
    ) -> Outcome:
        """Give a request the blocks its KV is loaded into; it computes nothing yet.

        A loading request cannot be preempted. So it enters only if everything that already began
        can still finish beside it; otherwise loads could hold all blocks and wait for each other.
        """
        scheduler = self.scheduler
        reserved = scheduler._blocks_reserved_for_prefills()
        if self._allocate(request, lookup, 0, reserved_blocks=reserved) is None:
            return Outcome.STOP
        queue.pop_request()
        self._after_allocation(request, lookup)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = self._start(request, lookup)
        self._skipped.prepend_request(request)
        return Outcome.DONE
