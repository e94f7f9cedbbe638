"""The first half of ``schedule()``: requests that run go on, victims make room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import SchedulingPolicy

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.encoder_inputs import EncoderPlanner
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.sched.step_plan import StepPlan
    from vllm.v1.request import Request


def fit_chunk(
    scheduler: Scheduler, plan: StepPlan, request: Request, start: int, num_new_tokens: int
) -> int:
    """Let the KV manager choose where a prefill chunk ends.

    Args:
        scheduler: The scheduler.
        plan: The step so far.
        request: The request; ``num_computed_tokens`` does not include a hit yet.
        start: Where the chunk begins, a hit included.
        num_new_tokens: Tokens that budget and threshold allow.

    Returns:
        Tokens to compute; 0: wait for a step with more budget.
    """
    if request.num_tokens - start <= 1:
        return num_new_tokens  # a decode step
    # Asked from num_computed_tokens on, so that the answer is an absolute position with a hit too.
    base = request.num_computed_tokens
    end = base + scheduler.kv_cache_manager.chunk_end(request, start - base + num_new_tokens)
    if end > start:
        return min(end - start, num_new_tokens)
    if end == base and plan.num_scheduled_tokens:
        return 0
    # Alone in the step, waiting would not bring a larger budget; and an end inside the hit says
    # nothing about the rest.
    return num_new_tokens


class RunningPass:
    """Schedules the running requests, in order.

    Args:
        scheduler: Whose requests they are.
        plan: The step to fill.
        encoder: Chooses encoder inputs.
    """

    def __init__(self, scheduler: Scheduler, plan: StepPlan, encoder: EncoderPlanner) -> None:
        self.scheduler = scheduler
        self.plan = plan
        self.encoder = encoder
        # Position in the running list; preempting an earlier request moves it back.
        self._index = 0

    def run(self) -> None:
        """Fill the plan until the budget ends or a request had to preempt itself."""
        running = self.scheduler.running
        while self._index < len(running) and self.plan.token_budget > 0:
            if not self._schedule(running[self._index]):
                break
            self._index += 1

    def _schedule(self, request: Request) -> bool:
        """Schedule one request; False if it lost its own blocks."""
        scheduler, plan = self.scheduler, self.plan
        start = request.num_computed_tokens
        num_new_tokens = self._count_tokens(request)
        decision = self.encoder.decide(request, start, num_new_tokens, plan.encoder_budget)
        if decision.num_new_tokens == 0:
            return True
        wanted = decision.num_new_tokens
        num_new_tokens = fit_chunk(scheduler, plan, request, start, wanted)
        if num_new_tokens == 0:
            plan.holds_admission = True
            return True
        new_blocks = self._allocate(request, num_new_tokens)
        if new_blocks is None:
            return False
        plan.add(plan.running, request, num_new_tokens, new_blocks)
        self._take_spec_tokens(request, num_new_tokens)
        if decision.compute or decision.external:
            self.encoder.commit(request, decision)
        if decision.compute:
            plan.add_encoder_inputs(request, decision.compute, decision.budget)
        return True

    def _count_tokens(self, request: Request) -> int:
        scheduler = self.scheduler
        if scheduler._is_surely_done(request):
            return 0
        wanted = (
            request.num_tokens_with_spec
            + request.num_output_placeholders
            - request.num_computed_tokens
        )
        # The last token of a sequence of full length is sampled but never computed.
        room = scheduler.max_model_len - 1 - request.num_computed_tokens
        wanted = scheduler.limits.cap_chunk(wanted)
        return max(0, min(wanted, self.plan.token_budget, room))

    def _allocate(self, request: Request, num_new_tokens: int) -> KVCacheBlocks | None:
        """Take blocks, preempting others or, at last, the request itself (then None)."""
        scheduler = self.scheduler
        while True:
            new_blocks = scheduler.kv_cache_manager.allocate_slots(
                request,
                num_new_tokens,
                num_lookahead_tokens=scheduler.limits.num_lookahead_tokens,
            )
            if new_blocks is not None:
                return new_blocks
            victim = self._choose_victim()
            self._preempt(victim)
            if victim is request:
                return None

    def _choose_victim(self) -> Request:
        running = self.scheduler.running
        if self.scheduler.limits.policy is SchedulingPolicy.PRIORITY:
            return max(running, key=lambda request: (request.priority, request.arrival_time))
        return running[-1]

    def _preempt(self, victim: Request) -> None:
        running = self.scheduler.running
        index = running.index(victim)
        del running[index]
        if index < self._index:
            self._index -= 1
        self.plan.withdraw(victim)
        self.scheduler._preempt_request(victim, self.plan.timestamp)
        self.plan.preempted.append(victim)

    def _take_spec_tokens(self, request: Request, num_new_tokens: int) -> None:
        """Note the drafts that fit into the step; drafts serve one step only."""
        if not request.spec_token_ids:
            return
        num_drafts = (
            request.num_computed_tokens
            + num_new_tokens
            - request.num_tokens
            - request.num_output_placeholders
        )
        if num_drafts > 0:
            self.plan.spec_tokens[request.request_id] = request.spec_token_ids[:num_drafts]
        request.spec_token_ids = []
