"""Sends a batch's lines through the server's own application, without a socket."""

from typing import Any

import httpx
from starlette.types import ASGIApp

from vllm.entrypoints.batch.batch_service import Reply
from vllm.entrypoints.batch.lines import BatchRequest
from vllm.entrypoints.openai.api_keys import InnerKey

_RESPONSES = "/v1/responses"


class LineSender:
    """Answers lines as if their owners had sent them; see ``Send``.

    Owns: the client.

    Args:
        app: The application, middleware included.
        key: Opens it to this server alone.
    """

    def __init__(self, app: ASGIApp, key: InnerKey) -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None)
        self._key = key

    async def __call__(self, request: BatchRequest, owner: str | None) -> Reply:
        """Return the answer."""
        body = dict(request.body)
        if request.url == _RESPONSES:
            # A file of them would push others' responses out of the store.
            body.setdefault("store", False)
        response = await self._client.post(request.url, json=body, headers=self._key.headers(owner))
        try:
            content: Any = response.json()
        except ValueError:
            content = response.text
        retry_after = response.headers.get("retry-after", "")
        return Reply(
            response.status_code,
            response.headers.get("x-request-id", ""),
            content,
            float(retry_after) if retry_after.isdecimal() else 1.0,
        )
