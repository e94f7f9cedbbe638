"""``POST /v1/chat/completions``."""

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from vllm.entrypoints.openai.cache_hints import (
    find_asked,
    read_cache_options,
    read_hints,
    with_ttl,
)
from vllm.entrypoints.openai.chat_marks import find_marks
from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.engine_stream import EngineStream
from vllm.entrypoints.openai.field_names import NO_NAMES, fields_named
from vllm.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs_json
from vllm.entrypoints.openai.pipeline.answers import (
    AnswerDelta,
    FinishedAnswer,
    collect_answers,
    read_answers,
)
from vllm.entrypoints.openai.pipeline.chat_messages import chat_deltas, chat_message
from vllm.entrypoints.openai.pipeline.chat_task import (
    ChatTask,
    PreparedChat,
    prepare_chat,
    structure_names,
)
from vllm.entrypoints.openai.pipeline.reasoning_count import ReasoningCounter
from vllm.entrypoints.openai.prompts import TokenizedPrompt, truncate, unread_limit
from vllm.entrypoints.openai.protocol.requests import ChatCompletionRequest
from vllm.entrypoints.openai.protocol.responses import (
    ChatBody,
    ChatChoice,
    ChatChunkBody,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    unix_now,
)
from vllm.entrypoints.openai.request_scope import (
    RequestScope,
    leaves_nothing,
    make_stream,
    open_scope,
)
from vllm.entrypoints.openai.sampling import (
    LogprobsOptions,
    check_logprobs,
    check_request,
    make_sampling_params,
    resolve_max_tokens,
)
from vllm.entrypoints.openai.sse import encode_event, with_errors_as_events
from vllm.entrypoints.openai.structured_fields import find_structured_field
from vllm.entrypoints.openai.usage import UsageCounter
from vllm.exceptions import UserInputError
from vllm.outputs import SampleLogprobs
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import ChatOptions
from vllm.tokenizers.chat_tools import narrow_tools, parse_tools


@dataclass(frozen=True, slots=True)
class _Chat:
    """A checked request: its body, prompt, scope and the shape of its answer."""

    body: ChatCompletionRequest
    prepared: PreparedChat
    scope: RequestScope
    context: ServingContext
    created: int
    logprobs_options: LogprobsOptions
    field_names: Mapping[str, str]
    bypasses_cache: bool = False

    def params(self, prompt: TokenizedPrompt) -> SamplingParams:
        body, served_model = self.body, self.context.served_model
        asked = body.max_completion_tokens
        if asked is None:
            asked = body.max_tokens
        max_tokens = resolve_max_tokens(asked, None, len(prompt.token_ids), served_model)
        params = make_sampling_params(body, served_model, max_tokens, self.logprobs_options)
        if self.bypasses_cache:
            params.skip_reading_prefix_cache = True
        return self.prepared.adapt_params(params)

    @property
    def n(self) -> int:
        return 1 if self.body.n is None else self.body.n

    @property
    def shows_reasoning(self) -> bool:
        return self.body.include_reasoning is not False

    @property
    def tells_logprobs(self) -> bool:
        return self.logprobs_options.sampled is not None

    def logprobs(
        self, token_ids: Sequence[int], rows: SampleLogprobs | None
    ) -> ChatLogprobs | None:
        if not self.tells_logprobs:
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids)
        num_top = self.body.top_logprobs or 0
        return chat_logprobs(token_ids, rows or [], num_top, as_ids)

    def usage_counter(self) -> UsageCounter:
        cache = self.context.config.cache_config
        inserts = not leaves_nothing(self.scope.raw_request, self.body)
        end = self.prepared.prompt.insert_end
        return UsageCounter(
            [len(self.prepared.prompt.token_ids)],
            insert_end=sys.maxsize if end is None else end,
            cache_unit=cache.block_size if cache.enable_prefix_caching and inserts else 0,
            shows_misses=self.context.args.enable_prompt_tokens_details,
        )

    def reasoning_counter(self) -> ReasoningCounter:
        return ReasoningCounter(self.context.tokenizer, self.prepared.in_reasoning)

    def chunk(self, choices: list[ChatChunkChoice]) -> ChatChunkBody:
        return ChatChunkBody(
            id=self.scope.response_id,
            created=self.created,
            model=self.scope.model,
            choices=choices,
            system_fingerprint=self.context.served_model.fingerprint,
        )


async def create_chat_completion(
    body: ChatCompletionRequest, raw_request: Request, context: ServingContext
) -> Response:
    """Answer a chat request.

    Raises:
        UserInputError: The request is wrong.
        EngineError: The engine cannot serve it.
    """
    chat = await _check(body, raw_request, context)
    prompts = [chat.prepared.prompt]
    stream = make_stream(chat.scope, chat.body, prompts, chat.params, context, chat.field_names)
    if not body.stream:
        content = await _collect(chat, stream)
        headers = {**chat.scope.headers, **stream.cache_status}
        return Response(content, media_type="application/json", headers=headers)
    await stream.start()
    events = with_errors_as_events(_events(chat, stream), chat.scope.response_id)
    return chat.scope.stream(events, stream.close, stream.cache_status)


async def _check(
    body: ChatCompletionRequest, raw_request: Request, context: ServingContext
) -> _Chat:
    read_cache_options(body.prompt_cache_options)
    hints, marks = read_hints(body.prompt_cache_options), find_marks(body.messages)
    # Neither is of this API: there is no response to compare with, and none without an answer.
    ignored = find_asked(body.prompt_cache_options, "comparison_response_id", "prewarm")
    scope = open_scope("chatcmpl-", body, raw_request, context, ignored)
    bypasses = hints.is_explicit and not marks
    if bypasses:
        body = body.model_copy(update={"skip_cache_insert": True})
    served_model = context.served_model
    check_request(body, served_model)
    if body.top_logprobs is not None and not body.logprobs and body.top_logprobs != 0:
        raise UserInputError("top_logprobs needs logprobs=true.", "top_logprobs")
    num_top = check_logprobs(body.top_logprobs or 0, served_model, "top_logprobs")
    num_prompt_top = check_logprobs(body.prompt_logprobs, served_model, "prompt_logprobs")
    thinking, budget = _read_thinking(body.thinking)
    if budget is not None and body.thinking_token_budget is None:
        body = body.model_copy(update={"thinking_token_budget": budget})
    # DeepSeek's name for a last message that is to be continued.
    continues = body.messages[-1:] != [] and body.messages[-1].get("prefix") is True
    asks_it = f"messages[{len(body.messages) - 1}].prefix"
    names = {"continue_final_message": asks_it} if continues else NO_NAMES
    options = ChatOptions(
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=bool(body.continue_final_message) or continues,
        reasoning_effort=body.reasoning_effort,
        template_kwargs=_template_kwargs(
            {**thinking, **(body.chat_template_kwargs or {})}, context
        ),
        add_special_tokens=bool(body.add_special_tokens),
    )
    choice, tools = narrow_tools(body.tool_choice, parse_tools(body.tools))
    parallel = body.parallel_tool_calls is not False
    has_form = find_structured_field(body) is not None
    task = ChatTask(
        body.messages,
        options,
        tools,
        choice,
        parallel,
        breakpoints=with_ttl(marks, hints.ttl_s),
        has_form=has_form,
        image_settings=body.mm_processor_kwargs,
        cache_salt=body.cache_salt,
    )
    with fields_named(names):
        prepared = await prepare_chat(task, context, unread_limit(body, served_model))
    max_tokens = body.max_completion_tokens or body.max_tokens
    prompt = truncate(prepared.prompt, body, max_tokens, served_model)
    if hints.is_explicit and marks:
        prompt = prompt.only_marked()
    elif not bypasses:
        prompt = prompt.kept_for(hints.ttl_s)
    return _Chat(
        body=body,
        prepared=replace(prepared, prompt=prompt),
        scope=scope,
        context=context,
        created=unix_now(),
        logprobs_options=LogprobsOptions(num_top if body.logprobs else None, num_prompt_top),
        field_names=structure_names(task, body, NO_NAMES),
        bypasses_cache=bypasses,
    )


def _read_thinking(thinking: Mapping[str, Any] | None) -> tuple[dict[str, bool], int | None]:
    """Return the switches of templates that ``thinking`` sets, and its budget in tokens.

    Raises:
        UserInputError: It is malformed.
    """
    if thinking is None:
        return {}, None
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise UserInputError(
            f"thinking.type={str(kind)[:60]!r} is unknown: use enabled, adaptive or disabled.",
            "thinking",
        )
    if budget is not None and (type(budget) is not int or budget < 1):
        raise UserInputError(
            f"thinking.budget_tokens={str(budget)[:40]} must be a whole number of at least 1.",
            "thinking",
        )
    is_on = kind != "disabled"
    return {"thinking": is_on, "enable_thinking": is_on}, budget if is_on else None


def _template_kwargs(
    from_request: Mapping[str, Any] | None, context: ServingContext
) -> dict[str, Any]:
    return {**context.args.default_chat_template_kwargs, **(from_request or {})}


async def _collect(chat: _Chat, stream: EngineStream) -> bytes:
    usage = chat.usage_counter()
    answers = await collect_answers(
        stream, chat.prepared.make_parser, usage, chat.n, chat.reasoning_counter
    )
    response = ChatBody(
        id=chat.scope.response_id,
        created=chat.created,
        model=chat.scope.model,
        choices=[_choice(chat, answer) for answer in answers],
        system_fingerprint=chat.context.served_model.fingerprint,
        usage=usage.usage,
    )
    if chat.context.args.operations.shows_metrics:
        response.metrics = usage.metrics
    if chat.body.prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs_json(answers[0].prompt_logprobs) or UNSET
    if chat.body.return_token_ids:
        response.prompt_token_ids = chat.prepared.prompt.token_ids
    response.kv_transfer_params = answers[0].kv_transfer_params or UNSET
    return msgspec.json.encode(response)


def _choice(chat: _Chat, answer: FinishedAnswer) -> ChatChoice:
    choice = ChatChoice(
        index=answer.index,
        message=chat_message(answer.parsed, chat.shows_reasoning),
        logprobs=chat.logprobs(answer.token_ids, answer.logprobs),
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
    )
    if chat.body.return_token_ids:
        choice.token_ids = answer.token_ids
    return choice


async def _events(chat: _Chat, stream: EngineStream) -> AsyncIterator[bytes]:
    options = chat.body.stream_options
    force = chat.context.args.enable_force_include_usage
    in_every_chunk = force or bool(options and options.continuous_usage_stats)
    usage = chat.usage_counter()
    opened: set[int] = set()
    async for delta in read_answers(
        stream, chat.prepared.make_parser, usage, chat.n, chat.reasoning_counter
    ):
        chunks = _deltas(chat, delta)
        if delta.index not in opened:
            # The role goes out with the first token and not at arrival: clients measure the
            # time to the first token by this chunk.
            opened.add(delta.index)
            chunks.insert(0, _role(chat, delta.index))
        if delta.finish_reason is not None and chat.context.args.operations.shows_metrics:
            chunks[-1].metrics = usage.metrics
        for chunk in chunks:
            if in_every_chunk:
                chunk.usage = usage.usage
            yield encode_event(chunk)
    if force or (options and options.include_usage):
        last = chat.chunk([])
        last.usage = usage.usage
        yield encode_event(last)


def _role(chat: _Chat, index: int) -> ChatChunkBody:
    chunk = chat.chunk([ChatChunkChoice(index, ChatDelta(role="assistant", content=""))])
    if chat.body.return_token_ids:
        chunk.prompt_token_ids = chat.prepared.prompt.token_ids
    return chunk


def _ends_by_token(delta: AnswerDelta) -> bool:
    """Whether the last token ends the answer, and not a stop string or a limit."""
    output = delta.output
    return output.finish_reason == "stop" and not isinstance(output.stop_reason, str)


def _deltas(chat: _Chat, delta: AnswerDelta) -> list[ChatChunkBody]:
    """The chunks of one output of the engine: one at least, as clients count tokens by chunks."""
    deltas = chat_deltas(delta.pieces, chat.shows_reasoning) or [ChatDelta()]
    token_ids = list(delta.output.token_ids)
    # Clients that have asked for log probabilities take a chunk's tokens for its text: the one that
    # ends the answer, and is no text, comes apart.
    num_apart = int(_ends_by_token(delta) and len(token_ids) > 1 and chat.tells_logprobs)
    choices = [
        ChatChunkChoice(index=delta.index, delta=chat_delta)
        for chat_delta in [*deltas, *[ChatDelta(content="")] * num_apart]
    ]
    num_first = len(token_ids) - num_apart
    rows = delta.output.logprobs or []
    choices[0].logprobs = chat.logprobs(token_ids[:num_first], rows[:num_first])
    if num_apart:
        choices[-1].logprobs = chat.logprobs(token_ids[num_first:], rows[num_first:])
    if chat.body.return_token_ids:
        choices[0].token_ids = token_ids
    choices[-1].finish_reason = delta.finish_reason
    if delta.finish_reason is not None:
        choices[-1].stop_reason = delta.output.stop_reason
    return [chat.chunk([choice]) for choice in choices]
