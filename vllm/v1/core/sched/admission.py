"""The second half of ``schedule()``: waiting requests enter, with what the caches hold of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from vllm.v1.core.sched.admission_stats import AdmissionStats
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.core.sched.requests import Holdings
from vllm.v1.core.sched.step_builder import SchedulerLimits, StepBuilder, choose_chunk
from vllm.v1.core.values.cache_step import Lookup
from vllm.v1.core.values.kv_cache_blocks import KVCacheBlocks
from vllm.v1.request import Request, RequestStatus

# Waiting requests that say what they share in a step without room: a few, as it costs each step.
_MAX_ANNOUNCED = 16


class Outcome(Enum):
    """What became of one waiting request."""

    DONE = auto()  # it left the queue: scheduled, loading, or refused for good
    SKIP = auto()  # it waits for something other than room; others may pass
    STOP = auto()  # there is no room: nobody passes it


class PrefixLookup(NamedTuple):
    """What the caches hold of a request.

    Attributes:
        start: Where computing begins, in tokens.
        local: Local hit, to be handed to the allocation; None: it was not asked for.
        num_local: Tokens of the local hit.
        num_external: Tokens beyond it that the connector can load.
        load_async: Whether loading takes longer than this step.
        is_fresh: Whether the connector was asked in this step.
    """

    start: int
    local: Lookup | None = None
    num_local: int = 0
    num_external: int = 0
    load_async: bool = False
    is_fresh: bool = False


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
        self.held, self.limits, self.step, self.stats = held, limits, step, stats
        self.requests, self.manager = held.requests, held.manager
        self._finish_loading = finish_loading
        self._skipped = create_request_queue(limits.policy)

    def run(self) -> None:
        """Fill the step until the budget, the running set or the pool is full."""
        requests, only_loaded = self.requests, False
        while self.step.token_budget > 0 and len(requests.running) < self.limits.max_num_seqs:
            queue = requests.next_queue()
            if queue is None:
                break
            request, outcome = queue.peek_request(), Outcome.SKIP
            if not only_loaded or _was_loaded(request):
                outcome = self._try_admit(queue, request)
            if outcome is Outcome.STOP:
                if not self._is_idle():
                    break
                # The room may be with requests behind it that were loaded and could not run yet:
                # unless they pass, nobody ever frees a block.
                only_loaded, outcome = True, Outcome.SKIP
            if outcome is Outcome.SKIP:
                self._skipped.prepend_request(queue.pop_request())
        if self._skipped:
            requests.skipped_waiting.prepend_requests(self._skipped)
        if self.step.token_budget <= 0 or self.step.is_full:
            for request in itertools.islice(requests.waiting, _MAX_ANNOUNCED):
                self.manager.announce(request)

    def _try_admit(self, queue: RequestQueue, request: Request) -> Outcome:
        # Preempted while a step was in flight, its token must arrive first.
        if not self._try_unblock(request) or request.num_output_placeholders > 0:
            return Outcome.SKIP
        found = self._look_up(request)
        if found is None:
            return Outcome.SKIP
        outcome = self._admit(queue, request, found)
        if outcome is not Outcome.STOP or not self._is_idle():
            # Nobody passes a request without room: those that run drain, and it is asked again.
            return outcome
        if not found.num_external or self.manager.usage == 0:
            # Nothing will free a block. Without its hit, and what a connector promised beyond it,
            # the request takes least; and a pool that refused is asked once more. While others
            # load, what a load cannot have is theirs.
            bare = found if found.local is None else PrefixLookup(0, is_fresh=found.is_fresh)
            outcome = self._admit(queue, request, bare)
            if outcome is not Outcome.STOP:
                return outcome
        # With every block free and the whole budget left, nothing better can come. Blocks in use
        # belong to transfers, which will free them.
        manager = self.manager
        if outcome is Outcome.STOP and (manager.usage == 0 or not manager.can_ever_fit(request)):
            queue.pop_request()
            self.held.refuse(
                request,
                f"The request can never run: its {request.num_prompt_tokens} prompt tokens and up "
                f"to {request.max_tokens} output tokens do not fit in the KV cache of "
                f"{manager.block_pool.num_gpu_blocks - 1} blocks. Shorten the prompt or "
                "max_tokens, or give the server more KV cache memory.",
            )
            return Outcome.DONE
        return outcome

    def _is_idle(self) -> bool:
        return not self.requests.running and not self.step.num_scheduled_tokens

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

    def _look_up(self, request: Request) -> PrefixLookup | None:
        """Ask the caches; None if the answer is not known yet."""
        connector, ec_connector = self.held.connector, self.held.encoder.ec_connector
        found = PrefixLookup(request.num_computed_tokens)
        if found.start == 0:  # else the connector loaded its KV: it holds the blocks already
            local = self.manager.look_up(request)
            num_local = local.num_tokens
            if not self._is_idle() and self.manager.should_wait(request, local):
                return None
            num_external: int | None = 0
            load_async = False
            if connector is not None:
                num_external, load_async = connector.get_num_new_matched_tokens(request, num_local)
            if num_external is None:
                return None
            if request.num_scores is not None or request.reads_all_rows:
                # Of what would be loaded no log probabilities are known, and no vectors.
                num_external, load_async = 0, False
            start = num_local + num_external
            found = PrefixLookup(start, local, num_local, num_external, load_async, is_fresh=True)
        if ec_connector is None or not request.has_encoder_inputs:
            return found
        return found if ec_connector.ensure_cache_available(request, found.start) else None

    def _admit(self, queue: RequestQueue, request: Request, found: PrefixLookup) -> Outcome:
        """Take room for a request: to compute a chunk, or to be loaded into."""
        limits, step, encoder = self.limits, self.step, self.held.encoder
        decision, num_reserved, num_encoder_tokens = None, 0, 0
        if found.load_async:
            # A loading request cannot be preempted. So it enters only if everything that already
            # began can still finish beside it; else loads could wait for each other.
            to_finish = self.manager.num_blocks_to_finish_prompt
            num_reserved = sum(map(to_finish, self.requests.prefilling))
        else:
            wanted = limits.cap_chunk(request.num_tokens - found.start)
            if not limits.enable_chunked_prefill and wanted > step.token_budget:
                return Outcome.STOP
            wanted = min(wanted, step.token_budget)
            assert wanted > 0, f"{request} has nothing left to compute."
            decision = choose_chunk(self.held, step, request, found.start, wanted)
            if decision.num_new_tokens == 0:
                encoder.let_go(request)
                return Outcome.SKIP if decision.waits else Outcome.STOP
            num_encoder_tokens = encoder.num_encoder_tokens(request, decision)
        # A first chunk drafts nothing; a decode that continues loaded KV may.
        has_started = request.num_computed_tokens > 0
        taken = self.manager.allocate_slots(
            request,
            0 if decision is None else decision.num_new_tokens,
            num_new_computed_tokens=found.num_local,
            new_computed_blocks=None if found.local is None else found.local.blocks,
            num_lookahead_tokens=limits.num_lookahead_tokens if has_started else 0,
            num_external_computed_tokens=found.num_external,
            delay_cache_blocks=found.load_async,
            num_encoder_tokens=num_encoder_tokens,
            # A preempted request that did not fit would begin, fail and begin again for ever.
            full_sequence_must_fit=limits.reserve_full_isl or request.num_preemptions > 0,
            reserved_blocks=num_reserved,
        )
        if taken is None:
            encoder.let_go(request)
            return Outcome.STOP
        queue.pop_request()
        blocks = self.manager.get_blocks(request.request_id)
        self._tell(request, found, blocks)
        if decision is None:
            self.requests.start_loading(request, found.start)
            self._skipped.prepend_request(request)
            return Outcome.DONE
        group = step.resumed if request.status is RequestStatus.PREEMPTED else step.new
        self.requests.admit(request, found.start, step.timestamp)
        step.loads_within |= found.num_external > 0
        step.add(group, request, decision.num_new_tokens, blocks)
        step.add_encoder_inputs(encoder, request, decision)
        return Outcome.DONE

    def _tell(self, request: Request, found: PrefixLookup, blocks: KVCacheBlocks) -> None:
        """Tell the connector and the statistics what was admitted."""
        if self.held.connector is not None:
            self.held.connector.update_state_after_alloc(request, blocks, found.num_external)
            if found.is_fresh:
                self.stats.record_query(request, found.num_local, found.num_external)
        if request.num_computed_tokens == 0:
            record = self.manager.record_admission(request, found.local, found.start)
            connector = self.held.connector
            note = None if connector is None else connector.hooks.explain_admission(request)
            self.stats.record_admission(request, record, found.num_local, found.num_external, note)


def _was_loaded(request: Request) -> bool:
    """Whether a queued request holds blocks into which a connector loads, or has loaded."""
    loading = RequestStatus.WAITING_FOR_REMOTE_KVS
    return request.num_computed_tokens > 0 or request.status is loading
