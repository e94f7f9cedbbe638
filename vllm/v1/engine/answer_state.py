"""One answer in progress, as the front end knows it."""

from typing import Any

from vllm.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import Tokenizer
from vllm.utils.open_json import OpenPart
from vllm.v1.engine.detokenizer import Detokenizer, make_text_stream
from vllm.v1.engine.logprobs import LogprobsCollector
from vllm.v1.engine.output_queue import OutputSink
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    PooledRows,
    PrefillStats,
)
from vllm.v1.metrics.iteration_stats import RequestStateStats
from vllm.v1.structured_output.open_answer import find_open_answer, must_hold_value
from vllm.v1.structured_output.reasoning import ReasoningTracker

_CUTTING = (FinishReason.LENGTH, FinishReason.REPETITION)


class AnswerState:
    """One child request: its tokens, its text, its end.

    Owns: the detokenizer, the log probabilities, the tokens and the times of one answer, and where
    its JSON stands if a limit cut it off (``open_part``).

    Args:
        request: As sent to the core.
        parent: Shared by the ``n`` answers of a request.
        index: Which of them this is.
        sink: Where outputs go; None: to the caller of the step.
        tokenizer: None: no text is made.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        parent: ParentRequest,
        index: int,
        sink: OutputSink | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.parent = parent
        self.index = index
        self.sink = sink
        self.stats = RequestStateStats(arrival_time=request.arrival_time)
        self.prefill_stats: PrefillStats | None = None
        self.open_part: OpenPart | None = None
        self._tokenizer = tokenizer
        self._delta = params.output_kind == RequestOutputKind.DELTA
        self._final_only = params.output_kind == RequestOutputKind.FINAL_ONLY
        stream = None
        if tokenizer is not None and params.detokenize:
            stream = make_text_stream(
                tokenizer, request.prompt_token_ids, params.skip_special_tokens
            )
        self._detokenizer = Detokenizer(stream, params)
        self._logprobs = LogprobsCollector(
            tokenizer if params.detokenize else None,
            wants_sample=params.logprobs is not None,
            wants_prompt=params.prompt_logprobs is not None,
            has_ranks=params.logprob_token_ids is None,
        )
        self._token_ids: list[int] = []
        self._num_shown_tokens = 0
        self._num_shown_logprobs = 0
        self._prompt_logprobs_shown = False
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._kv_transfer_params: dict[str, Any] | None = None
        self._pooled: list[PooledRows] = []

    @property
    def request_id(self) -> str:
        """The id the core knows."""
        return self.request.request_id

    @property
    def has_begun(self) -> bool:
        """Whether there is a token of it."""
        return bool(self._token_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; None while it grows."""
        return self._finish_reason

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens read from the prefix cache, as far as known."""
        return self.prefill_stats.num_cached_tokens if self.prefill_stats is not None else 0

    def update(self, output: EngineCoreOutput) -> bool:
        """Take in what a step added.

        Returns:
            Whether a stop string ended the answer, which the core cannot know.
        """
        if self.prefill_stats is None:
            # Committed at the first admission; one after a preemption mostly finds its own blocks.
            self.prefill_stats = output.prefill_stats
            self.parent.note_prefill(output.prefill_stats)
        if output.new_prompt_logprobs is not None:
            self._logprobs.add_prompt(output.new_prompt_logprobs)
        if output.pooled is not None:
            self._pooled.append(output.pooled)
        if output.kv_transfer_params is not None:
            self._kv_transfer_params = output.kv_transfer_params
        stop = self._add_tokens(output)
        if stop is not None:
            self._finish_reason, self._stop_reason = FinishReason.STOP, stop
            return not output.finished
        if output.finish_reason is not None:
            self._finish_reason, self._stop_reason = output.finish_reason, output.stop_reason
            if output.finish_reason in _CUTTING:
                self.open_part = self._find_open_part()
                if self.open_part is not None and self._stop_reason is None:
                    self._stop_reason = self.open_part.short
        return False

    def _find_open_part(self) -> OpenPart | None:
        """What went on in an answer with a form; None: it is whole, or none was asked for."""
        params = self.request.sampling_params
        asked = params.structured_outputs
        if asked is None or self._tokenizer is None:
            return None
        begin: int | None = 0
        if params.reasoning is not None:
            # Thoughts are no JSON, and may hold any.
            begin = ReasoningTracker(params.reasoning).find_answer(self._token_ids)
        if begin is None:
            return OpenPart("nothing", "", 0) if must_hold_value(asked) else None
        text = self._tokenizer.decode(self._token_ids[begin:], skip_special_tokens=False)
        return find_open_answer(text, asked)

    def abort(self) -> None:
        """End the answer with what there is."""
        self._finish_reason = FinishReason.ABORT
        self._detokenizer.finish()

    def _add_tokens(self, output: EngineCoreOutput) -> str | None:
        """Add a step's tokens up to the one that completes a stop string; return that string."""
        token_ids = output.new_token_ids
        # The token that ended the answer (end token, stop token) is no part of its text.
        ends_by_token = (
            output.finish_reason == FinishReason.STOP
            and not self.request.sampling_params.include_stop_str_in_output
        )
        num_with_text = len(token_ids) - 1 if ends_by_token else len(token_ids)
        stop = None
        num_taken = 0
        for token_id in token_ids:
            num_taken += 1
            if num_taken <= num_with_text:
                stop = self._detokenizer.push(token_id)
                if stop is not None:
                    break
        if stop is None and output.finished:
            stop = self._detokenizer.finish()
        self._token_ids.extend(token_ids[:num_taken])
        if output.new_logprobs is not None:
            self._logprobs.add_sample(output.new_logprobs, num_taken)
        return stop

    # ---- outputs -----------------------------------------------------------------------------

    def make_output(self) -> RequestOutput | None:
        """Return what the caller should see now; None when that is nothing."""
        finished = self._finish_reason is not None
        if not finished and (self._final_only or len(self._token_ids) == self._num_shown_tokens):
            return None
        answers = self.parent.take_in(self._make_completion(finished))
        if not answers:
            return None
        prefill = self.parent.prefill_stats
        return RequestOutput(
            request_id=self.parent.external_id,
            prompt=self.parent.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            prompt_logprobs=self._take_prompt_logprobs(),
            outputs=answers,
            finished=self.parent.finished,
            metrics=self.stats,
            num_cached_tokens=None if prefill is None else prefill.num_cached_tokens,
            num_cache_creation_tokens=(
                None if prefill is None else prefill.num_prompt_tokens - prefill.num_cached_tokens
            ),
            kv_transfer_params=self._kv_transfer_params,
            prefill_stats=prefill,
            pooled=PooledRows.joined(self._pooled) if finished and self._pooled else None,
        )

    def _take_prompt_logprobs(self) -> PromptLogprobs | None:
        if self._delta and self._prompt_logprobs_shown:
            return None
        self._prompt_logprobs_shown = True
        return self._logprobs.prompt

    def _make_completion(self, finished: bool) -> CompletionOutput:
        begin = self._num_shown_tokens if self._delta else 0
        self._num_shown_tokens = len(self._token_ids)
        logprobs = self._logprobs.sample
        if logprobs is not None:
            first = self._num_shown_logprobs if self._delta else 0
            self._num_shown_logprobs = len(logprobs)
            logprobs = logprobs[first:]
        return CompletionOutput(
            index=self.index,
            text=self._detokenizer.take_text(delta=self._delta, finished=finished),
            token_ids=self._token_ids[begin:],
            cumulative_logprob=self._logprobs.cumulative,
            logprobs=logprobs,
            finish_reason=None if self._finish_reason is None else str(self._finish_reason),
            stop_reason=self._stop_reason,
        )
