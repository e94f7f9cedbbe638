"""The first half of ``schedule()``: requests that run go on, victims make room."""

from __future__ import annotations

from vllm.v1.core.sched.requests import Holdings
from vllm.v1.core.sched.step_builder import SchedulerLimits, StepBuilder, choose_chunk
from vllm.v1.core.values.kv_cache_blocks import KVCacheBlocks
from vllm.v1.request import Request


class RunningPass:
    """Schedules the running requests, in order.

    Args:
        held: The requests and what they hold.
        limits: What bounds the step.
        step: The step to fill.
        num_deferred: How many of them, the last ones, are left to a later pass.
    """

    def __init__(
        self, held: Holdings, limits: SchedulerLimits, step: StepBuilder, num_deferred: int = 0
    ) -> None:
        self.held = held
        self.limits = limits
        self.step = step
        self._num_deferred = num_deferred
        # Position in the running list; preempting an earlier request moves it back.
        self._index = 0

    def run(self) -> None:
        """Fill the step until the budget ends or a request had to preempt itself."""
        running = self.held.requests.running
        while self._index < len(running) - self._num_deferred and self.step.token_budget > 0:
            if not self._schedule(running[self._index]):
                break
            self._index += 1

    def _schedule(self, request: Request) -> bool:
        """Schedule one request; False if it lost its own blocks."""
        step = self.step
        start = request.num_computed_tokens
        if self._decodes_one(request, start):
            new_blocks = self._allocate(request, 1)
            if new_blocks is None:
                return False
            step.add(step.running, request, 1, new_blocks)
            return True
        decision = choose_chunk(self.held, step, request, start, self._count_tokens(request))
        num_new_tokens = decision.num_new_tokens
        if num_new_tokens == 0:
            return True
        new_blocks = self._take_blocks(request, num_new_tokens)
        if new_blocks is None and request.spec_token_ids:
            # Nobody makes room for what is only guessed.
            request.propose_drafts([])
            return self._schedule(request)
        new_blocks = new_blocks or self._allocate(request, num_new_tokens)
        if new_blocks is None:
            return False
        step.add(step.running, request, num_new_tokens, new_blocks)
        self._take_drafts(request, num_new_tokens)
        step.add_encoder_inputs(self.held.encoder, request, decision)
        return True

    def _decodes_one(self, request: Request, start: int) -> bool:
        """Whether this is the usual step, whose one token nothing below would change."""
        return (
            request.num_tokens_with_spec - start == 1
            and not request.num_output_placeholders
            and not request.mm_features
            and start < self.limits.max_model_len - 1
        )

    def _count_tokens(self, request: Request) -> int:
        limits = self.limits
        if request.is_surely_done(has_drafts=limits.num_spec_tokens > 0):
            return 0
        wanted = (
            request.num_tokens_with_spec
            + request.num_output_placeholders
            - request.num_computed_tokens
        )
        # The last token of a sequence of full length is sampled but never computed.
        longest = limits.max_model_len - (request.pooling_params is None)
        room = longest - request.num_computed_tokens
        return max(0, min(limits.cap_chunk(wanted), self.step.token_budget, room))

    def _allocate(self, request: Request, num_new_tokens: int) -> KVCacheBlocks | None:
        """Take blocks, preempting others or, at last, the request itself (then None)."""
        while (new_blocks := self._take_blocks(request, num_new_tokens)) is None:
            victim = self.held.requests.choose_victim()
            self._preempt(victim)
            if victim is request:
                return None
        return new_blocks

    def _take_blocks(self, request: Request, num_new_tokens: int) -> KVCacheBlocks | None:
        """Take blocks if there are enough."""
        return self.held.manager.allocate_slots(
            request, num_new_tokens, num_lookahead_tokens=self.limits.num_lookahead_tokens
        )

    def _preempt(self, victim: Request) -> None:
        running = self.held.requests.running
        index = running.index(victim)
        if index >= len(running) - self._num_deferred:
            self._num_deferred -= 1
        del running[index]
        if index < self._index:
            self._index -= 1
        taken = self.step.encoder_inputs.get(victim.request_id, ())
        self.step.withdraw(victim)
        self.held.preempt(victim, self.step.timestamp)
        self.held.encoder.cache.forget(victim, taken)
        # Room that preemption makes belongs to those who run: admitting now would thrash.
        self.step.holds_admission = True

    def _take_drafts(self, request: Request, num_new_tokens: int) -> None:
        """Note the drafts that fit into the step."""
        if not request.spec_token_ids:
            return
        num_drafts = (
            request.num_computed_tokens
            + num_new_tokens
            - request.num_tokens
            - request.num_output_placeholders
        )
        drafts = request.take_drafts(num_drafts)
        if drafts:
            self.step.spec_tokens[request.request_id] = drafts
