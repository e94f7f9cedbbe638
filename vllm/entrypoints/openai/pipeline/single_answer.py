"""One answer to one chat, for the APIs without ``n``: from its fields to pieces and counts."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.engine_stream import EngineStream
from vllm.entrypoints.openai.field_names import fields_named
from vllm.entrypoints.openai.logprobs import chat_logprobs
from vllm.entrypoints.openai.pipeline.answers import AnswerDelta, read_answers
from vllm.entrypoints.openai.pipeline.chat_task import (
    ChatTask,
    PreparedChat,
    prepare_chat,
    structure_names,
)
from vllm.entrypoints.openai.pipeline.reasoning_count import ReasoningCounter
from vllm.entrypoints.openai.prompts import truncate, unread_limit
from vllm.entrypoints.openai.protocol.requests import ChatCompletionRequest, SamplingRequest
from vllm.entrypoints.openai.protocol.responses import ChatTokenLogprob
from vllm.entrypoints.openai.request_scope import RequestScope, leaves_nothing, make_stream
from vllm.entrypoints.openai.sampling import (
    LogprobsOptions,
    check_logprobs,
    check_request,
    make_sampling_params,
    resolve_max_tokens,
)
from vllm.entrypoints.openai.usage import UsageCounter
from vllm.exceptions import ShuttingDownError, UnsupportedFeatureError, UserInputError
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """What a client asks for, in the terms of chats.

    Attributes:
        task: The chat.
        sampling: Its sampling fields and response format; has no messages.
        field_names: From the fields of chats to those of the API that was called, for errors.
        max_tokens: Of the answer; None: what is left of the context.
        top_logprobs: Likely tokens to report per token; None: no log probabilities.
        bypasses_cache: Whether it neither reads what is cached nor leaves anything.
        ttl_s: For how many seconds to keep the prompt at least; None: as long as others.
        keeps_marked_alone: Whether nothing behind the last mark stays in the cache.
    """

    task: ChatTask
    sampling: ChatCompletionRequest
    field_names: Mapping[str, str]
    max_tokens: int | None = None
    top_logprobs: int | None = None
    bypasses_cache: bool = False
    ttl_s: float | None = None
    keeps_marked_alone: bool = False


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of one answer.

    Attributes:
        prompt: Of the prompt; the next two are parts of it.
        cached: Read from the prefix cache.
        written: Computed, and in the prefix cache now: up to the last full unit.
        answer: Of the answer, reasoning included.
        reasoning: Of the reasoning, the mark of its end included.
        miss_tokens: Of the prompt, computed, by reason; UNSET: it is not told.
        dense_match_tokens: How far the caches that keep everything matched; UNSET likewise.
        external_sources: Of ``cached``, restored, by where they lay; UNSET: none, or not told.
        encoder_seconds: For which towers ran before the first token; UNSET: none did, or not told.
    """

    prompt: int
    cached: int
    written: int
    answer: int
    reasoning: int
    miss_tokens: dict[str, int] | UnsetType = UNSET
    dense_match_tokens: int | UnsetType = UNSET
    external_sources: dict[str, int] | UnsetType = UNSET
    encoder_seconds: float | UnsetType = UNSET


class SingleAnswer:
    """An answer on its way; ``prepare_answer`` makes it. ``close`` must be called.

    Owns: its stream, and the counts of what it brought.
    """

    def __init__(
        self,
        chat: PreparedChat,
        stream: EngineStream,
        context: ServingContext,
        top_logprobs: int | None,
        sampling: SamplingRequest,
        *,
        leaves_nothing: bool,
    ) -> None:
        self._chat = chat
        self._sampling = sampling
        self._leaves_nothing = leaves_nothing
        self._stream = stream
        self._top_logprobs = top_logprobs
        self._shows_misses = context.args.enable_prompt_tokens_details
        self._usage = UsageCounter([len(chat.prompt.token_ids)], shows_misses=self._shows_misses)
        self._reasoning = ReasoningCounter(context.tokenizer, chat.in_reasoning)
        self._held: list[ChatTokenLogprob] = []
        self._has_skipped = False
        cache = context.config.cache_config
        self._cache_unit = cache.block_size if cache.enable_prefix_caching else None

    @property
    def chat(self) -> PreparedChat:
        """The chat that is answered."""
        return self._chat

    @property
    def sampling(self) -> SamplingRequest:
        """The request's sampling fields, as chats spell them."""
        return self._sampling

    @property
    def leaves_nothing(self) -> bool:
        """Whether nothing may be remembered of the request."""
        return self._leaves_nothing

    @property
    def cache_unit(self) -> int | None:
        """Tokens that the prefix cache shares at once; None: it is off."""
        return self._cache_unit

    @property
    def cache_status(self) -> dict[str, str]:
        """The response header that says what the prompt hit, if that is known yet."""
        return self._stream.cache_status

    async def start(self) -> None:
        """Wait for the first output.

        Raises:
            VllmError: The engine refuses the request, or fails.
        """
        await self._stream.start()

    async def close(self) -> None:
        """Abort what still runs."""
        await self._stream.close()

    async def read(self) -> AsyncIterator[tuple[AnswerDelta, list[ChatTokenLogprob]]]:
        """Yield what is new, with the log probabilities of its content, until the answer is whole.

        Raises:
            VllmError: The engine failed, or the server ended the answer early.
        """
        async for delta in read_answers(self._stream, self._chat.make_parser, self._usage):
            if delta.finish_reason == "abort":
                raise ShuttingDownError("The server ended this answer before it was complete.")
            self._reasoning.add(delta.output.token_ids, delta.pieces)
            yield delta, self._logprobs(delta.output)

    def _logprobs(self, output: CompletionOutput) -> list[ChatTokenLogprob]:
        """Those of tokens behind the reasoning; held back until it is known where that ends."""
        if self._top_logprobs is None or output.logprobs is None:
            return []
        self._held += chat_logprobs(
            output.token_ids, output.logprobs, self._top_logprobs, False
        ).content
        if not self._reasoning.has_ended:
            return []
        rows, self._held = self._held[self._num_to_skip() :], []
        return rows

    def _num_to_skip(self) -> int:
        """How many of the held rows are reasoning."""
        is_first, self._has_skipped = not self._has_skipped, True
        return self._reasoning.num_tokens if is_first else 0

    def count_written(self, ttl_s: float) -> int:
        """Return how much of what was written lies below marks that last at least so long."""
        counts = self.counts
        marks = self._chat.prompt.cache_ttls.items()
        end = max((offset for offset, seconds in marks if seconds >= ttl_s), default=0)
        return min(counts.written, max(end - counts.cached, 0))

    @property
    def counts(self) -> TokenCounts:
        """The tokens so far."""
        usage = self._usage.usage
        cached = usage.prompt_tokens_details.cached_tokens
        written = 0
        inserts = not (self._leaves_nothing or self._sampling.skip_cache_insert)
        if self._cache_unit is not None and inserts:
            end = self._chat.prompt.insert_end
            full = usage.prompt_tokens if end is None else min(end, usage.prompt_tokens)
            full = full // self._cache_unit * self._cache_unit
            written = max(full - cached, 0)
        details = usage.prompt_tokens_details
        return TokenCounts(
            miss_tokens=details.miss_tokens,
            dense_match_tokens=details.dense_match_tokens,
            external_sources=details.external_sources,
            encoder_seconds=details.encoder_seconds,
            prompt=usage.prompt_tokens,
            cached=cached,
            written=written,
            answer=usage.completion_tokens,
            reasoning=self._reasoning.num_tokens,
        )


async def prepare_answer(
    request: AnswerRequest, scope: RequestScope, context: ServingContext, *, streams: bool
) -> SingleAnswer:
    """Check and render a request; the answer is not started.

    Args:
        request: What to answer.
        scope: Of the HTTP request.
        context: The server's.
        streams: Whether the answer is wanted piece by piece.

    Raises:
        UserInputError: A field is wrong.
    """
    sampling = request.sampling.model_copy(update={"stream": streams})
    private = leaves_nothing(scope.raw_request, sampling)
    if request.bypasses_cache:
        sampling = sampling.model_copy(update={"skip_cache_insert": True})
    names = structure_names(request.task, sampling, request.field_names)
    with fields_named(names):
        chat, params = await _prepare(request, sampling, context)
        if request.bypasses_cache:
            params.skip_reading_prefix_cache = True
        stream = make_stream(scope, sampling, [chat.prompt], lambda _: params, context, names)
    return SingleAnswer(chat, stream, context, params.logprobs, sampling, leaves_nothing=private)


async def _prepare(
    request: AnswerRequest, sampling: ChatCompletionRequest, context: ServingContext
) -> tuple[PreparedChat, SamplingParams]:
    """The rendered chat, and how to answer it."""
    served_model = context.served_model
    check_request(sampling, served_model)
    top_logprobs = check_logprobs(request.top_logprobs, served_model, "top_logprobs")
    chat = await prepare_chat(request.task, context, unread_limit(sampling, served_model))
    prompt = truncate(chat.prompt, sampling, request.max_tokens, served_model)
    prompt = prompt.only_marked() if request.keeps_marked_alone else prompt.kept_for(request.ttl_s)
    num_prompt = len(prompt.token_ids)
    max_tokens = resolve_max_tokens(request.max_tokens, None, num_prompt, served_model)
    params = make_sampling_params(
        sampling, served_model, max_tokens, LogprobsOptions(top_logprobs, None)
    )
    return replace(chat, prompt=prompt), chat.adapt_params(params)


# Fields of SamplingRequest that the other APIs spell otherwise, or do not have.
_OWN_FIELDS = frozenset({"model", "n", "max_tokens", "stream", "stream_options", "request_id"})


_OF_OTHER_ROUTES = ("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids")


def check_single(body: SamplingRequest) -> None:
    """Refuse what an answer of these APIs has no place for.

    Raises:
        UserInputError: Several answers are asked for.
        UnsupportedFeatureError: Prompt log probabilities or token ids are.
    """
    if body.n not in (None, 1):
        raise UserInputError(f"n={body.n}: this route gives one answer.", "n")
    for name in _OF_OTHER_ROUTES:
        value = getattr(body, name)
        if value is not None and value is not False:  # 0 asks for something
            raise UnsupportedFeatureError(
                f"{name} is not supported by this route: leave it out.", name
            )


def sampling_of(body: SamplingRequest, **chat_fields: Any) -> ChatCompletionRequest:
    """Return another API's sampling fields as a chat request.

    Args:
        body: The other API's.
        chat_fields: Further fields of the chat request; None leaves one out.
    """
    names = SamplingRequest.model_fields.keys() - _OWN_FIELDS
    fields = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    fields |= {name: value for name, value in chat_fields.items() if value is not None}
    return ChatCompletionRequest.model_validate({"messages": [], **fields})


def check_encodable(value: Any, param: str) -> int:
    """Return the size of a value as JSON, in bytes.

    Raises:
        UserInputError: It holds what JSON cannot carry back, such as a lone surrogate.
    """
    try:
        return len(msgspec.json.encode(value))
    except (UnicodeEncodeError, RecursionError, TypeError, ValueError) as error:
        raise UserInputError(
            f"{param} holds what cannot be written as JSON: a lone surrogate, or too many levels.",
            param,
        ) from error
