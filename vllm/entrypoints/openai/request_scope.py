"""One HTTP request on its way: names, ignored fields, the jobs handed to the engine."""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from vllm.entrypoints.openai.context import GENERATION, ServingContext
from vllm.entrypoints.openai.disconnect import EventStreamResponse
from vllm.entrypoints.openai.engine_stream import EngineStream, Job
from vllm.entrypoints.openai.field_names import fields_named
from vllm.entrypoints.openai.prompts import TokenizedPrompt
from vllm.entrypoints.openai.protocol.fields import (
    IGNORED_FIELDS,
    check_extra_fields,
    ignored_fields_header,
)
from vllm.entrypoints.openai.protocol.requests import EngineRequest, SamplingRequest
from vllm.entrypoints.openai.sampling import read_options
from vllm.entrypoints.openai.session_names import find_session
from vllm.exceptions import UserInputError
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams

logger = init_logger(__name__)

_MAX_ID_CHARS = 256


@dataclass(frozen=True, slots=True)
class RequestScope:
    """What a handler knows of its request beside the body.

    Attributes:
        response_id: The ``id`` of the response.
        model: The name the response carries.
        headers: Of the response, besides the usual ones.
        raw_request: The request.
        note_gone: Counts it as one whose client left.
        session: The conversation or agent that it is of, as its client names it; None: it does not.
    """

    response_id: str
    model: str
    headers: dict[str, str]
    raw_request: Request
    note_gone: Callable[[], None]
    session: str | None = None

    def with_ignored(self, name: str) -> "RequestScope":
        """Return the same with one more field that has no effect."""
        told = self.headers.get(IGNORED_FIELDS)
        return replace(
            self, headers={**self.headers, IGNORED_FIELDS: f"{told}, {name}" if told else name}
        )

    def stream(
        self,
        events: AsyncIterator[bytes],
        on_close: Callable[[], Awaitable[None]],
        cache_status: Mapping[str, str],
    ) -> EventStreamResponse:
        """Return the response that tells events; see EventStreamResponse."""
        headers = {**self.headers, **cache_status}
        return EventStreamResponse(
            events, on_close, self.response_id, headers, on_gone=self.note_gone
        )


def open_scope(
    prefix: str,
    body: EngineRequest,
    raw_request: Request,
    context: ServingContext,
    without_effect: Sequence[str] = (),
) -> RequestScope:
    """Check what all routes check first whose answers the engine makes.

    Args:
        prefix: Of the response's id.
        body: The request.
        raw_request: The same on the wire.
        context: The server's.
        without_effect: What the caller knows to have no effect, besides the fields it does not own.

    Raises:
        ModelNotFoundError: The model is not served.
        UserInputError: A field asks for what is not served.
    """
    model = context.served_model.resolve_name(body.model)
    if GENERATION not in context.served_model.capabilities:
        raise UserInputError(
            f"The model {model!r} generates no text: its checkpoint has no output matrix. Ask for "
            f"{', '.join(context.served_model.capabilities)}.",
            "model",
        )
    ignored = [*check_extra_fields(body.model_extra, body.route), *without_effect]
    ignored += body.ignored_parts
    response_id = make_response_id(prefix, raw_request, body.request_id)
    if ignored:
        logger.debug("Request %s: ignored fields %s", response_id, ", ".join(map(repr, ignored)))
    return RequestScope(
        response_id,
        model,
        ignored_fields_header(ignored),
        raw_request,
        context.client_metrics.note_dropped,
        find_session(raw_request.headers, body),
    )


def header_request_id(scope: Scope) -> str:
    """Return the client's ``X-Request-Id``, or a new one that stays the same for the request."""
    given = Headers(scope=scope).get("x-request-id", "")[:_MAX_ID_CHARS]
    if not (given.isascii() and given.isprintable()):
        given = ""  # it goes into the log and into headers
    state: dict[str, str] = scope.setdefault("state", {})
    return given or state.setdefault("request_id", uuid.uuid4().hex)


def make_response_id(prefix: str, raw_request: Request, from_body: str | None) -> str:
    """Return the id of a response: what the client named its request, or a new name."""
    if from_body and "x-request-id" not in raw_request.headers:
        return prefix + from_body
    return prefix + header_request_id(raw_request.scope)


def header_data_parallel_rank(raw_request: Request) -> int | None:
    """Return the engine core that the client's ``X-data-parallel-rank`` names; None: any.

    Raises:
        UserInputError: It is no number.
    """
    given = raw_request.headers.get("x-data-parallel-rank")
    if given is None:
        return None
    if not (given.isascii() and given.isdigit()):
        raise UserInputError(
            f"X-data-parallel-rank: {given[:32]!r} is no rank: give a whole number, from 0.",
            "X-data-parallel-rank",
        )
    return int(given[:32])


def leaves_nothing(raw_request: Request, body: EngineRequest) -> bool:
    """Whether a request asks to leave nothing behind: by its field, or by ``Cache-Control``."""
    if body.skip_cache_insert is not None:
        return body.skip_cache_insert
    directives = raw_request.headers.get("cache-control", "").lower().split(",")
    return any(directive.strip() == "no-store" for directive in directives)


def make_stream(
    scope: RequestScope,
    body: SamplingRequest,
    prompts: list[TokenizedPrompt],
    make_params: Callable[[TokenizedPrompt], SamplingParams],
    context: ServingContext,
    field_names: Mapping[str, str],
) -> EngineStream:
    """Return the engine's answer to some prompts, not yet started.

    Args:
        scope: Of the HTTP request.
        body: The request.
        prompts: What to answer.
        make_params: How.
        context: The server's.
        field_names: From names in the engine's errors to the request's own.

    Raises:
        UserInputError: A sampling field is wrong for one of the prompts.
    """
    rank = header_data_parallel_rank(scope.raw_request)
    options = read_options(body).replace(
        data_parallel_rank=rank,
        skip_cache_insert=leaves_nothing(scope.raw_request, body),
        session_id=scope.session,
    )
    # Two clients may send the same X-Request-Id at a time; the engine's ids must differ.
    unique = uuid.uuid4().hex[:8]
    with fields_named(field_names):
        params = [make_params(prompt) for prompt in prompts]
    jobs = [
        Job(
            request_id=f"{scope.response_id}-{i}-{unique}",
            token_ids=prompt.token_ids,
            params=params[i],
            options=options.replace(
                cache_boundaries=list(prompt.cache_boundaries),
                cache_ttls=dict(prompt.cache_ttls),
                cache_insert_end=prompt.insert_end,
            ),
            images=prompt.images,
        )
        for i, prompt in enumerate(prompts)
    ]
    if context.args.enable_log_requests:
        for job, prompt in zip(jobs, prompts, strict=True):
            _log_request(job, prompt, context)
    # An error before the first output is told by a status, unless that would keep a stream silent.
    timeout_s = context.args.operations.keep_alive_s or None
    return EngineStream(
        context.engine, jobs, context.state, timeout_s if body.stream else None, field_names
    )


def _log_request(job: Job, prompt: TokenizedPrompt, context: ServingContext) -> None:
    limit = context.args.max_log_len
    text = prompt.text if prompt.text is not None else context.tokenizer.decode(prompt.token_ids)
    logger.info(
        "Received request %s: prompt: %r, num_prompt_tokens: %d, params: %s",
        job.request_id,
        text if limit is None else text[:limit],
        len(job.token_ids),
        job.params,
    )
