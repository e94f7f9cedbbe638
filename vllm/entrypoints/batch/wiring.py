"""What ``--batch-dir`` adds to a server."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI

from vllm.entrypoints.batch.batch_service import ENDPOINTS, BatchService
from vllm.entrypoints.batch.batch_store import BatchStore
from vllm.entrypoints.batch.file_store import FileStore
from vllm.entrypoints.batch.routes import batches_router, files_router
from vllm.entrypoints.batch.sender import LineSender
from vllm.entrypoints.openai.server_args import BatchArgs
from vllm.exceptions import ConfigError

ROUTERS = (files_router, batches_router)


def add_batches(app: FastAPI, args: BatchArgs, paths: frozenset[str]) -> None:
    """Open the folder; work begins with ``app.state.batches.start``.

    Args:
        app: Gets what the routes need.
        args: Where, and how much.
        paths: That the server has.

    Raises:
        ConfigError: The folder cannot be used, or another server uses it.
    """
    assert args.folder is not None
    folder = Path(args.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Held until the process ends, however it does.
        app.state.batch_lock = lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        files = FileStore(folder, args.max_bytes)
        store = BatchStore(folder)
    except BlockingIOError:
        raise ConfigError(
            f"--batch-dir {folder}: another server uses it. Give each its own."
        ) from None
    except OSError as error:
        raise ConfigError(f"--batch-dir {folder}: {error.strerror or error}.") from error
    app.state.files = files
    app.state.batches = BatchService(files, store, args.max_concurrency)
    app.state.batch_endpoints = frozenset(ENDPOINTS) & paths


def start_batches(app: FastAPI) -> None:
    """Go on with batches, if the server has any, now that it is ready."""
    batches: BatchService | None = getattr(app.state, "batches", None)
    if batches is not None:
        batches.start(LineSender(app, app.state.inner_key))


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
