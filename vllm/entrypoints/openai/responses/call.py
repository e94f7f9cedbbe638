"""A checked request: what the engine is asked, and the response before its first token."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request

from vllm.entrypoints.openai.cache_hints import read_cache_options, read_hints, with_ttl
from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.pipeline.chat_task import ChatTask
from vllm.entrypoints.openai.pipeline.single_answer import (
    AnswerRequest,
    check_encodable,
    sampling_of,
)
from vllm.entrypoints.openai.protocol.responses import unix_now
from vllm.entrypoints.openai.request_scope import RequestScope, leaves_nothing, open_scope
from vllm.entrypoints.openai.responses.bodies import ResponseBody
from vllm.entrypoints.openai.responses.foreign_items import find_left_out, find_offers
from vllm.entrypoints.openai.responses.input_items import make_chat, read_input
from vllm.entrypoints.openai.responses.options import (
    INCLUDE_LOGPROBS,
    INCLUDE_SEALED_REASONING,
    ChatTools,
    chat_effort,
    chat_response_format,
    chat_tool_choice,
    chat_tools,
    check_foreign,
    check_include,
    check_limits,
    check_metadata,
    join_tools,
)
from vllm.entrypoints.openai.responses.protocol import InputTokensRequest, ResponsesRequest
from vllm.entrypoints.openai.responses.store import Item, ResponseStore
from vllm.entrypoints.openai.sampling import check_logprobs
from vllm.entrypoints.openai.structured_fields import find_structured_field
from vllm.exceptions import UserInputError
from vllm.tokenizers import ChatOptions
from vllm.tokenizers.chat_tools import parse_tool_choice, parse_tools

# Names of the code below for fields of this API.
FIELD_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """A checked request.

    Attributes:
        scope: Of the HTTP request; its id is the response's.
        request: What to answer.
        body: The response before its first token.
        input_items: What the request brought.
        num_input_bytes: Their size as JSON.
        seals_reasoning: Whether reasoning also comes in its opaque form.
        namespaces: Namespace and name of functions that have one, by their names for the model.
        streams: Whether the client asked for events.
        prewarms: Whether the prompt alone is wanted in the cache, and no answer.
    """

    scope: RequestScope
    request: AnswerRequest
    body: ResponseBody
    input_items: Sequence[Item]
    num_input_bytes: int
    seals_reasoning: bool
    namespaces: Mapping[str, tuple[str, str]]
    streams: bool
    prewarms: bool = False


def make_call(
    body: ResponsesRequest, raw_request: Request, store: ResponseStore, context: ServingContext
) -> ResponsesCall:
    """Check a request.

    Raises:
        UserInputError: A field is wrong, or names a response that is not stored.
    """
    read_cache_options(body.prompt_cache_options)
    hints = read_hints(body.prompt_cache_options)
    scope = open_responses_scope(body, raw_request, context)
    if body.background and body.store is False:
        raise UserInputError("background=true needs store=true: it is read later.", "background")
    is_private = leaves_nothing(raw_request, body)
    if is_private and (body.store or body.background):
        raise UserInputError(
            "skip_cache_insert=true (or Cache-Control: no-store) with store or background: "
            "one asks to keep nothing, the other to keep the response. Leave one of them out.",
            "skip_cache_insert",
        )
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise UserInputError(
            f"max_tool_calls={body.max_tool_calls} must be at least 1.", "max_tool_calls"
        )
    include = check_include(body.include)
    check_logprobs(body.top_logprobs, context.served_model, "top_logprobs")
    items = read_input(body.input, store.find_item)
    num_bytes = check_encodable(items, "input")
    conversation = _conversation(body, items, store)
    request = _make_answer_request(body, conversation, context)
    bypasses = hints.is_explicit and not request.task.breakpoints
    marks = with_ttl(request.task.breakpoints, hints.ttl_s)
    request = replace(request, task=replace(request.task, breakpoints=marks))
    if hints.prewarms and (bypasses or is_private):
        raise UserInputError(
            "prompt_cache_options.prewarm=true writes the prompt into the cache, and this request "
            "asks to leave nothing there: leave one of the two out.",
            "prompt_cache_options.prewarm",
        )
    ttl_s = None if bypasses else hints.ttl_s
    request = replace(
        request,
        bypasses_cache=bypasses,
        ttl_s=ttl_s,
        keeps_marked_alone=hints.is_explicit and bool(marks),
    )
    if INCLUDE_LOGPROBS in include:
        request = replace(request, top_logprobs=body.top_logprobs or 0)
    return ResponsesCall(
        scope=scope,
        # A prompt's last rows are written with the first token of an answer, which nobody sees.
        request=replace(request, max_tokens=1 if hints.prewarms else body.max_output_tokens),
        body=_first_body(body, scope, context, stores=body.store is not False and not is_private),
        input_items=items,
        num_input_bytes=num_bytes,
        seals_reasoning=INCLUDE_SEALED_REASONING in include,
        namespaces=_offered_tools(body, conversation).namespaces,
        streams=bool(body.stream),
        prewarms=hints.prewarms,
    )


def open_responses_scope(
    body: InputTokensRequest,
    raw_request: Request,
    context: ServingContext,
    without_effect: Sequence[str] = (),
) -> RequestScope:
    """Check what both routes check first. Ids are random: whoever knows one may read the response.

    Raises:
        UserInputError: A field asks for what is not served.
    """
    check_foreign(body.model_extra or {})
    check_limits(body)
    ignored = [*chat_tools(body.tools).ignored, *find_left_out(body.input), *without_effect]
    if (body.text or {}).get("verbosity") is not None:
        ignored.append("text.verbosity")
    scope = open_scope("resp_", body, raw_request, context, ignored)
    return replace(scope, response_id=f"resp_{uuid.uuid4().hex}")


def make_answer_request(
    body: InputTokensRequest, items: Sequence[Item], store: ResponseStore, context: ServingContext
) -> AnswerRequest:
    """Return what to ask of the engine.

    Args:
        body: The request.
        items: What its ``input`` holds.
        store: Has the response that it continues.
        context: The server's.

    Raises:
        UserInputError: An option is wrong.
        ResponseNotFoundError: The conversation is not stored any more.
    """
    return _make_answer_request(body, _conversation(body, items, store), context)


def _conversation(
    body: InputTokensRequest, items: Sequence[Item], store: ResponseStore
) -> list[Item]:
    """All items that the model shall see, oldest first."""
    previous = body.previous_response_id
    return [*(store.history(previous) if previous is not None else []), *items]


def _offered_tools(body: InputTokensRequest, items: Sequence[Item]) -> ChatTools:
    """The request's tools, and those that items bring."""
    tools = chat_tools(body.tools)
    for where, offer in find_offers(items):
        tools = join_tools(tools, chat_tools(offer, where))
    return tools


def _make_answer_request(
    body: InputTokensRequest, items: Sequence[Item], context: ServingContext
) -> AnswerRequest:
    messages, breakpoints, origins = make_chat(items, body.instructions)
    if not messages:
        raise UserInputError("input is empty: give at least one item.", "input")
    given = _offered_tools(body, items)
    choice, tools = chat_tool_choice(body.tool_choice, given.functions)
    specs = parse_tools(tools)
    options = ChatOptions(
        reasoning_effort=chat_effort(body.reasoning),
        template_kwargs={
            **context.args.default_chat_template_kwargs,
            **(body.chat_template_kwargs or {}),
        },
    )
    sampling = sampling_of(body, response_format=chat_response_format(body.text))
    task = ChatTask(
        messages=messages,
        options=options,
        tools=specs,
        tool_choice=parse_tool_choice(choice, specs),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        breakpoints=breakpoints,
        has_form=find_structured_field(sampling) is not None,
        origins=origins,
        num_entries=len(items),
        image_settings=body.mm_processor_kwargs,
        moves_images=True,
        cache_salt=body.cache_salt,
    )
    return AnswerRequest(task, sampling, FIELD_NAMES)


def _first_body(
    body: ResponsesRequest, scope: RequestScope, context: ServingContext, *, stores: bool
) -> ResponseBody:
    defaults = context.served_model.default_sampling
    first = ResponseBody(
        id=scope.response_id,
        created_at=unix_now(),
        model=scope.model,
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=check_metadata(body.metadata) or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        prompt_cache_options=read_cache_options(body.prompt_cache_options),
        reasoning={"effort": None, "summary": None, **(body.reasoning or {})},
        store=stores,
        temperature=_given(body.temperature, defaults.get("temperature", 1.0)),
        text={"format": {"type": "text"}, **(body.text or {})},
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=body.tools or (),
        top_logprobs=body.top_logprobs or 0,
        top_p=_given(body.top_p, defaults.get("top_p", 1.0)),
    )
    for name in ("tools", "tool_choice", "text", "reasoning", "metadata"):
        check_encodable(getattr(first, name), name)
    return first


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
