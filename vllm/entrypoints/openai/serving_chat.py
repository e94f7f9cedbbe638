"""``POST /v1/chat/completions``.

There is no reasoning parser yet: with thinking on, the reasoning is part of the content, up to and
including ``</think>``.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.disconnect import EventStreamResponse
from vllm.entrypoints.openai.engine_stream import EngineStream
from vllm.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs_json
from vllm.entrypoints.openai.prompts import TokenizedPrompt, truncate
from vllm.entrypoints.openai.protocol.requests import ChatCompletionRequest
from vllm.entrypoints.openai.protocol.responses import (
    ChatBody,
    ChatChoice,
    ChatChunkBody,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessageBody,
    unix_now,
)
from vllm.entrypoints.openai.request_scope import RequestScope, make_stream, open_scope
from vllm.entrypoints.openai.sampling import (
    LogprobsWish,
    check_logprobs,
    check_request,
    make_sampling_params,
    resolve_max_tokens,
)
from vllm.entrypoints.openai.sse import encode_event, with_errors_as_events
from vllm.entrypoints.openai.usage import UsageCounter
from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import ChatOptions, ChatPrompt


@dataclass(frozen=True, slots=True)
class _Chat:
    """A checked request: its body, prompt, scope and the shape of its answer."""

    body: ChatCompletionRequest
    prompt: TokenizedPrompt
    scope: RequestScope
    context: ServingContext
    created: int
    wish: LogprobsWish

    def params(self, prompt: TokenizedPrompt) -> SamplingParams:
        body, facts = self.body, self.context.facts
        asked = body.max_completion_tokens
        if asked is None:
            asked = body.max_tokens
        max_tokens = resolve_max_tokens(asked, None, len(prompt.token_ids), facts)
        return make_sampling_params(body, facts, max_tokens, self.wish)

    def logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if self.wish.sampled is None:
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids)
        num_top = self.body.top_logprobs or 0
        return chat_logprobs(output.token_ids, output.logprobs or [], num_top, as_ids)

    def usage_counter(self) -> UsageCounter:
        return UsageCounter(
            [len(self.prompt.token_ids)],
            shows_misses=self.context.args.enable_prompt_tokens_details,
        )

    def chunk(self, choices: list[ChatChunkChoice]) -> ChatChunkBody:
        return ChatChunkBody(
            id=self.scope.response_id,
            created=self.created,
            model=self.scope.model,
            choices=choices,
            system_fingerprint=self.context.facts.fingerprint,
        )


async def create_chat_completion(
    body: ChatCompletionRequest, raw_request: Request, context: ServingContext
) -> Response:
    """Answer a chat request.

    Raises:
        UserInputError: The request is wrong.
        EngineError: The engine cannot serve it.
        ClientGoneError: The client left before the answer began.
    """
    chat = await _check(body, raw_request, context)
    stream = make_stream(chat.scope, body, [chat.prompt], chat.params, context)
    if not body.stream:
        content = await chat.scope.until_gone(_collect(chat, stream))
        return Response(content, media_type="application/json", headers=chat.scope.headers)
    await chat.scope.until_gone(stream.start())
    events = with_errors_as_events(_events(chat, stream), chat.scope.response_id)
    return EventStreamResponse(events, stream.close, chat.scope.response_id, chat.scope.headers)


async def _check(
    body: ChatCompletionRequest, raw_request: Request, context: ServingContext
) -> _Chat:
    scope = open_scope("chatcmpl-", body, raw_request, context)
    facts = context.facts
    check_request(body, facts)
    if body.top_logprobs is not None and not body.logprobs and body.top_logprobs != 0:
        raise UserInputError("top_logprobs needs logprobs=true.", "top_logprobs")
    num_top = check_logprobs(body.top_logprobs or 0, facts, "top_logprobs")
    num_prompt_top = check_logprobs(body.prompt_logprobs, facts, "prompt_logprobs")
    prompt = await encode_chat(
        body.messages,
        ChatOptions(
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            reasoning_effort=body.reasoning_effort,
            template_kwargs=_template_kwargs(body.chat_template_kwargs, context),
            add_special_tokens=bool(body.add_special_tokens),
        ),
        context,
    )
    if body.include_reasoning is False and prompt.in_reasoning:
        raise UnsupportedFeatureError(
            "include_reasoning=false is not supported by this server yet while the model reasons: "
            "turn reasoning off with chat_template_kwargs={'thinking': false}.",
            "include_reasoning",
        )
    return _Chat(
        body=body,
        prompt=truncate(
            TokenizedPrompt(prompt.token_ids, prompt.text, prompt.part_ends),
            body,
            body.max_completion_tokens or body.max_tokens,
            facts,
        ),
        scope=scope,
        context=context,
        created=unix_now(),
        wish=LogprobsWish(num_top if body.logprobs else None, num_prompt_top),
    )


def _template_kwargs(
    from_request: Mapping[str, Any] | None, context: ServingContext
) -> dict[str, Any]:
    return {**context.args.default_chat_template_kwargs, **(from_request or {})}


async def encode_chat(
    messages: Sequence[Mapping[str, Any]], options: ChatOptions, context: ServingContext
) -> ChatPrompt:
    """Render and tokenise a chat, in a thread: templates are programs and texts are long.

    Raises:
        UserInputError: A message or an option is wrong.
    """
    return await asyncio.to_thread(context.chat_encoder.encode_chat, messages, options)


async def _collect(chat: _Chat, stream: EngineStream) -> bytes:
    await stream.start()
    usage = chat.usage_counter()
    choices: list[ChatChoice] = []
    prompt_logprobs = None
    try:
        async for item in stream.outputs():
            usage.add(item)
            prompt_logprobs = item.output.prompt_logprobs or prompt_logprobs
            choices += [_choice(chat, output) for output in item.output.outputs]
    finally:
        await stream.close()
    response = ChatBody(
        id=chat.scope.response_id,
        created=chat.created,
        model=chat.scope.model,
        choices=sorted(choices, key=lambda choice: choice.index),
        system_fingerprint=chat.context.facts.fingerprint,
        usage=usage.usage,
    )
    if chat.body.prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs_json(prompt_logprobs) or UNSET
    if chat.body.return_token_ids:
        response.prompt_token_ids = chat.prompt.token_ids
    return msgspec.json.encode(response)


def _choice(chat: _Chat, output: CompletionOutput) -> ChatChoice:
    choice = ChatChoice(
        index=output.index,
        message=ChatMessageBody(output.text),
        logprobs=chat.logprobs(output),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )
    if chat.body.return_token_ids:
        choice.token_ids = list(output.token_ids)
    return choice


async def _events(chat: _Chat, stream: EngineStream) -> AsyncIterator[bytes]:
    options = chat.body.stream_options
    force = chat.context.args.enable_force_include_usage
    in_every_chunk = force or bool(options and options.continuous_usage_stats)
    usage = chat.usage_counter()
    opened: set[int] = set()
    async for item in stream.outputs():
        usage.add(item)
        for output in item.output.outputs:
            chunks = [_delta(chat, output)]
            if output.index not in opened:
                # The role goes out with the first token and not at arrival: clients measure the
                # time to the first token by this chunk.
                opened.add(output.index)
                chunks.insert(0, _role(chat, output.index))
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
        chunk.prompt_token_ids = chat.prompt.token_ids
    return chunk


def _delta(chat: _Chat, output: CompletionOutput) -> ChatChunkBody:
    choice = ChatChunkChoice(
        index=output.index,
        delta=ChatDelta(content=output.text),
        logprobs=chat.logprobs(output),
        finish_reason=output.finish_reason,
    )
    if output.finish_reason is not None:
        choice.stop_reason = output.stop_reason
    if chat.body.return_token_ids:
        choice.token_ids = list(output.token_ids)
    return chat.chunk([choice])
