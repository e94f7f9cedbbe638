"""``update_from_output()``: what the tokens of a step change.

Tests of outsiders build schedulers without ``__init__`` and update plain decode steps with them; on
that path nothing else of the scheduler may be read than what such a test sets (``requests``,
``running``, ``connector``, ``kv_cache_manager``, ``structured_output_manager``, ...).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.encoder_inputs import free_passed_encoder_inputs
from vllm.v1.core.sched.kv_transfer_updates import apply_failed_loads, apply_finished_transfers
from vllm.v1.core.sched.logprob_rows import prompt_rows, slice_logprobs
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.metrics.stats import SpecDecodingStats
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.messages import LogprobsRows
    from vllm.v1.outputs import ModelRunnerOutput

logger = init_logger(__name__)


def make_output(
    request: Request,
    tokens: list[int],
    logprobs: LogprobsRows | None = None,
    prompt_logprobs: LogprobsRows | None = None,
    kv_transfer_params: dict[str, Any] | None = None,
    drafted: tuple[int, int] = (0, 0),
) -> EngineCoreOutput:
    """Describe what is new of a request; drains its events and its prefill record.

    ``drafted`` counts draft tokens verified and accepted.
    """
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=tokens,
        new_logprobs=logprobs,
        new_prompt_logprobs=prompt_logprobs,
        finish_reason=request.get_finished_reason(),
        stop_reason=request.stop_reason,
        events=request.take_events(),
        kv_transfer_params=kv_transfer_params,
        prefill_stats=request.take_prefill_stats(),
        num_preemptions=request.num_preemptions,
        num_draft_tokens=drafted[0],
        # A stop may cut the accepted ones short.
        num_accepted_tokens=min(drafted[1], len(tokens)),
    )


class UpdatePass:
    """Gives requests their tokens and ends those that are done.

    Args:
        scheduler: Whose requests they are.
        step: The step as scheduled.
        result: What it gave.
    """

    def __init__(
        self, scheduler: Scheduler, step: SchedulerOutput, result: ModelRunnerOutput
    ) -> None:
        self.scheduler = scheduler
        self.step = step
        self.result = result
        self._outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        self._ended_running: set[Request] = set()
        self._ended_waiting: list[Request] = []
        self._spec_stats: SpecDecodingStats | None = None

    def run(self) -> tuple[dict[int, list[EngineCoreOutput]], SpecDecodingStats | None]:
        """Update everything; returns the outputs by client, and what became of drafts."""
        scheduler = self.scheduler
        kv_output = self.result.kv_connector_output
        void: set[str] = set()
        if kv_output is not None and kv_output.invalid_block_ids:
            void = apply_failed_loads(scheduler, kv_output.invalid_block_ids)
        for request_id in self.step.num_scheduled_tokens:
            request = scheduler.requests.get(request_id)
            # Ended while the step ran, or its input was never loaded.
            if request is None or request.is_finished() or request_id in void:
                continue
            self._update(request)
        self._remove_ended()
        if kv_output is not None:
            apply_finished_transfers(scheduler, kv_output)
        return self._outputs, self._spec_stats

    def _remove_ended(self) -> None:
        scheduler = self.scheduler
        if self._ended_running:
            scheduler.running = [r for r in scheduler.running if r not in self._ended_running]
        if self._ended_waiting:
            # Preempted while the step ran that ended them.
            scheduler.waiting.remove_requests(self._ended_waiting)
            scheduler.skipped_waiting.remove_requests(self._ended_waiting)

    def _update(self, request: Request) -> None:
        """Give one request its tokens."""
        was_running = request.status is RequestStatus.RUNNING
        index = self.result.req_id_to_index[request.request_id]
        sampled = self.result.sampled_token_ids
        tokens = sampled[index] if sampled else []
        drafts = self.step.scheduled_spec_decode_tokens.get(request.request_id)
        drafted = (0, 0)
        if drafts and tokens:
            drafted = self._settle_drafts(request, len(drafts), len(tokens) - 1)
        output = self._apply(request, tokens, index, drafted)
        if output is not None:
            self._outputs[request.client_index].append(output)
        if not request.is_finished():
            return
        if was_running:
            self._ended_running.add(request)
        else:
            self._ended_waiting.append(request)

    # ------------------------------------------------------------------- drafts

    def _settle_drafts(
        self, request: Request, num_drafts: int, num_accepted: int
    ) -> tuple[int, int]:
        """Take back rejected drafts, which were counted as computed.

        Returns:
            How many drafts a model made (padding is invalid), and how many of them stand.
        """
        num_rejected = num_drafts - num_accepted
        if request.num_computed_tokens > 0:
            request.reject_drafts(num_rejected)
        elif request.num_output_placeholders > 0:
            # Preempted meanwhile: nothing is computed any more.
            request.num_output_placeholders -= num_rejected
        num_invalid = (self.step.num_invalid_spec_tokens or {}).get(request.request_id, 0)
        num_valid = max(0, num_drafts - num_invalid)
        num_accepted = min(num_accepted, num_valid)
        if not self.scheduler.log_stats or not num_valid:
            return num_valid, num_accepted
        if self._spec_stats is None:
            self._spec_stats = SpecDecodingStats.new(self.scheduler.limits.num_spec_tokens)
        self._spec_stats.observe_draft(num_valid, num_accepted)
        return num_valid, num_accepted

    # ------------------------------------------------------------------- tokens

    def _apply(
        self, request: Request, tokens: list[int], index: int, drafted: tuple[int, int]
    ) -> EngineCoreOutput | None:
        """Append tokens up to a stop; returns what the client must know, if anything."""
        scheduler = self.scheduler
        stopped = False
        if tokens:
            tokens, stopped = scheduler._update_request_with_output(request, tokens)
        if tokens and request.use_structured_output:
            stopped |= self._advance_grammar(request, tokens)
        if request.has_encoder_inputs:
            free_passed_encoder_inputs(
                scheduler.encoder_cache_manager,
                request,
                is_encoder_decoder=scheduler.is_encoder_decoder,
            )
        if self.result.num_nans_in_logits is not None:
            request.num_nans_in_logits = self.result.num_nans_in_logits.get(request.request_id, 0)
        logprobs, prompt_logprobs = self._find_logprobs(request, len(tokens), index)
        kv_transfer_params = scheduler._free_request(request) if stopped else None
        if not tokens and not stopped and prompt_logprobs is None:
            return None
        return make_output(request, tokens, logprobs, prompt_logprobs, kv_transfer_params, drafted)

    def _advance_grammar(self, request: Request, tokens: list[int]) -> bool:
        """Advance a grammar; True if it refuses the tokens, which ends the request."""
        if not self.scheduler.structured_output_manager.should_advance(request):
            return False
        structured = request.structured_output_request
        assert structured is not None
        if structured.grammar.accept_tokens(request.request_id, tokens):
            return False
        logger.error("Request %s ends: its grammar refuses tokens %s.", request.request_id, tokens)
        request.finish(RequestStatus.FINISHED_ERROR)
        request.resumable = False
        return True

    def _find_logprobs(
        self, request: Request, num_tokens: int, index: int
    ) -> tuple[LogprobsRows | None, LogprobsRows | None]:
        """Return the log probabilities of new tokens and of prompt positions, where asked for."""
        params = request.sampling_params
        if params is None:
            return None, None
        logprobs = prompt_logprobs = None
        if params.logprobs is not None and num_tokens:
            logprobs = slice_logprobs(self.result, index, num_tokens, params.logprobs)
        if params.prompt_logprobs is not None:
            tensors = self.result.prompt_logprobs_dict.get(request.request_id)
            if tensors is not None:
                prompt_logprobs = prompt_rows(tensors, params.prompt_logprobs)
        return logprobs, prompt_logprobs
