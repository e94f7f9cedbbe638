"""``/v1/decisions`` and ``/v1/systemone``: from a body to its answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vllm.entrypoints.decisions import answers, openai_body, system_one
from vllm.entrypoints.decisions.answers import CacheTokens, DecisionBody, DecisionUsage
from vllm.entrypoints.decisions.cache_use import CacheUse
from vllm.entrypoints.decisions.input_items import Conversation, read_input
from vllm.entrypoints.decisions.prompts import PromptMaker, PromptSet
from vllm.entrypoints.decisions.protocol import DecisionsRequest
from vllm.entrypoints.decisions.question_format import QuestionFormat
from vllm.entrypoints.decisions.questions import Question
from vllm.entrypoints.decisions.reading import PromptReader, Readings
from vllm.entrypoints.decisions.scoring import Distribution, label_mass, make_distribution
from vllm.entrypoints.decisions.wording import PROMPT_FORMAT_VERSION
from vllm.entrypoints.openai.cache_hints import (
    CacheHints,
    find_asked,
    read_cache_options,
    read_hints,
    with_ttl,
)
from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.request_scope import (
    RequestScope,
    header_data_parallel_rank,
    leaves_nothing,
    open_scope,
)
from vllm.entrypoints.openai.sampling import check_options, read_options
from vllm.entrypoints.openai.text_workers import count_chars
from vllm.exceptions import UserInputError

MAX_ORDERS = 16
_MAX_IDENTIFIER_CHARS = 128


@dataclass(frozen=True, slots=True)
class _Call:
    """A checked request.

    Attributes:
        body: As it came.
        conversation: What the questions are about.
        questions: They.
        is_system_one: Whether it is answered in System One's shape.
        hints: What it asks of the cache.
        ignored: Fields without effect.
    """

    body: DecisionsRequest
    conversation: Conversation
    questions: Sequence[Question]
    is_system_one: bool
    hints: CacheHints
    ignored: Sequence[str]


async def create_decision(
    body: DecisionsRequest, raw_request: Request, context: ServingContext
) -> Response:
    """Answer questions about an input.

    Raises:
        UserInputError: The request is wrong.
        EngineError: The engine cannot serve it.
    """
    # A model that is not served goes before all else.
    context.served_model.resolve_name(body.model)
    call = _check(body)
    scope = open_scope("dec-", body, raw_request, context, call.ignored)
    check_options(body, context.served_model)
    given = await _render(call, context)
    options = read_options(body).replace(
        data_parallel_rank=header_data_parallel_rank(raw_request),
        skip_cache_insert=leaves_nothing(raw_request, body),
        session_id=scope.session,
    )
    cache = CacheUse.choose(options, call.hints, given)
    readings = await PromptReader(scope.response_id, context, cache.options).read(given)
    return _respond(call, scope, context, given, readings, cache)


def _check(body: DecisionsRequest) -> _Call:
    is_system_one = "state" in body.model_fields_set
    if is_system_one and body.input is not None:
        raise UserInputError("input and state belong to two contracts: give one of them.", "state")
    if not is_system_one and body.input is None:
        raise UserInputError("input is required: say what the questions are about.", "input")
    if body.questions is None:
        raise UserInputError("questions is required: give 1 to 400 of them.", "questions")
    conversation = system_one.read_state(body.state) if is_system_one else read_input(body.input)
    reader = system_one.read_questions if is_system_one else openai_body.read_questions
    questions, ignored = reader(body.questions)
    _check_settings(body)
    read_cache_options(body.prompt_cache_options)
    hints = read_hints(body.prompt_cache_options)
    # Nothing is answered that could be compared, or left out.
    ignored += find_asked(body.prompt_cache_options, "comparison_response_id", "prewarm")
    marks = with_ttl(conversation.breakpoints, hints.ttl_s)
    return _Call(
        body=body,
        conversation=replace(conversation, breakpoints=marks),
        questions=questions,
        is_system_one=is_system_one,
        hints=hints,
        ignored=ignored,
    )


def _check_settings(body: DecisionsRequest) -> None:
    version = body.prompt_format_version
    if version is not None and version != PROMPT_FORMAT_VERSION:
        raise UserInputError(
            f"prompt_format_version={version}: this server writes prompts of version "
            f"{PROMPT_FORMAT_VERSION}. Leave it out, or fit what depends on it again.",
            "prompt_format_version",
        )
    if body.x_permutations is not None and not 1 <= body.x_permutations <= MAX_ORDERS:
        raise UserInputError(
            f"x_permutations={body.x_permutations} must be 1 to {MAX_ORDERS}.", "x_permutations"
        )
    identifier = body.safety_identifier
    if identifier is not None and len(identifier) > _MAX_IDENTIFIER_CHARS:
        raise UserInputError(
            f"safety_identifier has {len(identifier)} characters: at most {_MAX_IDENTIFIER_CHARS}.",
            "safety_identifier",
        )


async def _render(call: _Call, context: ServingContext) -> PromptSet:
    """Make the prompts, in a thread: templates are programs and texts are long."""
    kwargs = {
        **context.args.default_chat_template_kwargs,
        **(call.body.chat_template_kwargs or {}),
    }
    asks = QuestionFormat(
        context.chat_encoder,
        context.tokenizer,
        context.parsers,
        kwargs,
        context.served_model.max_prompt_tokens,
    )
    maker = PromptMaker(call.conversation, asks)
    num_orders = call.body.x_permutations or 1
    num_chars = count_chars([call.conversation.messages, call.body.questions])
    return await context.workers.run(num_chars, partial(maker.make, call.questions, num_orders))


def _respond(
    call: _Call,
    scope: RequestScope,
    context: ServingContext,
    given: PromptSet,
    readings: Readings,
    cache: CacheUse,
) -> Response:
    settings = context.args.decisions
    found: list[list[tuple[int, list[float]]]] = [[] for _ in call.questions]
    for prompt, logprobs in zip(given.prompts, readings.logprobs, strict=True):
        found[prompt.question].append((prompt.turn, logprobs))
    distributions = [make_distribution(rows, settings.temperature) for rows in found]
    num_tokens = sum(len(prompt.token_ids) for prompt in given.prompts)
    num_cached = 0 if cache.reads_alone else sum(readings.num_cached)
    content: Any
    if call.is_system_one:
        content = system_one.SystemOneBody(
            scope.model,
            {
                question.name or "": system_one.make_answer(question, one, settings.refusal_mass)
                for question, one in zip(call.questions, distributions, strict=True)
            },
            system_one.SystemOneUsage(num_tokens),
            PROMPT_FORMAT_VERSION,
        )
    else:
        content = DecisionBody(
            scope.model,
            _make_answers(call, given, readings, distributions, settings.refusal_mass),
            DecisionUsage(
                num_tokens,
                CacheTokens(num_cached, cache.count_written(given, readings.num_cached, context)),
                num_tokens,
            ),
            PROMPT_FORMAT_VERSION,
        )
    status = f'vllm; {"hit" if num_cached else "fwd=miss"}; detail="{num_cached} of {num_tokens}"'
    return Response(
        msgspec.json.encode(content),
        media_type="application/json",
        headers={**scope.headers, "Cache-Status": status},
    )


def _make_answers(
    call: _Call,
    given: PromptSet,
    readings: Readings,
    distributions: Sequence[Distribution],
    refusal_mass: float,
) -> list[answers.Answer]:
    made = [
        answers.make_answer(question, one, refusal_mass)
        for question, one in zip(call.questions, distributions, strict=True)
    ]
    for prompt, logprobs in zip(given.prompts, readings.logprobs, strict=True):
        if prompt.turn:
            continue  # the first order is the request's
        answer = made[prompt.question]
        if call.body.return_prompt_token_ids:
            answer.prompt_token_ids = prompt.token_ids
            answer.label_token_ids = [list(path) for path in prompt.trie.paths]
        if call.body.return_label_logprobs:
            answer.label_logprobs = logprobs
            answer.label_mass = label_mass(logprobs)
    return made
