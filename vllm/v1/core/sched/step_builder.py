"""What bounds one ``schedule()``, what it has decided so far, and the message that becomes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.sched.encoder_inputs import EncoderDecision
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.core.sched.request_queue import SchedulingPolicy

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.encoder_inputs import EncoderPlanner
    from vllm.v1.core.sched.requests import Holdings
    from vllm.v1.core.values.kv_cache_blocks import KVCacheBlocks
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The scheduler's numbers.

    Attributes:
        policy: Order of admission and choice of victims.
        max_model_len: Longest request in tokens.
        max_num_seqs: Requests running at a time.
        max_num_tokens: Tokens of one step.
        long_prefill_token_threshold: Longest chunk of one request in a step; 0: no limit.
        joint_prompt_tokens: Tokens that prompts may have in a step together; None: any number.
        enable_chunked_prefill: Whether a prompt may be computed in pieces.
        reserve_full_isl: Whether a request is admitted only if its whole prompt will fit.
        disable_chunked_mm_input: Whether a multimodal item must be computed in one step.
        num_spec_tokens: Draft tokens of a step; 0 without a drafter.
        use_eagle: Whether the drafter's KV rows depend on the next token (EAGLE, MTP).
        num_lookahead_tokens: Slots the drafter writes beyond a step's tokens.
        stale_row: What becomes of its row that another next token made.
        sends_new_tokens: Whether workers learn sampled tokens from the scheduler (pipelines).
    """

    policy: SchedulingPolicy
    max_model_len: int
    max_num_seqs: int
    max_num_tokens: int
    long_prefill_token_threshold: int
    joint_prompt_tokens: int | None
    enable_chunked_prefill: bool
    reserve_full_isl: bool
    disable_chunked_mm_input: bool
    num_spec_tokens: int
    use_eagle: bool
    num_lookahead_tokens: int
    stale_row: str
    sends_new_tokens: bool

    @classmethod
    def from_config(cls, vllm_config: VllmConfig) -> SchedulerLimits:
        """Read the limits."""
        config = vllm_config.scheduler_config
        speculative = vllm_config.speculative_config
        num_spec_tokens = speculative.num_speculative_tokens if speculative is not None else 0
        use_eagle = speculative is not None and speculative.use_eagle()
        pipelined = vllm_config.parallel_config.pipeline_parallel_size > 1
        return cls(
            policy=SchedulingPolicy(config.policy),
            max_model_len=vllm_config.model_config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_scheduled_tokens or config.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            joint_prompt_tokens=config.joint_prompt_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            reserve_full_isl=config.scheduler_reserve_full_isl,
            disable_chunked_mm_input=config.disable_chunked_mm_input,
            num_spec_tokens=num_spec_tokens,
            use_eagle=use_eagle,
            # An n-gram drafter has no KV rows to write ahead.
            num_lookahead_tokens=num_spec_tokens if use_eagle else 0,
            stale_row=speculative.stale_row if speculative is not None else "keep",
            sends_new_tokens=pipelined and not config.async_scheduling,
        )

    def cap_chunk(self, num_new_tokens: int) -> int:
        """Shorten a chunk to the long-prefill threshold."""
        if 0 < self.long_prefill_token_threshold < num_new_tokens:
            return self.long_prefill_token_threshold
        return num_new_tokens


@dataclass(slots=True)
class StepBuilder:
    """The decisions of one step, and what is left of its budgets.

    Owns: the budgets and lists of the step; requests and blocks belong to others.

    Attributes:
        token_budget: Tokens that may still be scheduled.
        encoder_budget: Encoder embeddings that may still be computed.
        timestamp: Monotonic time of the step, in seconds, for its events.
        new: Requests the workers see for the first time.
        resumed: Preempted requests that begin again.
        running: Requests that go on.
        num_scheduled_tokens: Tokens to compute, by request.
        new_blocks: Blocks the workers do not know yet, by request.
        spec_tokens: Draft tokens to verify, by request; only those with any.
        encoder_inputs: Multimodal items to encode, by request.
        holds_admission: Nobody may enter: a running request was preempted, or its prefill waits
            for more budget.
        loads_within: Whether a connector loads blocks that the step itself reads.
        is_full: Whether a prompt had to wait because of those in the step.
    """

    token_budget: int
    encoder_budget: int
    timestamp: float = field(default_factory=time.monotonic)
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_blocks: dict[str, KVCacheBlocks] = field(default_factory=dict)
    spec_tokens: dict[str, list[int]] = field(default_factory=dict)
    encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    holds_admission: bool = False
    loads_within: bool = False
    is_full: bool = False

    @property
    def total_num_tokens(self) -> int:
        """Tokens scheduled over all requests."""
        return sum(self.num_scheduled_tokens.values())

    def add(
        self, group: list[Request], request: Request, num_tokens: int, new_blocks: KVCacheBlocks
    ) -> None:
        """Schedule tokens of a request.

        Args:
            group: ``new``, ``resumed`` or ``running``.
            request: The request.
            num_tokens: Its tokens in this step.
            new_blocks: Its blocks that the workers do not know yet.
        """
        group.append(request)
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.new_blocks[request.request_id] = new_blocks
        self.token_budget -= num_tokens

    def add_encoder_inputs(
        self, encoder: EncoderPlanner, request: Request, decision: EncoderDecision
    ) -> None:
        """Schedule the multimodal items that a request's tokens need."""
        if decision.compute or decision.external:
            encoder.commit(request, decision)
        if decision.compute:
            self.encoder_inputs[request.request_id] = decision.compute
            self.encoder_budget = decision.budget

    def withdraw(self, request: Request) -> bool:
        """Take a running request out of the step again, returning what it was given.

        Returns:
            Whether it was scheduled.
        """
        request_id = request.request_id
        if request_id not in self.num_scheduled_tokens:
            return False
        self.running.remove(request)
        self.token_budget += self.num_scheduled_tokens.pop(request_id)
        self.new_blocks.pop(request_id)
        self.spec_tokens.pop(request_id, None)
        for input_id in self.encoder_inputs.pop(request_id, ()):
            self.encoder_budget += request.get_num_encoder_embeds(input_id)
        return True

    # ------------------------------------------------------------------ messages

    def make_new_request_data(self, *, resumed_as_new: bool) -> list[NewRequestData]:
        """Describe requests whose state the workers must set up.

        Args:
            resumed_as_new: Whether workers drop a preempted request and want it whole again.
        """
        data = [
            NewRequestData.from_request(r, self.new_blocks[r.request_id].get_block_ids())
            for r in self.new
        ]
        if resumed_as_new:
            data += [
                NewRequestData.from_request(
                    r, self.new_blocks[r.request_id].get_block_ids(), r.all_token_ids.copy()
                )
                for r in self.resumed
            ]
        return data

    def make_cached_request_data(
        self, previous_step: set[str], *, resumed_as_new: bool, sends_new_tokens: bool
    ) -> CachedRequestData:
        """Describe what changed in requests the workers know.

        Args:
            previous_step: Requests scheduled in the step before.
            resumed_as_new: See ``make_new_request_data``.
            sends_new_tokens: Whether workers learn sampled tokens from here.
        """
        resumed = [] if resumed_as_new else self.resumed
        requests = [*self.running, *resumed]
        new_blocks = self.new_blocks
        return CachedRequestData(
            req_ids=[r.request_id for r in requests],
            resumed_req_ids={r.request_id for r in resumed},
            new_token_ids=[self._new_tokens(r) if sends_new_tokens else [] for r in requests],
            all_token_ids={
                r.request_id: r.all_token_ids.copy()
                for r in requests
                if r.request_id not in previous_step
            },
            # Of a resumed request all blocks, even if there are none.
            new_block_ids=[
                *[new_blocks[r.request_id].get_block_ids(allow_none=True) for r in self.running],
                *[new_blocks[r.request_id].get_block_ids() for r in resumed],
            ],
            num_computed_tokens=[r.num_computed_tokens for r in requests],
            num_output_tokens=[r.num_output_tokens + r.num_output_placeholders for r in requests],
        )

    def _new_tokens(self, request: Request) -> list[int]:
        """Return the known tokens that the step computes, drafts left out."""
        request_id = request.request_id
        num_drafts = len(self.spec_tokens.get(request_id, ()))
        start = request.num_computed_tokens
        end = start + self.num_scheduled_tokens[request_id] - num_drafts
        return request.all_token_ids[start:end]


def choose_chunk(
    held: Holdings, step: StepBuilder, request: Request, start: int, num_new_tokens: int
) -> EncoderDecision:
    """Let the encoder's inputs, then the KV manager, shorten a chunk.

    Args:
        held: The requests and what they hold.
        step: The step so far; it holds admission where the chunk waits for more budget.
        request: The request; ``num_computed_tokens`` does not include a hit yet.
        start: Where the chunk begins, a hit included.
        num_new_tokens: Tokens that budget and threshold allow.

    Returns:
        Tokens to compute, perhaps 0 in this step, and what the encoder must provide for them.
    """
    most = held.requests.find_chunk_cap(request, step.num_scheduled_tokens)
    if most is not None:
        num_new_tokens = min(num_new_tokens, most)
    decision = held.encoder.decide(
        request, start, num_new_tokens, step.encoder_budget, step.token_budget
    )
    if decision.num_new_tokens:
        # Asked last: what is made beside the steps is made while the prompt waits.
        if not held.requests.may_join(request, decision.num_new_tokens, step.num_scheduled_tokens):
            held.requests.make_way(request, step.num_scheduled_tokens)
            step.is_full = True
            return EncoderDecision(0, step.encoder_budget)
        fitting = fit_chunk(held.manager, step, request, start, decision.num_new_tokens)
        if fitting and request.has_encoder_inputs:
            fitting = held.encoder.fit_items(request, start, fitting, step.token_budget)
        decision.num_new_tokens = fitting
        # What is capped waits for no larger budget.
        step.holds_admission |= fitting == 0 and most is None
    return decision


def fit_chunk(
    manager: KVCacheManager, step: StepBuilder, request: Request, start: int, num_new_tokens: int
) -> int:
    """Return how much of a chunk the KV manager wants; 0: wait for a step with more budget."""
    if request.num_tokens - start <= 1:
        return num_new_tokens  # a decode step
    # Asked from num_computed_tokens on, so that the answer is an absolute position with a hit too.
    base = request.num_computed_tokens
    end = base + manager.coordinator.chunk_end(request, start - base + num_new_tokens)
    if end > start:
        return min(end - start, num_new_tokens)
    if end == base and step.num_scheduled_tokens:
        return 0
    # Alone in the step, waiting would not bring a larger budget; and an end inside the hit says
    # nothing about the rest.
    return num_new_tokens
