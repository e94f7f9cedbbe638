"""The routes for vectors and scores."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.entrypoints.openai.routes import Context
from vllm.entrypoints.openai.watched_route import WatchedRoute
from vllm.entrypoints.pooling.embeddings import create_embed, create_embeddings, create_pooling
from vllm.entrypoints.pooling.protocol import (
    EmbeddingRequest,
    EmbedRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from vllm.entrypoints.pooling.ranking import create_rerank, create_score

router = APIRouter(route_class=WatchedRoute, tags=["vectors and scores"])


def _json(answer: tuple[Any, dict[str, str]]) -> Response:
    body, headers = answer
    return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request, context: Context) -> Response:
    """Return a vector for each text."""
    return _json(await create_embeddings(body, request, context))


@router.post("/v2/embed")
async def embed(body: EmbedRequest, request: Request, context: Context) -> Response:
    """Return vectors, as Cohere's API has them."""
    return _json(await create_embed(body, request, context))


@router.post("/v1/pooling", include_in_schema=False)
@router.post("/pooling")
async def pooling(body: PoolingRequest, request: Request, context: Context) -> Response:
    """Return a vector for each token of each text."""
    return _json(await create_pooling(body, request, context))


@router.post("/v2/rerank")
@router.post("/v1/rerank")
@router.post("/rerank")
async def rerank(body: RerankRequest, request: Request, context: Context) -> Response:
    """Sort documents by how relevant they are to a query."""
    return _json(await create_rerank(body, request, context))


@router.post("/v1/score")
@router.post("/score")
async def score(body: ScoreRequest, request: Request, context: Context) -> Response:
    """Say how well the two texts of each pair go together."""
    return _json(await create_score(body, request, context))
