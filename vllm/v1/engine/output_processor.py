"""From the engine core's outputs to what callers read."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from vllm.exceptions import VllmError
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import Tokenizer
from vllm.utils.open_json import OpenPart
from vllm.v1.engine.answer_state import AnswerState
from vllm.v1.engine.output_queue import OutputSink
from vllm.v1.engine.parallel_sampling import ParentRequest, make_child_params
from vllm.v1.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.metrics.iteration_stats import IterationStats

logger = init_logger(__name__)


@dataclass(slots=True)
class ProcessedOutputs:
    """The result of one step.

    Attributes:
        outputs: Of requests without a sink.
        aborts: Requests that a stop string ended; the core still computes them.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)


class OutputProcessor:
    """Owns: the state of every request that has not finished, by the id the core knows.

    The core's ids are unique in this engine, whatever ids callers give: several callers may use one
    id, and an abort by it means all of them.

    Args:
        tokenizer: None: answers are token ids only.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, AnswerState] = {}
        self._internal_ids: dict[str, list[str]] = {}
        self._num_added = 0

    @property
    def num_unfinished(self) -> int:
        """Answers in progress."""
        return len(self._states)

    def count_waiting_tokens(self) -> int:
        """Count the tokens of prompts that have no answer yet, each prompt once."""
        return sum(
            len(state.request.prompt_token_ids)
            for state in self._states.values()
            if not state.has_begun and not state.request.is_extra_answer
        )

    def count_waiting_requests(self, tenant: str) -> int:
        """Count a tenant's requests that have no answer yet."""
        return sum(
            state.request.tenant == tenant
            and not state.has_begun
            and not state.request.is_extra_answer
            for state in self._states.values()
        )

    def has_unfinished(self) -> bool:
        """Whether any answer is in progress."""
        return bool(self._states)

    def unfinished_ids(self) -> list[str]:
        """Return the callers' ids of requests in progress."""
        return list(self._internal_ids)

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None, sink: OutputSink | None
    ) -> list[EngineCoreRequest]:
        """Take a checked request in.

        Args:
            request: As the caller named it.
            prompt: Its text, if known.
            sink: Where outputs go; None: they are returned by :meth:`process_outputs`.

        Returns:
            What to send to the core: one request per answer, with ids of its own.
        """
        params = request.sampling_params
        parent = ParentRequest(request, prompt)
        children = []
        for index in range(params.n):
            child = _make_child(request, index, self._next_id(request.request_id))
            state = AnswerState(child, parent, index, sink, self._tokenizer)
            self._states[child.request_id] = state
            self._internal_ids.setdefault(request.request_id, []).append(child.request_id)
            children.append(child)
        return children

    def _next_id(self, external_id: str) -> str:
        # Ids sort as they were given: equal requests run in that order, and the first of n answers
        # is the one that meets the cache as it was before.
        self._num_added += 1
        return f"{external_id}-{self._num_added:08x}"

    def process_outputs(
        self, core_outputs: EngineCoreOutputs, stats: IterationStats | None
    ) -> ProcessedOutputs:
        """Take in one step.

        Args:
            core_outputs: What the core sent.
            stats: Where to count; None: nowhere.
        """
        result = ProcessedOutputs()
        for output in core_outputs.outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue  # aborted here while the core computed its last step
            if state.update(output):
                result.aborts.append(output.request_id)
            self._count(state, output, core_outputs.timestamp, stats)
            if state.open_part is not None:
                _tell_open_part(state, state.open_part)
            self._deliver(state, result.outputs)
        return result

    def _deliver(self, state: AnswerState, outputs: list[RequestOutput]) -> None:
        if state.finish_reason is not None:
            self._forget(state)
        made = state.make_output()
        if made is None:
            return
        if state.sink is None:
            outputs.append(made)
        else:
            state.sink.put(made)

    def abort_requests(
        self, external_ids: Iterable[str], stats: IterationStats | None
    ) -> ProcessedOutputs:
        """End requests by their callers' ids; see :meth:`abort_answers`."""
        ids = [i for external_id in external_ids for i in self._internal_ids.get(external_id, ())]
        return self.abort_answers(ids, stats)

    def abort_answers(
        self, request_ids: Iterable[str], stats: IterationStats | None
    ) -> ProcessedOutputs:
        """End answers by the core's ids; unknown ones are ignored.

        Every answer in progress gets a last output with the reason "abort".

        Returns:
            The core's ids to abort there, and outputs of requests without a sink.
        """
        result = ProcessedOutputs()
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is None:
                continue
            state.abort()
            result.aborts.append(request_id)
            self._count_finished(state, stats)
            self._deliver(state, result.outputs)
        return result

    def reject(self, request_id: str, error: VllmError) -> list[str]:
        """Fail a request that the core refused, all its answers.

        Returns:
            The core's ids of the other answers, to abort there.

        Raises:
            VllmError: ``error``, when the request has no sink to tell.
        """
        state = self._states.get(request_id)
        if state is None:
            return []
        siblings = [
            sibling
            for sibling_id in self._internal_ids[state.parent.external_id]
            if (sibling := self._states[sibling_id]).parent is state.parent
        ]
        for sibling in siblings:
            self._forget(sibling)
        if state.sink is None:
            raise error
        state.sink.fail(error)
        return [sibling.request_id for sibling in siblings if sibling is not state]

    def fail_all(self, error: Exception) -> None:
        """Tell every caller that no output will follow."""
        states = list(self._states.values())
        self._states.clear()
        self._internal_ids.clear()
        for state in states:
            if state.sink is not None:
                state.sink.fail(error)

    def _forget(self, state: AnswerState) -> None:
        del self._states[state.request_id]
        ids = self._internal_ids[state.parent.external_id]
        ids.remove(state.request_id)
        if not ids:
            del self._internal_ids[state.parent.external_id]

    def _count(
        self,
        state: AnswerState,
        output: EngineCoreOutput,
        timestamp: float,
        stats: IterationStats | None,
    ) -> None:
        if stats is None:
            return
        # A prompt counts once, with the first of its answers.
        is_extra = state.request.is_extra_answer
        num_prompt_tokens = 0 if is_extra else len(state.request.prompt_token_ids)
        prefill_stats = None if is_extra else state.prefill_stats
        stats.update_from_output(
            output,
            timestamp,
            num_prompt_tokens,
            prefill_stats,
            state.stats,
            state.request.tenant,
        )
        if state.finish_reason is not None:
            self._count_finished(state, stats)

    def _count_finished(self, state: AnswerState, stats: IterationStats | None) -> None:
        if stats is None or state.finish_reason is None:
            return
        stats.update_from_finished_request(
            state.finish_reason,
            len(state.request.prompt_token_ids),
            state.request.sampling_params.max_tokens,
            state.stats,
            num_cached_tokens=state.num_cached_tokens,
            n=state.parent.n,
            summary=state.parent.summarize(state.stats),
            tenant=state.request.tenant,
            open_part=None if state.open_part is None else state.open_part.kind,
        )


def _tell_open_part(state: AnswerState, part: OpenPart) -> None:
    logger.warning(
        "The answer of request %s follows a grammar and has no end within %d tokens: %s.",
        state.parent.external_id,
        state.stats.num_generation_tokens,
        part,
    )


def _make_child(request: EngineCoreRequest, index: int, request_id: str) -> EngineCoreRequest:
    """Return the request of one answer, under the core's id."""
    params: SamplingParams = request.sampling_params
    if params.n > 1:
        params = make_child_params(params, index)
    return msgspec.structs.replace(
        request, request_id=request_id, sampling_params=params, is_extra_answer=index > 0
    )
