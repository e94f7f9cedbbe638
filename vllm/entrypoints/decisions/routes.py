"""The routes of decisions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.entrypoints.decisions.protocol import DecisionsRequest
from vllm.entrypoints.decisions.service import create_decision
from vllm.entrypoints.openai.routes import Context
from vllm.entrypoints.openai.watched_route import WatchedRoute

router = APIRouter(tags=["decisions"], route_class=WatchedRoute)


@router.post("/v1/systemone")
@router.post("/v1/decisions")
async def decisions(body: DecisionsRequest, request: Request, context: Context) -> Response:
    """Answer questions about one input with probabilities; nothing is generated."""
    return await create_decision(body, request, context)
