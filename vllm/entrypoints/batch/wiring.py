"""What ``--batch-dir`` adds to a server: in one of its processes the work, in others the way there.

one process        locks the folder, works on batches, answers
several            the keeper of the processes locks it; the first works, the rest pass on to it
"""

from collections.abc import Sequence
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from vllm.entrypoints.batch.batch_service import ENDPOINTS, BatchService
from vllm.entrypoints.batch.batch_store import BatchStore
from vllm.entrypoints.batch.file_store import FileStore
from vllm.entrypoints.batch.folder_lock import BatchSeat, lock_folder
from vllm.entrypoints.batch.routes import batches_router, files_router
from vllm.entrypoints.openai.peer_servers import PeerServers
from vllm.entrypoints.openai.server_args import BatchArgs
from vllm.exceptions import ConfigError

_ROUTERS = (files_router, batches_router)


def add_batches(
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
    if not seat.works:
        return [_make_relays()]
    assert args.folder is not None
    if not seat.has_lock:
        # Held until the process ends, however it does.
        app.state.batch_lock = lock_folder(args)
    folder = Path(args.folder)
    try:
        files = FileStore(folder, args.max_bytes)
        store = BatchStore(folder)
    except OSError as error:
        raise ConfigError(f"--batch-dir {folder}: {error.strerror or error}.") from error
    app.state.files = files
    app.state.batches = BatchService(files, store, args.max_concurrency)
    app.state.batch_endpoints = frozenset(ENDPOINTS) & paths
    return _ROUTERS


def _make_relays() -> APIRouter:
    """Return the same routes, answered by the process that has the folder."""
    relays = APIRouter(tags=["files and batches"])
    for router in _ROUTERS:
        for route in router.routes:
            if isinstance(route, APIRoute):
                relays.add_api_route(
                    route.path, _relay, methods=sorted(route.methods or ()), summary=route.summary
                )
    return relays


async def _relay(request: Request) -> Response:
    peers: PeerServers = request.app.state.peers
    return await peers.ask_first(request)
