"""Scheduling a step before the last one has returned.

A step that samples a token for a request leaves a *placeholder*: the token exists, its value comes
with the step's output. Computed tokens count it, so the next step can be scheduled at once; the
workers put the value in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.update_pass import UpdatePass
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput

# Drafts that are still on the worker; it knows their values.
_UNKNOWN_TOKEN_ID = -1


class AsyncUpdatePass(UpdatePass):
    """Takes tokens for which placeholders stand."""

    def take_tokens(self, request: Request, token_ids: list[int]) -> tuple[list[int], bool]:
        """Append tokens up to the one that stops the request (see UpdatePass)."""
        if request.try_discard():
            # Sampled from a cache that was reset while the step was in flight.
            return [], False
        was_running = request.status is RequestStatus.RUNNING
        tokens, stopped = super().take_tokens(request, token_ids)
        request.receive_tokens(len(tokens))
        if was_running:
            # Only now are the values known that the hashes of these blocks need.
            self.held.manager.cache_blocks(request, request.num_settled_tokens)
        return tokens, stopped

    def pass_over(self, request: Request, result: ModelRunnerOutput) -> None:
        """Count the tokens of a void step as come: they were given up with those in flight."""
        sampled = result.sampled_token_ids
        if sampled and sampled[result.req_id_to_index[request.request_id]]:
            request.try_discard()


class AsyncScheduler(Scheduler):
    """A scheduler that may be a few steps ahead of the workers."""

    update_pass = AsyncUpdatePass

    def needs_settled_tokens(self) -> bool:
        """Whether the next step must not be scheduled before all tokens have arrived.

        So it is while a request runs whose next token depends on the values of its last ones in a
        way that the host looks up: a grammar, penalties, bad words, a budget of reasoning.
        """
        return any(
            request.use_structured_output
            or (request.sampling_params is not None and request.sampling_params.follows_answer)
            for request in self._requests.running
            if request.num_output_placeholders
        )

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        requests, num_next_drafts = self._requests.by_id, self.limits.num_spec_tokens
        for request_id in scheduler_output.num_scheduled_tokens:
            request = requests[request_id]
            if request.is_prefill_chunk:
                continue
            # A grammar's mask for this step needs tokens that have not arrived.
            scheduler_output.pending_structured_output_tokens |= (
                request.use_structured_output and request.num_output_placeholders > 0
            )
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
            request.expect_tokens(len(drafts), [_UNKNOWN_TOKEN_ID] * num_next_drafts)
