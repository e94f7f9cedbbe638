"""``POST /v1/completions``."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.echoed_text import EchoedText
from vllm.entrypoints.openai.engine_stream import EngineStream
from vllm.entrypoints.openai.field_names import fields_named
from vllm.entrypoints.openai.logprobs import CompletionLogprobsBuilder, prompt_logprobs_json
from vllm.entrypoints.openai.prompts import (
    TokenizedPrompt,
    split_prompts,
    tokenize_prompts,
    truncate,
    unread_limit,
)
from vllm.entrypoints.openai.protocol.requests import CompletionRequest
from vllm.entrypoints.openai.protocol.responses import (
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    unix_now,
)
from vllm.entrypoints.openai.request_scope import RequestScope, make_stream, open_scope
from vllm.entrypoints.openai.sampling import (
    LogprobsOptions,
    check_logprobs,
    check_request,
    check_token_id,
    make_sampling_params,
    resolve_max_tokens,
)
from vllm.entrypoints.openai.sse import encode_event, with_errors_as_events
from vllm.entrypoints.openai.structured_fields import find_structured_field
from vllm.entrypoints.openai.usage import UsageCounter
from vllm.exceptions import UserInputError
from vllm.outputs import CompletionOutput, PromptLogprobs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.image_prompts import place_images, read_prompt_images, scope_of

_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Completion:
    """A checked request: its body, prompts, scope and the shape of its answer."""

    body: CompletionRequest
    prompts: list[TokenizedPrompt]
    scope: RequestScope
    context: ServingContext
    created: int
    n: int
    logprobs_options: LogprobsOptions

    def params(self, prompt: TokenizedPrompt) -> SamplingParams:
        served_model = self.context.served_model
        max_tokens = resolve_max_tokens(
            1 if self.scores_only else self.body.max_tokens,
            _DEFAULT_MAX_TOKENS,
            len(prompt.token_ids),
            served_model,
            of_messages=False,
        )
        return make_sampling_params(self.body, served_model, max_tokens, self.logprobs_options)

    @property
    def scores_only(self) -> bool:
        """Whether the prompt comes back without an answer, for its log probabilities."""
        return bool(self.body.echo) and self.body.max_tokens == 0

    def chunk(self, choices: list[CompletionChoice]) -> CompletionBody:
        return CompletionBody(
            id=self.scope.response_id,
            created=self.created,
            model=self.scope.model,
            choices=choices,
            system_fingerprint=self.context.served_model.fingerprint,
        )

    def usage_counter(self) -> UsageCounter:
        return UsageCounter(
            [len(prompt.token_ids) for prompt in self.prompts],
            shows_misses=self.context.args.enable_prompt_tokens_details,
            counts_answers=not self.scores_only,
        )

    def echoed_text(self, job_index: int) -> EchoedText | None:
        """Return what puts a prompt in front of its answer; None: it stays away."""
        if not self.body.echo:
            return None
        prompt = self.prompts[job_index]
        return EchoedText(self.context.tokenizer, prompt.token_ids, prompt.text)


class _Answer:
    """Formats one answer (one prompt, one of its ``n``) from its outputs, in order."""

    def __init__(self, request: _Completion, job_index: int, index: int) -> None:
        self._request = request
        self._job_index = job_index
        self._index = job_index * request.n + index
        self._is_first = True
        num_top = request.body.logprobs
        as_ids = bool(request.body.return_tokens_as_token_ids)
        self._logprobs: CompletionLogprobsBuilder | None = None
        if num_top is not None:
            tokenizer = request.context.tokenizer
            self._logprobs = CompletionLogprobsBuilder(num_top, as_ids, tokenizer)
        self._echoed = request.echoed_text(job_index)

    def choice(
        self, output: CompletionOutput, prompt_logprobs: PromptLogprobs | None
    ) -> CompletionChoice:
        """Return the next chunk of the answer, the prompt in front of the first if asked."""
        body = self._request.body
        if self._request.scores_only:
            # The engine gives a prompt's log probabilities with a first token, which nobody wants.
            output = replace(output, text="", token_ids=[], logprobs=[], finish_reason="length")
        text = output.text
        if self._echoed is not None:
            is_last = output.finish_reason is not None
            text = self._echoed.push(output.token_ids, text, is_last=is_last)
        choice = CompletionChoice(self._index, text)
        choice.finish_reason = output.finish_reason
        choice.stop_reason = output.stop_reason
        if body.return_token_ids:
            choice.token_ids = list(output.token_ids)
        logprobs: CompletionLogprobs | None = None
        if self._is_first:
            self._is_first = False
            logprobs = self._begin(choice, prompt_logprobs)
        if self._logprobs is not None:
            new = self._logprobs.add(output.token_ids, output.logprobs or [])
            logprobs = new if logprobs is None else _joined(logprobs, new)
        choice.logprobs = logprobs
        return choice

    def _begin(
        self, choice: CompletionChoice, prompt_logprobs: PromptLogprobs | None
    ) -> CompletionLogprobs | None:
        body = self._request.body
        token_ids = self._request.prompts[self._job_index].token_ids
        if body.return_token_ids:
            choice.prompt_token_ids = token_ids
        if body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs_json(prompt_logprobs) or UNSET
        if not body.echo or self._logprobs is None:
            return None
        rows: PromptLogprobs = prompt_logprobs or []
        return self._logprobs.add_prompt(
            token_ids, rows, self._request.prompts[self._job_index].text
        )


def _joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


async def create_completion(
    body: CompletionRequest, raw_request: Request, context: ServingContext
) -> Response:
    """Answer a completion request.

    Raises:
        UserInputError: The request is wrong.
        EngineError: The engine cannot serve it.
    """
    request = await _check(body, raw_request, context)
    names = {"structured_outputs": find_structured_field(body) or "structured_outputs"}
    stream = make_stream(request.scope, body, request.prompts, request.params, context, names)
    if not body.stream:
        content = await _collect(request, stream)
        headers = {**request.scope.headers, **stream.cache_status}
        return Response(content, media_type="application/json", headers=headers)
    await stream.start()
    events = with_errors_as_events(_events(request, stream), request.scope.response_id)
    return request.scope.stream(events, stream.close, stream.cache_status)


async def _check(
    body: CompletionRequest, raw_request: Request, context: ServingContext
) -> _Completion:
    scope = open_scope("cmpl-", body, raw_request, context)
    served_model = context.served_model
    check_request(body, served_model)
    num_top = check_logprobs(body.logprobs, served_model, "logprobs")
    num_prompt_top = check_logprobs(body.prompt_logprobs, served_model, "prompt_logprobs")
    if body.echo and num_top is not None:
        num_prompt_top = num_top if num_prompt_top is None else max(num_top, num_prompt_top)
    if body.multi_modal_data:
        prompts = [await _read_pictures(body, context)]
    else:
        prompts = await tokenize_prompts(
            context.tokenizer,
            body.prompt,
            served_model.vocab_size,
            body.add_special_tokens is not False,
            workers=context.workers,
            max_tokens=unread_limit(body, served_model),
        )
    if body.cache_boundaries:
        marks = tuple(body.cache_boundaries)
        prompts = [replace(prompt, cache_boundaries=marks) for prompt in prompts]
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompts = [truncate(prompt, body, max_tokens, served_model) for prompt in prompts]
    if body.kv_transfer_params and len(prompts) != 1:
        raise UserInputError(
            f"kv_transfer_params come with {len(prompts)} prompts: send one prompt at a time.",
            "kv_transfer_params",
        )
    return _Completion(
        body=body,
        prompts=prompts,
        scope=scope,
        context=context,
        created=unix_now(),
        n=1 if body.n is None else body.n,
        logprobs_options=LogprobsOptions(num_top, num_prompt_top),
    )


async def _read_pictures(body: CompletionRequest, context: ServingContext) -> TokenizedPrompt:
    """The prompt of a request with pictures, of which there may be one."""
    given = read_prompt_images(body.multi_modal_data, body.multi_modal_uuids)
    context.images.check(given, "multi_modal_data")
    prompts = split_prompts(body.prompt)
    if len(prompts) != 1:
        raise UserInputError(
            f"multi_modal_data comes with {len(prompts)} prompts: send one prompt at a time.",
            "multi_modal_data",
        )
    family, (prompt,) = context.images.family, prompts
    if not isinstance(prompt, str):
        for token_id in prompt:
            check_token_id(token_id, context.served_model.vocab_size, "prompt")
    with fields_named({"messages": "multi_modal_data"}):
        read = await context.images.read(given, body.mm_processor_kwargs, scope_of(body.cache_salt))
    if family is None:
        raise UserInputError("multi_modal_data names no picture.", "multi_modal_data")
    place = partial(
        place_images,
        prompt,
        read,
        family,
        context.tokenizer,
        add_special_tokens=body.add_special_tokens is not False,
    )
    token_ids, images = await context.workers.run(len(prompt), lambda _: place())
    text = prompt if isinstance(prompt, str) else None
    return TokenizedPrompt(token_ids, text, images=images)


async def _collect(request: _Completion, stream: EngineStream) -> bytes:
    await stream.start()
    usage = request.usage_counter()
    choices: list[CompletionChoice] = []
    transfer: dict[str, Any] | None = None
    try:
        async for item in stream.outputs():
            usage.add(item)
            transfer = item.output.kv_transfer_params or transfer
            for output in item.output.outputs:
                answer = _Answer(request, item.job_index, output.index)
                choices.append(answer.choice(output, item.output.prompt_logprobs))
    finally:
        await stream.close()
    choices.sort(key=lambda choice: choice.index)
    response = request.chunk(choices)
    response.usage = usage.usage
    if request.context.args.operations.shows_metrics:
        response.metrics = usage.metrics
    if transfer is not None:
        response.kv_transfer_params = transfer
    return msgspec.json.encode(response)


async def _events(request: _Completion, stream: EngineStream) -> AsyncIterator[bytes]:
    options = request.body.stream_options
    force = request.context.args.enable_force_include_usage
    in_every_chunk = force or bool(options and options.continuous_usage_stats)
    shows_metrics = request.context.args.operations.shows_metrics
    usage = request.usage_counter()
    answers: dict[tuple[int, int], _Answer] = {}
    async for item in stream.outputs():
        usage.add(item)
        for output in item.output.outputs:
            key = (item.job_index, output.index)
            answer = answers.get(key) or answers.setdefault(key, _Answer(request, *key))
            chunk = request.chunk([answer.choice(output, item.output.prompt_logprobs)])
            if in_every_chunk:
                chunk.usage = usage.usage
            if shows_metrics and output.finish_reason is not None:
                chunk.metrics = usage.metrics
            yield encode_event(chunk)
    if force or (options and options.include_usage):
        last = request.chunk([])
        last.usage = usage.usage
        yield encode_event(last)
