"""The routes of ``/v1/responses``."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from vllm.entrypoints.openai.peer_servers import PeerServers
from vllm.entrypoints.openai.responses.protocol import InputTokensRequest, ResponsesRequest
from vllm.entrypoints.openai.responses.service import ResponsesService
from vllm.entrypoints.openai.routes import Context
from vllm.entrypoints.openai.watched_route import WatchedRoute

router = APIRouter(tags=["OpenAI"], route_class=WatchedRoute)


async def _get_service(request: Request) -> ResponsesService:
    service: ResponsesService = request.app.state.responses
    return service


Service = Annotated[ResponsesService, Depends(_get_service)]


async def _ask_peers(
    request: Request, service: ResponsesService, name: str | None
) -> Response | None:
    """Have another server process answer that keeps a response, if any; None: this one shall."""
    peers: PeerServers | None = request.app.state.peers
    if peers is None or name is None or service.knows(name):
        return None
    return await peers.ask(request)


@router.post("/v1/responses")
async def create_response(
    body: ResponsesRequest, request: Request, context: Context, service: Service
) -> Response:
    """Answer items, or go on with a stored conversation."""
    elsewhere = await _ask_peers(request, service, body.previous_response_id)
    return elsewhere or await service.create(body, request, context)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(
    body: InputTokensRequest, request: Request, context: Context, service: Service
) -> Response:
    """Count the tokens of a prompt."""
    elsewhere = await _ask_peers(request, service, body.previous_response_id)
    return elsewhere or await service.count_input_tokens(body, request, context)


@router.get("/v1/responses/{response_id}")
async def retrieve_response(
    response_id: str,
    request: Request,
    service: Service,
    stream: bool = False,
    starting_after: int = -1,
) -> Response:
    """Return a stored response, or the events of a background response."""
    elsewhere = await _ask_peers(request, service, response_id)
    return elsewhere or service.retrieve(
        response_id, stream=stream, starting_after=max(starting_after, -1)
    )


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request, service: Service) -> Response:
    """Forget a response."""
    elsewhere = await _ask_peers(request, service, response_id)
    return elsewhere or await service.delete(response_id)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request, service: Service) -> Response:
    """Stop a background response."""
    elsewhere = await _ask_peers(request, service, response_id)
    return elsewhere or await service.cancel(response_id)


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    request: Request,
    service: Service,
    limit: int = 20,
    order: str = "desc",
    after: str | None = None,
    include: Annotated[list[str] | None, Query()] = None,
) -> Response:
    """List what a response was asked; pictures themselves only if ``include`` names them."""
    elsewhere = await _ask_peers(request, service, response_id)
    return elsewhere or service.list_input_items(
        response_id, limit=limit, order=order, after=after, include=include or ()
    )
