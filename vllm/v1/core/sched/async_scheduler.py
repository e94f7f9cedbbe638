"""Scheduling a step before the last one has returned.

A step that samples a token for a request leaves a *placeholder*: the token exists, its value comes
with the step's output. Computed tokens count it, so the next step can be scheduled at once; the
workers put the value in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

# Drafts that are still on the worker; it knows their values.
_UNKNOWN_TOKEN_ID = -1


class AsyncScheduler(Scheduler):
    """A scheduler that may be a few steps ahead of the workers."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if request.is_prefill_chunk:
                continue
            # A grammar's mask for this step needs tokens that have not arrived.
            scheduler_output.pending_structured_output_tokens |= (
                request.use_structured_output and request.num_output_placeholders > 0
            )
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
            request.num_output_placeholders += 1 + len(drafts)
            request.spec_token_ids = [_UNKNOWN_TOKEN_ID] * self.limits.num_spec_tokens

    def _is_surely_done(self, request: Request) -> bool:
        if request.num_output_placeholders == 0:
            return False
        # Each step in flight brings one token; with drafts more than one placeholder, so that
        # only a single step is certain.
        certain = 1 if self.limits.num_spec_tokens else request.num_output_placeholders
        return request.num_output_tokens + certain >= request.max_tokens

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int]
    ) -> tuple[list[int], bool]:
        if request.async_tokens_to_discard > 0:
            # Sampled from a cache that was reset while the step was in flight.
            request.async_tokens_to_discard -= 1
            return [], False
        was_running = request.status is RequestStatus.RUNNING
        tokens, stopped = super()._update_request_with_output(request, new_token_ids)
        # Never below zero: a worker may return tokens for a chunk that asked for none.
        request.num_output_placeholders = max(0, request.num_output_placeholders - len(tokens))
        if was_running:
            # Only now are the values known that the hashes of these blocks need.
            self.kv_cache_manager.cache_blocks(
                request, request.num_computed_tokens - request.num_output_placeholders
            )
        return tokens, stopped
