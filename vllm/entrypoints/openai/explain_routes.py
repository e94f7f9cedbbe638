"""Routes that ask the recorded cache; see ``dev_routes`` for who may."""

import asyncio
import sys
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from vllm.entrypoints.openai.errors import HttpError
from vllm.entrypoints.openai.routes import Context, error_response
from vllm.v1.engine.data_parallel.ranks import trace_path

explain_router = APIRouter(tags=["prefix cache"])

# A replay takes the memory and the time of a core: one at a time.
_ONE_AT_A_TIME = asyncio.Semaphore(1)
_EXIT_USAGE = 2


@explain_router.get("/v1/cache/explain/{request_id:path}")
async def explain(
    request_id: str,
    context: Context,
    remedies: Annotated[
        bool, Query(description="Replay the record to find what would have helped: slower.")
    ] = True,
) -> Response:
    """Say why a request hit what it hit: groups, boundary, and a reason for every missed span.

    Of other requests nothing is told but how many there were. Needs ``--cache-trace``; the
    record's bound is how far back it goes.
    """
    path = context.config.observability_config.cache_trace
    if path is None:
        return error_response(
            HttpError(404, "Nothing is recorded: start the server with --cache-trace FILE.")
        )
    answer = Response(status_code=404)
    for rank in range(context.config.parallel_config.data_parallel_size):
        # Each core has a record of its own; all but one of them do not know the request.
        answer = await _explain(request_id, trace_path(path, rank), remedies=remedies)
        if answer.status_code != 404:
            break
    return answer


async def _explain(request_id: str, path: str, *, remedies: bool) -> Response:
    command = ["cache", "explain", f"--trace={path}", "--json"]
    if not remedies:
        command.append("--no-remedies")
    async with _ONE_AT_A_TIME:
        # In a process of its own: a replay would hold up the server's event loop, and reads
        # variables that may not be changed here.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vllm", *command, "--", request_id),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
    if process.returncode == 0:
        return Response(out.strip().splitlines()[-1], media_type="application/json")
    lines = err.decode(errors="replace").strip().splitlines()
    message = lines[-1].partition("error: ")[2] if lines else ""
    status = 404 if process.returncode == _EXIT_USAGE else 500
    return error_response(HttpError(status, message or "The record could not be replayed."))
