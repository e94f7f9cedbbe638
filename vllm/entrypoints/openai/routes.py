"""The routes."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response

from vllm.distributed.kv_events import offset_endpoint_port
from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.errors import HttpError
from vllm.entrypoints.openai.metrics_exchange import MetricsExchange
from vllm.entrypoints.openai.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from vllm.entrypoints.openai.protocol.responses import ModelList
from vllm.entrypoints.openai.serving_chat import create_chat_completion
from vllm.entrypoints.openai.serving_completion import create_completion
from vllm.entrypoints.openai.serving_tokenization import (
    detokenize,
    tokenize,
    tokenizer_info,
)
from vllm.entrypoints.openai.state import Phase, ServerState
from vllm.entrypoints.openai.watched_route import WatchedRoute
from vllm.version import BANNER, ENGINE_NAME, __version__

router = APIRouter(route_class=WatchedRoute)


async def _get_context(request: Request) -> ServingContext:
    context: ServingContext = request.app.state.context
    return context


Context = Annotated[ServingContext, Depends(_get_context)]


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def error_response(error: HttpError) -> Response:
    """Return a response that carries an error."""
    return Response(error.body, error.status, dict(error.headers), "application/json")


@router.post("/v1/completions", tags=["OpenAI"])
async def completions(body: CompletionRequest, request: Request, context: Context) -> Response:
    """Continue one or several prompts."""
    return await create_completion(body, request, context)


@router.post("/v1/chat/completions", tags=["OpenAI"])
async def chat_completions(
    body: ChatCompletionRequest, request: Request, context: Context
) -> Response:
    """Answer a chat."""
    return await create_chat_completion(body, request, context)


# With a slash behind it too: the next route would take it for the name of no model.
@router.get("/v1/models/", include_in_schema=False)
@router.get("/v1/models", tags=["OpenAI"])
async def list_models(context: Context) -> Response:
    """List the served names."""
    return _json(
        ModelList([context.served_model.card(name) for name in context.served_model.names])
    )


@router.get("/v1/models/{model_id:path}", tags=["OpenAI"])
async def retrieve_model(model_id: str, context: Context) -> Response:
    """Describe one served name."""
    return _json(context.served_model.card(context.served_model.resolve_name(model_id)))


@router.post("/tokenize", tags=["tokens"])
async def tokenize_route(body: TokenizeRequest, context: Context) -> Response:
    """Turn a text or a chat into token ids."""
    return _json(await tokenize(body, context))


@router.post("/detokenize", tags=["tokens"])
async def detokenize_route(body: DetokenizeRequest, context: Context) -> Response:
    """Turn token ids into text."""
    return _json(await detokenize(body, context))


@router.get("/tokenizer_info", tags=["tokens"])
async def tokenizer_info_route(context: Context) -> Response:
    """Describe the tokenizer, with --enable-tokenizer-info-endpoint."""
    return _json(tokenizer_info(context))


@router.get("/health", tags=["operations"])
async def health(request: Request) -> Response:
    """200 while the engine lives, a drain included; 503 before it serves and after it died."""
    state: ServerState = request.app.state.server
    if state.phase in (Phase.READY, Phase.DRAINING):
        return Response(status_code=200)
    return _not_serving(state)


@router.get("/ready", tags=["operations"])
async def ready(request: Request) -> Response:
    """200 while new requests are taken, else 503: starting, draining or dead."""
    state: ServerState = request.app.state.server
    return Response(status_code=200) if state.phase is Phase.READY else _not_serving(state)


def _not_serving(state: ServerState) -> Response:
    error = HttpError(503, f"The server is {state.phase.value}.", headers={"Retry-After": "1"})
    return error_response(error)


@router.get("/ping", tags=["operations"])
@router.post("/ping", tags=["operations"])
async def ping(request: Request) -> Response:
    """As /health."""
    return await health(request)


@router.get("/version", tags=["operations"])
async def version() -> Response:
    """Name this engine; it is not the vllm-project's."""
    return _json({"version": __version__, "engine": ENGINE_NAME, "description": BANNER})


@router.get("/metrics", tags=["operations"])
async def metrics(request: Request) -> Response:
    """Prometheus metrics, of all server processes where there are several."""
    registry: CollectorRegistry = request.app.state.registry
    exchange: MetricsExchange | None = request.app.state.exchange
    text = generate_latest(registry) if exchange is None else await exchange.collect()
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/kv_event_sources", tags=["operations"])
async def kv_event_sources(context: Context) -> Response:
    """Where KV events are published, as the engine was configured; none when they are off."""
    events = context.config.kv_events_config
    if events is None or not events.publishes:
        return _json({"sources": []})
    replay = events.replay_endpoint
    sources = [
        {
            "data_parallel_rank": rank,
            "publisher": events.publisher,
            "endpoint": offset_endpoint_port(events.endpoint, rank),
            "replay_endpoint": None if replay is None else offset_endpoint_port(replay, rank),
            "topic": events.topic,
        }
        for rank in range(context.config.parallel_config.data_parallel_size)
    ]
    return _json({"sources": sources})


@router.get("/load", tags=["operations"])
async def load(request: Request) -> Response:
    """Requests that have not been answered in full."""
    state: ServerState = request.app.state.server
    # This request is one of them.
    return _json({"server_load": max(0, state.num_open_requests - 1)})
