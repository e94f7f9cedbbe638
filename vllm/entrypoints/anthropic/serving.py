"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vllm.entrypoints.anthropic.bodies import (
    CacheCreation,
    Event,
    MessageBody,
    MessageUsage,
    StopDelta,
    ThinkingTokens,
    TokenCount,
)
from vllm.entrypoints.anthropic.builder import MessageBuilder
from vllm.entrypoints.anthropic.call import FIELD_NAMES, make_answer_request, read_thinking
from vllm.entrypoints.anthropic.diagnostics import Diagnostics, diagnose, read_diagnostics
from vllm.entrypoints.anthropic.errors import REQUEST_ID_HEADER, error_event
from vllm.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.diagnosis.diagnoses import AskedChat, Diagnoses
from vllm.entrypoints.openai.errors import describe_late_exception
from vllm.entrypoints.openai.field_names import fields_named
from vllm.entrypoints.openai.pipeline.answers import AnswerDelta
from vllm.entrypoints.openai.pipeline.chat_task import prepare_chat
from vllm.entrypoints.openai.pipeline.single_answer import SingleAnswer, prepare_answer
from vllm.entrypoints.openai.request_scope import RequestScope, header_request_id, open_scope

_NO_USAGE = MessageUsage(0, 0, 0, 0)
_HOUR_S = 3600.0
# The API has no word for an answer that was ended because it repeated itself: it is not whole.
_STOP_REASONS = {"length": "max_tokens", "repetition": "max_tokens", "tool_calls": "tool_use"}


async def create_message(
    body: MessagesRequest, raw_request: Request, context: ServingContext
) -> Response:
    """Answer a message.

    Raises:
        UserInputError: The request is wrong.
        EngineError: The engine cannot serve it.
    """
    scope = _open_scope(body, raw_request, context)
    thinking = read_thinking(body.thinking, body.max_tokens)
    request = make_answer_request(body, thinking, context)
    opts_in, compared = read_diagnostics(body.diagnostics)
    answer = await prepare_answer(request, scope, context, streams=bool(body.stream))
    first = MessageBody(scope.response_id, scope.model, _NO_USAGE)
    if opts_in:
        diagnoses: Diagnoses = raw_request.app.state.diagnoses
        first.diagnostics = await _diagnose(diagnoses, compared, scope, answer, context)
    builder = MessageBuilder(first, hides_thinking=thinking.is_hidden)
    if body.stream:
        await answer.start()
        return scope.stream(_sent_events(builder, answer), answer.close, answer.cache_status)
    await _run(builder, answer)
    return _json(builder.body, {**scope.headers, **answer.cache_status})


async def _diagnose(
    diagnoses: Diagnoses,
    compared: str | None,
    scope: RequestScope,
    answer: SingleAnswer,
    context: ServingContext,
) -> Diagnostics | None:
    """Compare a request with an earlier one, and remember it for later ones.

    What is told says nothing of what the cache does, so that a stream may begin with it.
    """
    chat = AskedChat.of(answer.chat, answer.sampling, scope.model)
    told: Diagnostics | None = None
    if compared is not None:
        found = await diagnoses.compare(compared, chat, context)
        shows_details = context.args.enable_prompt_tokens_details
        told = diagnose(found, answer.cache_unit, shows_details=shows_details)
        reason = "none" if told is None else told.cache_miss_reason.__struct_config__.tag
        context.client_metrics.note_diagnosis("messages", reason)
    if not answer.leaves_nothing:
        await diagnoses.keep(scope.response_id, chat, context)
    return told


async def count_tokens(
    body: CountTokensRequest, raw_request: Request, context: ServingContext
) -> Response:
    """Return the length of a prompt.

    Raises:
        UserInputError: The request is wrong.
    """
    scope = _open_scope(body, raw_request, context)
    request = make_answer_request(body, read_thinking(body.thinking, None), context)
    with fields_named(FIELD_NAMES):
        chat = await prepare_chat(request.task, context)
    return _json(TokenCount(len(chat.prompt.token_ids)), scope.headers)


def _open_scope(
    body: CountTokensRequest, raw_request: Request, context: ServingContext
) -> RequestScope:
    """As other routes do; the id is random, as messages of a conversation must differ in theirs."""
    scope = open_scope("msg_", body, raw_request, context)
    headers = {**scope.headers, REQUEST_ID_HEADER: header_request_id(raw_request.scope)}
    return replace(scope, response_id=f"msg_{uuid.uuid4().hex}", headers=headers)


async def _run(builder: MessageBuilder, answer: SingleAnswer) -> None:
    try:
        await answer.start()
        async for _ in _events(builder, answer):
            pass
    finally:
        await answer.close()


async def _events(builder: MessageBuilder, answer: SingleAnswer) -> AsyncIterator[list[Event]]:
    has_begun = False
    async for delta, _ in answer.read():
        events: list[Event] = []
        if not has_begun:
            # The first output brings what the prompt found in the cache.
            has_begun = True
            events += builder.start(_usage(answer, is_whole=False))
        events += builder.add(delta.pieces)
        if delta.finish_reason is not None:
            events += builder.finish(_find_stop(delta), _usage(answer))
        if events:
            yield events


async def _sent_events(builder: MessageBuilder, answer: SingleAnswer) -> AsyncIterator[bytes]:
    """The events as bytes; an error is one too, as the status has been sent."""
    try:
        async for events in _events(builder, answer):
            yield _encode(events)
    except Exception as error:  # the edge of a response: nothing above could still answer
        yield error_event(error, describe_late_exception(error, f"Message {builder.body.id}"))


def _find_stop(delta: AnswerDelta) -> StopDelta:
    """Why the model stopped, in this API's words."""
    met = delta.output.stop_reason
    if delta.finish_reason == "stop" and isinstance(met, str):
        return StopDelta("stop_sequence", met)
    reason = _STOP_REASONS.get(delta.finish_reason or "", "end_turn")
    if reason == "max_tokens" and isinstance(met, str):
        return StopDelta(reason, stop_explanation=met)
    return StopDelta(reason)


def _usage(answer: SingleAnswer, is_whole: bool = True) -> MessageUsage:
    counts, num_long = answer.counts, answer.count_written(_HOUR_S)
    usage = MessageUsage(
        input_tokens=counts.prompt - counts.cached - counts.written,
        output_tokens=counts.answer,
        cache_read_input_tokens=counts.cached,
        cache_creation_input_tokens=counts.written,
        cache_creation=CacheCreation(num_long, counts.written - num_long),
        miss_tokens=counts.miss_tokens,
        dense_match_tokens=counts.dense_match_tokens,
        external_sources=counts.external_sources,
        encoder_seconds=counts.encoder_seconds,
    )
    if is_whole:
        usage.output_tokens_details = ThinkingTokens(counts.reasoning)
    return usage


def _encode(events: Sequence[Event]) -> bytes:
    return b"".join(
        b"event: %s\ndata: %s\n\n"
        % (str(event.__struct_config__.tag).encode(), msgspec.json.encode(event))
        for event in events
    )


def _json(body: MessageBody | TokenCount, headers: dict[str, str]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)
