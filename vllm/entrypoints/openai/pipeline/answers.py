"""From the engine's outputs to pieces, answer by answer."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.entrypoints.openai.engine_stream import EngineStream
from vllm.entrypoints.openai.pipeline.reasoning_count import ReasoningCounter
from vllm.entrypoints.openai.usage import UsageCounter
from vllm.outputs import CompletionOutput, PromptLogprobs, RequestOutput, SampleLogprobs
from vllm.parser.interface import ResponseParser
from vllm.parser.pieces import AnswerBuilder, ParsedAnswer, Piece, ToolCallEnd


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What one output of the engine adds to one answer.

    Attributes:
        index: Which answer of the request, over its prompts and ``n``.
        pieces: What is now sure; may be empty while the reader holds text back.
        output: The engine's, for token ids, log probabilities and ``stop_reason``.
        request: The request's output that it came with, for prompt log probabilities.
        finish_reason: None while the answer grows; else "stop", "length", "abort", ..., and
            "tool_calls" where the model stopped after at least one whole call.
    """

    index: int
    pieces: list[Piece]
    output: CompletionOutput
    request: RequestOutput
    finish_reason: str | None


@dataclass(slots=True)
class FinishedAnswer:
    """A whole answer.

    Attributes:
        parsed: Reasoning, content and calls.
        token_ids: All the model said, marks of the format included.
        finish_reason: As in AnswerDelta; never None.
    """

    index: int
    parsed: ParsedAnswer
    token_ids: list[int] = field(default_factory=list)
    logprobs: SampleLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _AnswerReader:
    """One answer: its parser, and whether it has called."""

    def __init__(self, parser: ResponseParser, reasoning: ReasoningCounter | None) -> None:
        self._parser = parser
        self.reasoning = reasoning
        self._has_called = False

    def read(self, output: CompletionOutput) -> tuple[list[Piece], str | None]:
        pieces = self._parser.feed(output.text, output.token_ids)
        reason = output.finish_reason
        if reason is not None:
            pieces += self._parser.finish(reason)
        if self.reasoning is not None:
            self.reasoning.add(output.token_ids, pieces)
        self._has_called |= any(isinstance(p, ToolCallEnd) and p.is_whole for p in pieces)
        return pieces, "tool_calls" if reason == "stop" and self._has_called else reason


async def read_answers(
    stream: EngineStream,
    make_parser: Callable[[], ResponseParser],
    usage: UsageCounter,
    n: int = 1,
    make_counter: Callable[[], ReasoningCounter] | None = None,
) -> AsyncIterator[AnswerDelta]:
    """Yield the deltas of every answer of a started stream, counted in ``usage`` before.

    Args:
        stream: Its parameters ask for deltas or for final outputs.
        make_parser: Called once per answer.
        usage: Counts what passes.
        n: Answers per prompt.
        make_counter: Makes what counts an answer's tokens of reasoning into ``usage``; None: they
            are not counted.

    Raises:
        VllmError: The engine failed, or the server ended the stream.
    """
    readers: dict[int, _AnswerReader] = {}
    async for item in stream.outputs():
        usage.add(item)
        for output in item.output.outputs:
            index = item.job_index * n + output.index
            reader = readers.get(index)
            if reader is None:
                counter = None if make_counter is None else make_counter()
                reader = readers[index] = _AnswerReader(make_parser(), counter)
            pieces, reason = reader.read(output)
            if reader.reasoning is not None:
                usage.count_reasoning(index, reader.reasoning.num_tokens)
            yield AnswerDelta(index, pieces, output, item.output, reason)


async def collect_answers(
    stream: EngineStream,
    make_parser: Callable[[], ResponseParser],
    usage: UsageCounter,
    n: int = 1,
    make_counter: Callable[[], ReasoningCounter] | None = None,
) -> list[FinishedAnswer]:
    """Start a stream, read it to its end and close it; return its answers by index.

    Raises:
        VllmError: The engine refuses or fails.
    """
    builders: dict[int, AnswerBuilder] = {}
    answers: dict[int, FinishedAnswer] = {}
    await stream.start()
    try:
        async for delta in read_answers(stream, make_parser, usage, n, make_counter):
            builder = builders.setdefault(delta.index, AnswerBuilder())
            builder.add(delta.pieces)
            answer = answers.setdefault(delta.index, FinishedAnswer(delta.index, ParsedAnswer()))
            _extend(answer, delta)
            answer.parsed = builder.answer
    finally:
        await stream.close()
    return [answers[index] for index in sorted(answers)]


def _extend(answer: FinishedAnswer, delta: AnswerDelta) -> None:
    answer.token_ids += delta.output.token_ids
    if delta.output.logprobs is not None:
        answer.logprobs = [*(answer.logprobs or ()), *delta.output.logprobs]
    answer.kv_transfer_params = delta.request.kv_transfer_params or answer.kv_transfer_params
    answer.prompt_logprobs = delta.request.prompt_logprobs or answer.prompt_logprobs
    if delta.finish_reason is not None:
        answer.finish_reason = delta.finish_reason
        answer.stop_reason = delta.output.stop_reason
