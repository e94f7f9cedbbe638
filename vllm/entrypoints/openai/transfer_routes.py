"""``/abort_requests``: what a prefill server holds for a request that will not be decoded."""

from fastapi import APIRouter
from starlette.responses import Response

from vllm.entrypoints.openai.protocol.requests import AbortHeldRequest
from vllm.entrypoints.openai.routes import Context
from vllm.exceptions import UserInputError

transfer_router = APIRouter(tags=["prefill apart from decode"])

_MAX_IDS = 1024


@transfer_router.post("/abort_requests")
async def abort_requests(body: AbortHeldRequest, context: Context) -> Response:
    """Let go of held prompts, by the ``remote_request_id`` in their ``kv_transfer_params``.

    For proxies: the decode server refused the request, or its client left before it was sent
    there. What is loaded already, or not known, is left alone.
    """
    if not context.served_model.has_kv_transfer:
        raise UserInputError(
            "This server holds no prompts for others: it was started without --kv-transfer-config."
        )
    if len(body.request_ids) > _MAX_IDS:
        raise UserInputError(
            f"request_ids has {len(body.request_ids)} entries: send at most {_MAX_IDS} at a time.",
            "request_ids",
        )
    context.engine.withdraw_prefixes(body.request_ids)
    return Response(status_code=200)
