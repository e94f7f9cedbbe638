"""The second half of ``schedule()``: waiting requests enter, with what the caches hold of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from vllm.v1.core.cache_step import Lookup
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.sched.admission_stats import AdmissionStats
from vllm.v1.core.sched.encoder_inputs import EncoderDecision
from vllm.v1.core.sched.holdings import Holdings
from vllm.v1.core.sched.limits import SchedulerLimits
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.core.sched.running_pass import fit_chunk
from vllm.v1.core.sched.step_builder import StepBuilder
from vllm.v1.request import Request, RequestStatus


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
        held: The requests and what they hold.
        limits: What bounds the step.
        step: The step to fill.
        stats: Counts admissions.
        finish_loading: Lets a request whose KV arrived go on from it.
    """

    def __init__(
        self,
        held: Holdings,
        limits: SchedulerLimits,
        step: StepBuilder,
        stats: AdmissionStats,
        finish_loading: Callable[[Request], None],
    ) -> None:
        self.held = held
        self.requests = held.requests
        self.manager = held.manager
        self.limits = limits
        self.step = step
        self.stats = stats
        self._finish_loading = finish_loading
        self._skipped = create_request_queue(limits.policy)

    def run(self) -> None:
        """Fill the step until the budget, the running set or the pool is full."""
        while self.step.token_budget > 0:
            if len(self.requests.running) >= self.limits.max_num_seqs:
                break
            queue = self.requests.next_queue()
            if queue is None:
                break
            outcome = self._try_admit(queue)
            if outcome is Outcome.STOP:
                break
            if outcome is Outcome.SKIP:
                self._skipped.prepend_request(queue.pop_request())
        if self._skipped:
            self.requests.skipped_waiting.prepend_requests(self._skipped)

    def _try_admit(self, queue: RequestQueue) -> Outcome:
        request = queue.peek_request()
        if not self._try_unblock(request):
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
            lookup = PrefixLookup(is_fresh=lookup.is_fresh)
            outcome = self._admit(queue, request, lookup)
        if outcome is Outcome.STOP and self._can_never_run(request):
            queue.pop_request()
            self._refuse(request)
            return Outcome.DONE
        return outcome

    def _try_unblock(self, request: Request) -> bool:
        """Whether a queued request may be scheduled; what it waited for may have come."""
        if not request.is_blocked:
            return True
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            if self.requests.is_loading(request):
                return False
            self._finish_loading(request)
        elif request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            if not request.has_grammar:
                return False
        elif not request.streaming_queue:
            return False
        request.unblock()
        return True

    def _is_idle(self) -> bool:
        return not self.requests.running and not self.step.num_scheduled_tokens

    @staticmethod
    def _may_drop_hit(lookup: PrefixLookup) -> bool:
        # What the connector promised beyond the hit cannot be taken without it.
        return lookup.num_local_tokens > 0 and lookup.num_external_tokens == 0

    def _can_never_run(self, request: Request) -> bool:
        """Whether waiting would not help the request that just found no room."""
        if not self._is_idle():
            # Nobody passes it, so the running requests drain and it is asked again.
            return False
        # With every block free and the whole budget left, nothing better can come. Blocks in use
        # belong to transfers, which will free them.
        return self.manager.usage == 0 or not self.manager.can_ever_fit(request)

    def _refuse(self, request: Request) -> None:
        num_blocks = self.manager.block_pool.num_gpu_blocks - 1
        self.held.refuse(
            request,
            f"The request can never run: its {request.num_prompt_tokens} prompt tokens and up to "
            f"{request.max_tokens} output tokens do not fit in the KV cache of {num_blocks} "
            "blocks. Shorten the prompt or max_tokens, or give the server more KV cache memory.",
        )

    # ------------------------------------------------------------------ lookup

    def _look_up(self, request: Request) -> PrefixLookup | None:
        """Ask the caches; None if the answer is not known yet."""
        if request.num_computed_tokens > 0:
            # Its KV was loaded by the connector: it holds the blocks already.
            lookup = PrefixLookup()
        else:
            local = self.manager.look_up(request)
            if not self._is_idle() and self.manager.should_wait(request, local):
                return None
            num_external, load_async = 0, False
            if self.held.connector is not None:
                found, load_async = self.held.connector.get_num_new_matched_tokens(
                    request, local.num_tokens
                )
                if found is None:
                    return None
                num_external = found
            lookup = PrefixLookup(local, num_external, load_async, is_fresh=True)
        ec_connector = self.held.encoder.ec_connector
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
        limits, step = self.limits, self.step
        wanted = limits.cap_chunk(request.num_tokens - start)
        if not limits.enable_chunked_prefill and wanted > step.token_budget:
            return None
        wanted = min(wanted, step.token_budget)
        assert wanted > 0, f"{request} has nothing left to compute."
        decision = self.held.encoder.decide(request, start, wanted, step.encoder_budget)
        if decision.num_new_tokens > 0:
            decision.num_new_tokens = fit_chunk(
                self.manager, step, request, start, decision.num_new_tokens
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
        # A first chunk drafts nothing; a decode that continues loaded KV may.
        has_started = request.num_computed_tokens > 0
        num_encoder_tokens = (
            0 if decision is None else self.held.encoder.num_encoder_tokens(request, decision)
        )
        found = lookup.local
        return self.manager.allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens=lookup.num_local_tokens,
            new_computed_blocks=None if found is None else found.blocks,
            num_lookahead_tokens=self.limits.num_lookahead_tokens if has_started else 0,
            num_external_computed_tokens=lookup.num_external_tokens,
            delay_cache_blocks=lookup.load_async,
            num_encoder_tokens=num_encoder_tokens,
            # A preempted request that did not fit would begin, fail and begin again for ever.
            full_sequence_must_fit=self.limits.reserve_full_isl or request.num_preemptions > 0,
            reserved_blocks=reserved_blocks,
        )

    def _after_allocation(self, request: Request, lookup: PrefixLookup) -> None:
        """Tell the connector and the statistics what was admitted."""
        num_local, num_external = lookup.num_local_tokens, lookup.num_external_tokens
        if self.held.connector is not None:
            blocks = self.manager.get_blocks(request.request_id)
            self.held.connector.update_state_after_alloc(request, blocks, num_external)
            if lookup.is_fresh:
                self.stats.record_query(request, num_local, num_external)
        if request.num_computed_tokens == 0:
            start = self._start(request, lookup)
            record = self.manager.record_admission(request, lookup.local, start)
            self.stats.record_admission(request, record, num_local, num_external)

    def _start_running(self, request: Request, start: int, decision: EncoderDecision) -> None:
        step, encoder = self.step, self.held.encoder
        group = step.resumed if request.status is RequestStatus.PREEMPTED else step.new
        self.requests.admit(request, start, step.timestamp)
        blocks = self.manager.get_blocks(request.request_id)
        step.add(group, request, decision.num_new_tokens, blocks)
        if decision.compute or decision.external:
            encoder.commit(request, decision)
        if decision.compute:
            step.add_encoder_inputs(request, decision.compute, decision.budget)

    # ------------------------------------------------------------------- loads

    def _start_loading(
        self, queue: RequestQueue, request: Request, lookup: PrefixLookup
    ) -> Outcome:
        """Give a request the blocks its KV is loaded into; it computes nothing yet.

        A loading request cannot be preempted. So it enters only if everything that already began
        can still finish beside it; otherwise loads could hold all blocks and wait for each other.
        """
        reserved = self._num_blocks_reserved()
        if self._allocate(request, lookup, 0, reserved_blocks=reserved) is None:
            return Outcome.STOP
        queue.pop_request()
        self._after_allocation(request, lookup)
        self.requests.start_loading(request, self._start(request, lookup))
        self._skipped.prepend_request(request)
        return Outcome.DONE

    def _num_blocks_reserved(self) -> int:
        """Return the blocks that requests in prefill, or loading, will still take."""
        return sum(map(self.manager.num_blocks_to_finish_prompt, self.requests.prefilling))
