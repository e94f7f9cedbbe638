"""What one ``schedule()`` has decided so far, and the message it becomes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
    from vllm.v1.request import Request


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

    def add_encoder_inputs(self, request: Request, input_ids: list[int], budget: int) -> None:
        """Schedule multimodal items of a request; ``budget`` is what they leave."""
        self.encoder_inputs[request.request_id] = input_ids
        self.encoder_budget = budget

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
