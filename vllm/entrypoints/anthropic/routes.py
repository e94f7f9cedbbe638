"""The routes of the Messages API."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from vllm.entrypoints.anthropic.serving import count_tokens, create_message
from vllm.entrypoints.openai.routes import Context
from vllm.entrypoints.openai.watched_route import WatchedRoute

router = APIRouter(tags=["Anthropic"], route_class=WatchedRoute)


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request, context: Context) -> Response:
    """Answer a conversation of content blocks."""
    return await create_message(body, request, context)


@router.post("/v1/messages/count_tokens")
async def count_tokens_route(
    body: CountTokensRequest, request: Request, context: Context
) -> Response:
    """Count the tokens of a prompt."""
    return await count_tokens(body, request, context)
