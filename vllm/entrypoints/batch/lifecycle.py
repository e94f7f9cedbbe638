"""When a server's batches begin and end; one without ``--batch-dir`` loads nothing else of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI

from vllm.entrypoints.batch.folder_lock import BatchSeat
from vllm.entrypoints.openai.server_args import BatchArgs

if TYPE_CHECKING:
    from vllm.entrypoints.batch.batch_service import BatchService

_WIRING = "vllm.entrypoints.batch.wiring"
_SENDER = "vllm.entrypoints.batch.sender"


def open_batches(
    app: FastAPI, args: BatchArgs, paths: frozenset[str], seat: BatchSeat
) -> Sequence[APIRouter]:
    """Open the folder, and return the routes; work begins with ``start_batches``.

    Args:
        app: Gets what the routes need.
        args: Where, and how much.
        paths: That the server has.
        seat: Of this process.

    Raises:
        ConfigError: The folder cannot be used, or another server uses it.
    """
    routers: Sequence[APIRouter] = import_module(_WIRING).add_batches(app, args, paths, seat)
    return routers


def start_batches(app: FastAPI) -> None:
    """Go on with batches, if the server has any, now that it is ready."""
    batches: BatchService | None = getattr(app.state, "batches", None)
    if batches is not None:
        batches.start(import_module(_SENDER).LineSender(app, app.state.inner_key))


@contextlib.asynccontextmanager
async def batches_stopped(app: FastAPI, stop: asyncio.Event) -> AsyncIterator[None]:
    """Leave batches as they are when a server is told to stop, and at the block's end."""
    batches: BatchService | None = getattr(app.state, "batches", None)
    if batches is None:
        yield
        return

    async def stop_early() -> None:
        # A drain waits for clients; lines begin again at the next start.
        await stop.wait()
        await batches.stop()

    stopping = asyncio.create_task(stop_early())
    try:
        yield
    finally:
        stopping.cancel()
        await batches.stop()
