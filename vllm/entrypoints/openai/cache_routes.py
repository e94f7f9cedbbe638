"""``/v1/cache``: prompts' beginnings that an operator keeps, and sessions that are over."""

import math
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.engine_stream import EngineStream, Job
from vllm.entrypoints.openai.held_prefixes import forget_held, merge_held
from vllm.entrypoints.openai.pipeline.chat_task import ChatTask, prepare_chat
from vllm.entrypoints.openai.prompts import TokenizedPrompt, tokenize_prompts
from vllm.entrypoints.openai.protocol.fields import check_extra_fields
from vllm.entrypoints.openai.protocol.requests import CachePrefixRequest, EndSessionRequest
from vllm.entrypoints.openai.routes import Context
from vllm.entrypoints.openai.session_names import check_session
from vllm.entrypoints.openai.watched_route import WatchedRoute
from vllm.exceptions import PrefixNotFoundError, UserInputError
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import ChatOptions
from vllm.tokenizers.chat_tools import parse_tool_choice, parse_tools
from vllm.v1.engine.questions import AskHeld, EndSession
from vllm.v1.messages import HeldPrefix
from vllm.v1.request_options import RequestOptions, session_number

cache_router = APIRouter(tags=["prefix cache"], route_class=WatchedRoute)

# Longest that a prefix may be held: a week, in seconds.
MAX_TTL_S = 7 * 24 * 3600.0


class PrefixBody(msgspec.Struct):
    """A kept prefix, as clients see it.

    Attributes:
        num_tokens: Tokens of it that no prompt computes again.
        expires_in: Seconds until its pin goes; absent: it has none, or one without an end.
    """

    id: str
    num_tokens: int
    pinned: bool
    num_blocks: int
    num_hits: int
    expires_in: float | msgspec.UnsetType = msgspec.UNSET
    object: str = "cache.prefix"


class PrefixList(msgspec.Struct):
    """All kept prefixes."""

    data: list[PrefixBody]
    object: str = "list"


class DeletedPrefix(msgspec.Struct):
    """Answers a deletion."""

    id: str
    deleted: bool = True
    object: str = "cache.prefix"


class EndedSession(msgspec.Struct):
    """Answers the end of a session.

    Attributes:
        id: Of the session.
        num_checkpoints: Places where only its prompts could resume, and that may go first now; of
            models whose layers all keep every token: blocks of rows.
    """

    id: str
    num_checkpoints: int
    ended: bool = True
    object: str = "cache.session"


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _describe(held: HeldPrefix) -> PrefixBody:
    expires_in = msgspec.UNSET if held.expires_in is None else round(held.expires_in, 1)
    return PrefixBody(
        held.id, held.num_tokens, held.is_pinned, held.num_blocks, held.num_hits, expires_in
    )


@cache_router.post("/v1/cache/prefixes")
async def keep_prefix(body: CachePrefixRequest, request: Request, context: Context) -> Response:
    """Compute a prefix, and keep it in the cache.

    Pinned, its blocks are reused after all others, until ``ttl`` seconds have passed; pins together
    hold at most the pinned share of the cache, the oldest giving way. Prompts that begin with it
    hit its tokens, down to a multiple of the smallest hit. Models without window caches keep
    prefixes by their last use alone.
    """
    prompt = await _tokenize(body, context)
    token_ids = prompt.token_ids
    seconds = _seconds(body)
    name = f"prefix-{uuid.uuid4().hex[:16]}"
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    num_tokens = len(token_ids)
    options = RequestOptions(
        cache_salt=body.cache_salt, cache_boundaries=[num_tokens], cache_ttls={num_tokens: seconds}
    )
    # Each of several cores keeps it: prompts that begin with it may go to any.
    jobs = [
        Job(
            f"{name}-{rank}" if rank else name,
            token_ids,
            params,
            options.replace(data_parallel_rank=rank),
            images=prompt.images,
        )
        for rank in context.engine.living_ranks
    ]
    await _compute(jobs, context)
    prefixes = (await context.engine.ask(AskHeld())).prefixes
    kept = merge_held([held for held in prefixes if held.id.startswith(f"{name}-")])
    if not kept:
        raise UserInputError(
            f"The prefix of {num_tokens} tokens is computed, but cannot be kept apart: it is too "
            "short, this model has no window caches, or the cache is full of running requests.",
            "prompt",
        )
    return _json(_describe(kept[0]))


def _seconds(body: CachePrefixRequest) -> float:
    """Return for how long to pin: 0 not at all, infinity without an end."""
    if body.ttl is not None and not 0 < body.ttl <= MAX_TTL_S:
        raise UserInputError(
            f"ttl={body.ttl} is out of range: give seconds above 0 and up to {MAX_TTL_S:.0f}, or "
            "leave it out.",
            "ttl",
        )
    if body.pin is False:
        return 0.0
    return math.inf if body.ttl is None else float(body.ttl)


async def _tokenize(body: CachePrefixRequest, context: ServingContext) -> TokenizedPrompt:
    context.served_model.resolve_name(body.model)
    check_extra_fields(body.model_extra)
    given = [value for value in (body.messages, body.prompt, body.tokens) if value is not None]
    if len(given) != 1:
        raise UserInputError("Give one of messages, prompt and tokens.", "prompt")
    if body.messages is None:
        prompts = await tokenize_prompts(
            context.tokenizer,
            given[0],
            context.served_model.vocab_size,
            True,
            workers=context.workers,
            max_tokens=context.served_model.max_prompt_tokens,
        )
        if len(prompts) != 1:
            raise UserInputError("prompt must be one text or one list of token ids.", "prompt")
        return prompts[0]
    kwargs = {**context.args.default_chat_template_kwargs, **(body.chat_template_kwargs or {})}
    options = ChatOptions(add_generation_prompt=False, template_kwargs=kwargs)
    tools = parse_tools(body.tools)
    task = ChatTask(
        body.messages,
        options,
        tools,
        parse_tool_choice(None, tools),
        image_settings=body.mm_processor_kwargs,
        cache_salt=body.cache_salt,
    )
    return (await prepare_chat(task, context)).prompt


async def _compute(jobs: Sequence[Job], context: ServingContext) -> None:
    stream = EngineStream(context.engine, jobs, context.state)
    await stream.start()
    try:
        async for _ in stream.outputs():
            pass
    finally:
        await stream.close()


@cache_router.get("/v1/cache/prefixes")
async def list_prefixes(context: Context) -> Response:
    """List the kept prefixes, the oldest first."""
    prefixes = (await context.engine.ask(AskHeld())).prefixes
    return _json(PrefixList([_describe(held) for held in merge_held(prefixes)]))


@cache_router.delete("/v1/cache/prefixes/{prefix_id}")
async def forget_prefix(
    context: Context, prefix_id: Annotated[str, Path(description="As POST gave it.")]
) -> Response:
    """Forget a prefix: its pin goes, and nothing resumes at its end any more."""
    if not await forget_held(context.engine, prefix_id):
        raise PrefixNotFoundError(f"There is no kept prefix {prefix_id[:80]!r}.", "prefix_id")
    return _json(DeletedPrefix(prefix_id))


@cache_router.post("/v1/cache/sessions/{session_id:path}/end")
async def end_session(
    context: Context,
    session_id: Annotated[str, Path(description="As requests named it.")],
    body: EndSessionRequest | None = None,
) -> Response:
    """Say that a session is over: what only its requests used is given up first.

    Nothing is evicted at once, and what other sessions used stays as it is. A session that is not
    known has nothing to give up.
    """
    check_session(session_id, "session_id")
    salt = None if body is None else body.cache_salt
    number = session_number(session_id, *context.engine.find_owner(salt))
    return _json(EndedSession(session_id, await context.engine.ask(EndSession(number))))
