"""``update_from_output()``: what the tokens of a step change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.logprob_rows import pooled_rows, prompt_rows, slice_logprobs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.requests import Holdings
from vllm.v1.core.sched.stopping import check_stop
from vllm.v1.messages import EngineCoreOutput, LogprobsRows, PooledRows
from vllm.v1.metrics.stats import SpecDecodingStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

logger = init_logger(__name__)


def make_output(
    request: Request,
    tokens: list[int],
    logprobs: LogprobsRows | None = None,
    prompt_logprobs: LogprobsRows | None = None,
    kv_transfer_params: dict[str, Any] | None = None,
    drafted: tuple[int, int] = (0, 0),
    pooled: PooledRows | None = None,
) -> EngineCoreOutput:
    """Describe what is new of a request; drains its events and its prefill record.

    ``drafted`` counts draft tokens verified and accepted.
    """
    return EngineCoreOutput(
        request_id=request.request_id,
        # The token that ends a request for vectors is nobody's.
        new_token_ids=tokens if request.pooling_params is None else [],
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
        num_accepted_tokens=drafted[1] and min(drafted[1], len(tokens)),
        pooled=pooled,
    )


class UpdatePass:
    """Gives requests their tokens and ends those that are done.

    Args:
        held: The requests and what they hold.
        grammars: Knows whose grammar must advance.
        max_model_len: Longest request in tokens.
        end_request: Lets an ended request go of everything; returns what the client must know.
        spec_stats: Counts what becomes of drafts; None: nobody asks.
    """

    def __init__(
        self,
        held: Holdings,
        grammars: StructuredOutputManager,
        max_model_len: int,
        end_request: Callable[[Request], dict[str, Any] | None],
        spec_stats: SpecDecodingStats | None = None,
    ) -> None:
        self.held = held
        self.grammars = grammars
        self.max_model_len = max_model_len
        self.spec_stats = spec_stats
        self._end_request = end_request
        self._outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        self._ended_running: set[Request] = set()
        self._ended_waiting: list[Request] = []

    def run(
        self, step: SchedulerOutput, result: ModelRunnerOutput, void: set[str]
    ) -> dict[int, list[EngineCoreOutput]]:
        """Update everything.

        Args:
            step: The step as scheduled.
            result: What it gave.
            void: Requests whose input was never loaded.

        Returns:
            The outputs by client.
        """
        requests = self.held.requests
        for request_id in step.num_scheduled_tokens:
            request = requests.by_id.get(request_id)
            # Others may have ended while the step ran.
            if request is None or request.is_finished():
                continue
            if request_id in void:
                self.pass_over(request, result)
                continue
            self._update(request, step, result)
        requests.leave_running(self._ended_running)
        # Preempted while the step ran that ended them.
        requests.leave_queues(self._ended_waiting)
        return self._outputs

    def pass_over(self, request: Request, result: ModelRunnerOutput) -> None:
        """Leave out what a void step gave one request."""

    def _update(self, request: Request, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Give one request its tokens."""
        was_running = request.status is RequestStatus.RUNNING
        index = result.req_id_to_index[request.request_id]
        sampled = result.sampled_token_ids
        tokens = sampled[index] if sampled else []
        drafts = step.scheduled_spec_decode_tokens.get(request.request_id)
        drafted = (0, 0)
        if drafts and tokens:
            num_invalid = (step.num_invalid_spec_tokens or {}).get(request.request_id, 0)
            drafted = self._settle_drafts(request, len(drafts), num_invalid, len(tokens) - 1)
        output = self._apply(request, tokens, result, drafted)
        if output is not None:
            self._outputs[request.client_index].append(output)
        if not request.is_finished():
            return
        if was_running:
            self._ended_running.add(request)
        else:
            self._ended_waiting.append(request)

    def _settle_drafts(
        self, request: Request, num_drafts: int, num_invalid: int, num_accepted: int
    ) -> tuple[int, int]:
        """Take back rejected drafts, which were counted as computed.

        Returns:
            How many drafts a model made (padding is invalid), and how many of them stand.
        """
        request.reject_drafts(num_drafts - num_accepted)
        num_valid = max(0, num_drafts - num_invalid)
        num_accepted = min(num_accepted, num_valid)
        if self.spec_stats is not None and num_valid:
            self.spec_stats.observe_draft(num_valid, num_accepted)
        return num_valid, num_accepted

    # ------------------------------------------------------------------- tokens

    def _apply(
        self,
        request: Request,
        tokens: list[int],
        result: ModelRunnerOutput,
        drafted: tuple[int, int],
    ) -> EngineCoreOutput | None:
        """Append tokens up to a stop; returns what the client must know, if anything."""
        stopped = False
        if tokens:
            tokens, stopped = self.take_tokens(request, tokens)
        if tokens and request.use_structured_output:
            stopped |= self._advance_grammar(request, tokens)
        if request.has_encoder_inputs:
            self.held.encoder.free_passed(request)
        if result.num_nans_in_logits is not None:
            request.note_nans(result.num_nans_in_logits.get(request.request_id, 0))
        logprobs, prompt_logprobs = self._find_logprobs(request, len(tokens), result)
        pooled = pooled_rows(request, result, is_last=stopped)
        kv_transfer_params = self._end_request(request) if stopped else None
        if not tokens and not stopped and prompt_logprobs is None and pooled is None:
            return None
        return make_output(
            request, tokens, logprobs, prompt_logprobs, kv_transfer_params, drafted, pooled
        )

    def take_tokens(self, request: Request, token_ids: list[int]) -> tuple[list[int], bool]:
        """Append tokens up to the one that stops the request.

        Returns:
            The tokens that were appended, and whether the request stopped.
        """
        if len(token_ids) == 1:
            request.append_output_token_ids(token_ids[0])
            return token_ids, check_stop(request, self.max_model_len)
        for count, token_id in enumerate(token_ids, start=1):
            request.append_output_token_ids(token_id)
            if check_stop(request, self.max_model_len):
                return token_ids[:count], True
        return token_ids, False

    def _advance_grammar(self, request: Request, tokens: list[int]) -> bool:
        """Advance a grammar; True if it refuses the tokens, which ends the request."""
        structured = request.structured_output_request
        assert structured is not None
        if not self.grammars.should_advance(request):
            tokens = structured.pass_reasoning(tokens)
            if not tokens:
                return False
        if structured.grammar.accept_tokens(request.request_id, tokens):
            return False
        request.fail()
        self.grammars.note_refusal(request, tokens)
        return True

    def _find_logprobs(
        self, request: Request, num_tokens: int, result: ModelRunnerOutput
    ) -> tuple[LogprobsRows | None, LogprobsRows | None]:
        """Return the log probabilities of new tokens and of prompt positions, where asked for."""
        params = request.sampling_params
        if params is None or (params.logprobs is None and params.prompt_logprobs is None):
            return None, None
        logprobs = prompt_logprobs = None
        if params.logprobs is not None and num_tokens:
            index = result.req_id_to_index[request.request_id]
            logprobs = slice_logprobs(result, index, num_tokens, params.logprobs)
        if params.prompt_logprobs is not None:
            tensors = result.prompt_logprobs_dict.get(request.request_id)
            if request.num_scores is not None:
                tensors = self.held.manager.prompt_scores.add(request, tensors)
            if tensors is not None:
                prompt_logprobs = prompt_rows(tensors, params.prompt_logprobs)
        return logprobs, prompt_logprobs
