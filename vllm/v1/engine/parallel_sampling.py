"""``n`` answers to one prompt: a parent for the caller, ``n`` child requests for the core."""

from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.messages import EngineCoreRequest, PrefillStats
from vllm.v1.metrics.iteration_stats import RequestStateStats, RequestSummary

_SEED_MODULUS = 2**64
_SEED_MIN = -(2**63)


def make_child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of answer ``index``: the same, with its own seed."""
    child = params.clone()
    child.n = 1
    if params.seed is not None:
        # Stays a signed 64-bit integer.
        child.seed = (params.seed + index - _SEED_MIN) % _SEED_MODULUS + _SEED_MIN
    return child


class ParentRequest:
    """What the ``n`` answers of one request have in common.

    Args:
        request: As its caller named it.
        prompt: Its text, if known.

    Owns: the answers held back for FINAL_ONLY, and which are complete.

    Attributes:
        external_id: The id the caller gave.
        prefill_stats: Of the answer admitted first: the others find the prompt it computed, which
            says nothing about what was cached before.
    """

    def __init__(self, request: EngineCoreRequest, prompt: str | None) -> None:
        params = request.sampling_params
        self.external_id = request.request_id
        self.prompt = prompt
        self.n = params.n
        self.prefill_stats: PrefillStats | None = None
        self._holds_back = params.output_kind == RequestOutputKind.FINAL_ONLY
        self._answers: list[CompletionOutput | None] = [None] * self.n
        self._finished: set[int] = set()
        self._request = request
        self._num_ended = 0
        self._num_generated = 0

    @property
    def finished(self) -> bool:
        """Whether all answers are complete."""
        return len(self._finished) == self.n

    def note_prefill(self, stats: PrefillStats | None) -> None:
        """Note where an answer's prompt tokens came from; the first one counts."""
        if self.prefill_stats is None:
            self.prefill_stats = stats

    def summarize(self, answer: RequestStateStats) -> RequestSummary | None:
        """Count an answer that ended; return the request's summary with the last one."""
        self._num_ended += 1
        self._num_generated += answer.num_generation_tokens
        if self._num_ended < self.n:
            return None
        params = self._request.sampling_params
        return RequestSummary(
            request_id=self.external_id,
            trace_headers=self._request.options.trace_headers or {},
            temperature=params.temperature,
            top_p=params.top_p,
            num_generation_tokens=self._num_generated,
            num_cached_tokens=self.prefill_stats.num_cached_tokens if self.prefill_stats else 0,
            time_to_first_token=answer.first_token_latency or None,
        )

    def take_in(self, answer: CompletionOutput) -> list[CompletionOutput]:
        """Note an answer's changes; return what is to be handed out now."""
        if answer.finish_reason is not None:
            self._finished.add(answer.index)
        if not self._holds_back:
            return [answer]
        self._answers[answer.index] = answer
        if not self.finished:
            return []
        return [held for held in self._answers if held is not None]
