"""``/v1/responses``: making responses, and what is done with stored ones."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vllm.entrypoints.openai.cache_hints import TTL_S
from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.diagnosis.comparison import Comparison
from vllm.entrypoints.openai.diagnosis.diagnoses import AskedChat, Diagnoses
from vllm.entrypoints.openai.disconnect import EventStreamResponse
from vllm.entrypoints.openai.errors import describe_late_exception
from vllm.entrypoints.openai.field_names import fields_named
from vllm.entrypoints.openai.pipeline.chat_task import prepare_chat
from vllm.entrypoints.openai.pipeline.single_answer import SingleAnswer, prepare_answer
from vllm.entrypoints.openai.responses.background import BackgroundResponse, BackgroundResponses
from vllm.entrypoints.openai.responses.bodies import (
    CacheWriteTokens,
    DeletedBody,
    InputItemsBody,
    InputTokensBody,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseBody,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.builder import ResponseBuilder
from vllm.entrypoints.openai.responses.call import (
    FIELD_NAMES,
    ResponsesCall,
    make_answer_request,
    make_call,
    open_responses_scope,
)
from vllm.entrypoints.openai.responses.diagnostics import (
    Diagnosis,
    PromptLookup,
    diagnose,
    with_details,
)
from vllm.entrypoints.openai.responses.events import Event, encode_events
from vllm.entrypoints.openai.responses.input_items import read_input, without_image_urls
from vllm.entrypoints.openai.responses.options import INCLUDE_IMAGE_URLS, check_include
from vllm.entrypoints.openai.responses.protocol import InputTokensRequest, ResponsesRequest
from vllm.entrypoints.openai.responses.store import ResponseStore, StoredResponse
from vllm.exceptions import UserInputError
from vllm.logger import init_logger

logger = init_logger(__name__)

_MAX_PAGE = 100


class ResponsesService:
    """Makes responses and keeps them.

    Owns: the store and the background responses.

    Args:
        store: For those that later requests may ask for.
        diagnoses: Remembers and compares their prompts.
    """

    def __init__(self, store: ResponseStore, diagnoses: Diagnoses) -> None:
        self._store = store
        self._diagnoses = diagnoses
        self._background = BackgroundResponses()

    async def create(
        self, body: ResponsesRequest, raw_request: Request, context: ServingContext
    ) -> Response:
        """Answer ``POST /v1/responses``.

        Raises:
            UserInputError: The request is wrong.
            EngineError: The engine cannot serve it.
        """
        self._check_previous(body.previous_response_id)
        call = make_call(body, raw_request, self._store, context)
        if body.background:
            self._background.check_room()
        streams = bool(body.stream) or bool(body.background)
        answer = await prepare_answer(call.request, call.scope, context, streams=streams)
        builder = ResponseBuilder(
            call.body, seals_reasoning=call.seals_reasoning, namespaces=call.namespaces
        )
        asked = await self._ask(call, answer, context)
        if body.background:
            return self._create_in_background(call, builder, asked, context)
        if body.stream:
            await answer.start()
            events = self._sent_events(call, builder, asked)
            return call.scope.stream(events, answer.close, answer.cache_status)
        await self._run(call, builder, asked)
        return _json(builder.body, {**call.scope.headers, **answer.cache_status})

    async def _ask(
        self, call: ResponsesCall, answer: SingleAnswer, context: ServingContext
    ) -> "_AskedAnswer":
        """Compare an answer's prompt with that of the response that the request names, if any."""
        chat = AskedChat.of(answer.chat, answer.sampling, call.scope.model)
        options = call.body.prompt_cache_options
        compared = None if options is None else options.comparison_response_id
        if compared is None:
            return _AskedAnswer(answer, chat, context, False, None)
        found = await self._diagnoses.compare(compared, chat, context)
        return _AskedAnswer(answer, chat, context, True, found)

    def knows(self, response_id: str) -> bool:
        """Whether a response is stored here, or being made."""
        return self._background.find(response_id) is not None or response_id in self._store

    def _check_previous(self, response_id: str | None) -> None:
        if response_id is None:
            return
        if self._background.find(response_id) is not None:
            raise UserInputError(
                f"The response {response_id!r} is not complete yet: wait for it.",
                "previous_response_id",
            )
        if not self._store.get(response_id, "previous_response_id").can_continue:
            raise UserInputError(
                f"The response {response_id!r} failed: continue an earlier one.",
                "previous_response_id",
            )

    async def _run(
        self, call: ResponsesCall, builder: ResponseBuilder, asked: "_AskedAnswer"
    ) -> None:
        try:
            await asked.answer.start()
            async for _ in self._events(call, builder, asked):
                pass
        finally:
            await asked.answer.close()

    async def _events(
        self, call: ResponsesCall, builder: ResponseBuilder, asked: "_AskedAnswer"
    ) -> AsyncIterator[list[Event]]:
        """The events of a started answer; it is stored before the last of them is told."""
        answer = asked.answer
        yield builder.start()
        async for delta, logprobs in answer.read():
            events = [] if call.prewarms else builder.add(delta.pieces, logprobs)
            if delta.finish_reason is not None:
                reason = "stop" if call.prewarms else delta.finish_reason
                usage = _usage(answer, has_answer=not call.prewarms)
                stop = delta.output.stop_reason
                events += builder.finish(reason, usage, asked.diagnose(), stop)
                asks = call.body.store or call.body.prompt_cache_options is not None
                if asks and not answer.leaves_nothing:
                    await self._diagnoses.keep(call.body.id, asked.chat, asked.context)
                if call.body.store and not call.body.background:
                    self._keep(call, builder.body, ())
            if events:
                yield events

    async def _sent_events(
        self, call: ResponsesCall, builder: ResponseBuilder, asked: "_AskedAnswer"
    ) -> AsyncIterator[bytes]:
        """The same as bytes; an error becomes the last event, as the status has been sent."""
        try:
            async for events in self._events(call, builder, asked):
                yield b"".join(encode_events(events))
        except Exception as error:  # the edge of a response: nothing above could still answer
            described = describe_late_exception(error, f"Response {builder.body.id}")
            yield b"".join(encode_events(builder.fail(described)))

    def _create_in_background(
        self,
        call: ResponsesCall,
        builder: ResponseBuilder,
        asked: "_AskedAnswer",
        context: ServingContext,
    ) -> Response:
        streams = call.streams
        answer = asked.answer

        async def work() -> AsyncIterator[list[Event]]:
            try:
                await answer.start()
                async for events in self._events(call, builder, asked):
                    yield events
            finally:
                await answer.close()

        def end(body: ResponseBody, events: Sequence[bytes]) -> None:
            self._keep(call, body, events)
            self._background.discard(body.id)

        response = BackgroundResponse(
            builder, work(), end, input_items=call.input_items, keeps_events=streams
        )
        queued = builder.queue()
        self._background.add(response)
        response.start(queued, context.state)
        if streams:
            return _event_stream(response.follow(), response.body.id, call.scope.headers)
        return _json(response.body, call.scope.headers)

    def _keep(self, call: ResponsesCall, body: ResponseBody, events: Sequence[bytes]) -> None:
        encoded = msgspec.json.encode(body)
        stored = StoredResponse(
            response_id=body.id,
            previous_id=body.previous_response_id,
            input_items=call.input_items,
            output_items=[msgspec.to_builtins(item) for item in body.output],
            body=encoded,
            num_bytes=2 * len(encoded) + call.num_input_bytes + sum(map(len, events)),
            events=tuple(events),
            is_background=body.background,
            can_continue=body.status in ("completed", "incomplete", "cancelled"),
        )
        if not self._store.put(stored):
            logger.warning("Response %s is too large to be stored.", body.id)

    def retrieve(self, response_id: str, *, stream: bool, starting_after: int) -> Response:
        """Answer ``GET /v1/responses/{id}``.

        Args:
            response_id: Of a stored or a background response.
            stream: Whether to send its events, which background responses keep that were created
                with ``stream``.
            starting_after: The number of the event behind which to begin.

        Raises:
            ResponseNotFoundError: It is not stored.
            UserInputError: It has no events to send.
        """
        running = self._background.find(response_id)
        if not stream:
            return _json(running.body) if running else _raw_json(self._store.get(response_id).body)
        if running is not None and running.keeps_events:
            return _event_stream(running.follow(starting_after), response_id)
        events = () if running is not None else self._store.get(response_id).events
        if not events:
            raise UserInputError(
                f"The response {response_id!r} has no events to send: these are kept of responses "
                "created with background=true and stream=true.",
                "stream",
            )
        return _event_stream(_iterate(events[starting_after + 1 :]), response_id)

    async def cancel(self, response_id: str) -> Response:
        """Answer ``POST /v1/responses/{id}/cancel``: stop a background response.

        Raises:
            ResponseNotFoundError: It is not stored.
            UserInputError: It is not a background response.
        """
        running = self._background.find(response_id)
        if running is not None:
            await running.cancel()
            return _json(running.body)
        stored = self._store.get(response_id)
        if not stored.is_background:
            raise UserInputError(
                f"The response {response_id!r} was not created with background=true: it ends when "
                "its client leaves.",
                "response_id",
            )
        return _raw_json(stored.body)

    async def delete(self, response_id: str) -> Response:
        """Answer ``DELETE /v1/responses/{id}``; a background response is stopped first.

        Raises:
            ResponseNotFoundError: It is not stored.
        """
        running = self._background.find(response_id)
        if running is not None:
            await running.cancel()
        self._store.delete(response_id)
        self._diagnoses.forget(response_id)
        return _json(DeletedBody(response_id))

    def list_input_items(
        self,
        response_id: str,
        *,
        limit: int,
        order: str,
        after: str | None,
        include: Sequence[str] = (),
    ) -> Response:
        """Answer ``GET /v1/responses/{id}/input_items``: what its own request brought.

        Args:
            response_id: Of a stored or a background response.
            limit: Items of a page.
            order: "asc": as they were sent; "desc": the last first.
            after: The id of the item behind which the page begins.
            include: Names of what is left out otherwise: the addresses of pictures.

        Raises:
            ResponseNotFoundError: It is not stored.
            UserInputError: An argument is out of range.
        """
        if not 1 <= limit <= _MAX_PAGE:
            raise UserInputError(f"limit={limit} must be between 1 and {_MAX_PAGE}.", "limit")
        if order not in ("asc", "desc"):
            raise UserInputError(f"order={order[:60]!r} must be asc or desc.", "order")
        running = self._background.find(response_id)
        items = list(running.input_items if running else self._store.get(response_id).input_items)
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise UserInputError(f"after={after[:60]!r} is no item of this response.", "after")
        start = 0 if after is None else ids.index(after) + 1
        page = items[start : start + limit]
        if INCLUDE_IMAGE_URLS not in check_include(include):
            page = [without_image_urls(item) for item in page]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return _json(InputItemsBody(page, first, last, start + limit < len(items)))

    async def count_input_tokens(
        self, body: InputTokensRequest, raw_request: Request, context: ServingContext
    ) -> Response:
        """Answer ``POST /v1/responses/input_tokens``.

        Raises:
            UserInputError: The request is wrong.
        """
        self._check_previous(body.previous_response_id)
        scope = open_responses_scope(body, raw_request, context)
        items = read_input([] if body.input is None else body.input, self._store.find_item)
        request = make_answer_request(body, items, self._store, context)
        with fields_named(FIELD_NAMES):
            chat = await prepare_chat(request.task, context)
        return _json(InputTokensBody(len(chat.prompt.token_ids)), scope.headers)


@dataclass(frozen=True, slots=True)
class _AskedAnswer:
    """An answer, and what its prompt was compared with.

    Attributes:
        answer: The answer.
        chat: Its prompt.
        context: The server's.
        compares: Whether the request named a response to compare with.
        found: What came of that; None: there is no such response.
    """

    answer: SingleAnswer
    chat: AskedChat
    context: ServingContext
    compares: bool
    found: Comparison | None

    def diagnose(self) -> Diagnosis | None:
        """Return what the prompt missed in the cache; None: nobody asked. Call it at the end."""
        if not self.compares:
            return None
        counts = self.answer.counts
        num_cores = self.context.config.parallel_config.data_parallel_size
        told = diagnose(self.found, PromptLookup(counts.cached, self.answer.cache_unit, num_cores))
        self.context.client_metrics.note_diagnosis("responses", told.__struct_config__.tag)
        if not self.context.args.enable_prompt_tokens_details:
            return told
        return with_details(told, self.found, counts.miss_tokens, counts.dense_match_tokens)


def _usage(answer: SingleAnswer, *, has_answer: bool = True) -> ResponseUsage:
    counts, num_long = answer.counts, answer.count_written(TTL_S["12h"])
    num_answer, num_reasoning = (counts.answer, counts.reasoning) if has_answer else (0, 0)
    return ResponseUsage(
        input_tokens=counts.prompt,
        input_tokens_details=InputTokensDetails(
            counts.cached,
            counts.written,
            CacheWriteTokens(num_long, counts.written - num_long),
            counts.miss_tokens,
            counts.dense_match_tokens,
            counts.external_sources,
            counts.encoder_seconds,
        ),
        output_tokens=num_answer,
        output_tokens_details=OutputTokensDetails(num_reasoning),
        total_tokens=counts.prompt + num_answer,
    )


def _json(body: msgspec.Struct, headers: Mapping[str, str] | None = None) -> Response:
    return _raw_json(msgspec.json.encode(body), headers)


def _raw_json(content: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(content, media_type="application/json", headers=dict(headers or {}))


def _event_stream(
    events: AsyncIterator[bytes], name: str, headers: Mapping[str, str] | None = None
) -> EventStreamResponse:
    """Events that go on without this client."""

    async def nothing() -> None:
        pass

    return EventStreamResponse(events, nothing, name, headers)


async def _iterate(events: Sequence[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event
