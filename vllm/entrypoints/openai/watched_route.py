"""Routes whose work ends when their client leaves, and that read large bodies quickly."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope

from vllm.entrypoints.openai.disconnect import ClientGoneError, until_disconnect

# Above this, the event loop would notice that json is several times slower than msgspec.
_LARGE_BODY_BYTES = 256 * 1024


class WatchedRoute(APIRoute):
    """A route that checks, prepares and answers only as long as its client is there.

    The answer's own stream is watched by its response.

    Owns: the turns in which large bodies are read.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request.

        It raises ClientGoneError if the client left before the answer began, in its body too.
        """
        answer = super().get_route_handler()
        turns = asyncio.Lock()

        async def answer_while_watched(request: Request) -> Response:
            request = _Request(request.scope, request.receive, turns)
            # Behind the body nothing comes but the client's end.
            try:
                await request.body()
            except ClientDisconnect as error:
                raise ClientGoneError from error
            return await until_disconnect(request.receive, answer(request))

        return answer_while_watched


class _Request(Request):
    """A request whose body, if it is large, does not keep the event loop busy for long.

    Args:
        scope: Of the connection.
        receive: Likewise.
        turns: Large bodies are read one by one, and what else waits goes between them.
    """

    def __init__(self, scope: Scope, receive: Receive, turns: asyncio.Lock) -> None:
        super().__init__(scope, receive)
        self._turns = turns

    async def json(self) -> Any:
        body = await self.body()
        if len(body) < _LARGE_BODY_BYTES:
            return await super().json()
        async with self._turns:
            # Whoever is next comes in the loop's next round, behind those that are ready now.
            await asyncio.sleep(0)
            try:
                return msgspec.json.decode(body)
            except (msgspec.DecodeError, RecursionError):
                # What json alone takes, such as NaN, and its words for what it does not.
                return json.loads(body)
