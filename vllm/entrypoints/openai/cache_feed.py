"""``/cache/events``: what the cache holds, for the page that shows it at work.

There only with ``--admin-api-key`` or ``VLLM_SERVER_DEV_MODE=1``.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.disconnect import EventStreamResponse
from vllm.entrypoints.openai.engine_stream import EngineClient
from vllm.entrypoints.openai.routes import Context
from vllm.entrypoints.openai.sse import with_errors_as_events
from vllm.entrypoints.openai.state import Phase
from vllm.v1.engine.questions import ViewCache

feed_router = APIRouter(tags=["development"])

PERIOD_S = 1.0
# The engine stands still for a snapshot: at most one part in so many of its time.
_TIMES_COST = 50
# How late a stream notices that the server drains.
_PATIENCE_S = 0.25


class CacheFeed:
    """Snapshots of the cache, one for all who watch.

    Owns: the last snapshot, and when the next is due.

    Args:
        clock: Monotonic seconds.
        timeout_s: How long a caller waits at most.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, timeout_s: float = _PATIENCE_S
    ) -> None:
        self._clock, self._timeout_s = clock, timeout_s
        self._lock = asyncio.Lock()
        self._due_s = -float("inf")
        self._number = 0
        self._body = b""

    async def after(self, number: int, engine: EngineClient) -> tuple[int, bytes] | None:
        """Return a later snapshot than the one of a number, as (its number, JSON).

        None if it is not due soon: ask again.

        Raises:
            EngineDeadError: There will be none.
        """
        async with self._lock:
            if self._number <= number:
                wait_s = self._due_s - self._clock()
                if wait_s > 0:
                    await asyncio.sleep(min(wait_s, self._timeout_s))
                    if self._clock() < self._due_s:
                        return None
                snapshot = await engine.ask(ViewCache())
                self._body = snapshot.body
                self._due_s = self._clock() + max(PERIOD_S, _TIMES_COST * snapshot.took_s)
                self._number += 1
            return self._number, self._body


@feed_router.get("/cache/events")
async def stream_snapshots(request: Request, context: Context) -> Response:
    """Stream snapshots of the cache as server-sent events, one a second, or fewer of a large one.

    Each has the tree of prefixes with hits, heat, idle times, holders, checkpoints and tiers, and
    the last requests. No token is in it; a prefix is known by the first bytes of its hash.
    """
    feed: CacheFeed = request.app.state.cache_feed
    events = with_errors_as_events(_snapshots(feed, context), "cache page")
    return EventStreamResponse(events, _nothing, "cache page")


async def _snapshots(feed: CacheFeed, context: ServingContext) -> AsyncIterator[bytes]:
    number = 0
    while context.state.phase is Phase.READY:
        found = await feed.after(number, context.engine)
        if found is not None:
            number, body = found
            yield b"data: " + body + b"\n\n"


async def _nothing() -> None:
    return None
