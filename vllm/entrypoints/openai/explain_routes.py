"""Routes that ask the recorded cache; see ``dev_routes`` for who may."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from vllm.cachelab.twin.spans import spans_of
from vllm.entrypoints.openai.diagnosis.diagnoses import Diagnoses
from vllm.entrypoints.openai.errors import HttpError
from vllm.entrypoints.openai.peer_servers import PeerServers
from vllm.entrypoints.openai.routes import Context, error_response
from vllm.v1.engine.data_parallel.ranks import trace_path
from vllm.v1.messages import PrefillStats

explain_router = APIRouter(tags=["prefix cache"])

# A replay takes the memory and the time of a core: one at a time.
_ONE_AT_A_TIME = asyncio.Semaphore(1)
_EXIT_USAGE = 2


@explain_router.get("/v1/cache/explain/{request_id:path}")
async def explain(
    request_id: str,
    request: Request,
    context: Context,
    earlier: Annotated[
        str | None, Query(description="Of an earlier request: say also where the two part.")
    ] = None,
    remedies: Annotated[
        bool, Query(description="Replay the record to find what would have helped: slower.")
    ] = True,
) -> Response:
    """Say why a request hit what it hit: groups, boundary, and a reason for every missed span.

    With ``--cache-trace`` the run is replayed; of other requests nothing is told but how many
    there were, and the record's bound is how far back it goes. Without it the answer is how the
    request was admitted: where its hit came from (pool, host, disk), and the missed spans; and,
    with several cores, what the router had foretold. Both are known to the process that answered
    the request, of its last ten thousand: others ask it. ``comparison`` is with an earlier one, by
    the record or, of chats whose fingerprints are kept, by what differs in the requests.
    """
    peers: PeerServers | None = request.app.state.peers
    stats = context.engine.find_admission(request_id)
    if peers is not None and stats is None:
        if peers.has_asked(request):
            # Who asks replays the record itself, once.
            return _tell_admission(request_id, None)
        elsewhere = await peers.ask(request)
        if elsewhere is not None:
            return elsewhere
    path = context.config.observability_config.cache_trace
    if path is None:
        answer = _tell_admission(request_id, stats)
    else:
        num_cores = context.config.parallel_config.data_parallel_size
        ids = (request_id,) if earlier is None else (request_id, earlier)
        answer = await _replay(ids, path, num_cores, remedies=remedies)
    more: dict[str, Any] = {}
    foretold = context.engine.find_prediction(request_id)
    if foretold is not None:
        more["prediction"] = foretold
    if earlier is not None:
        diagnoses: Diagnoses = request.app.state.diagnoses
        kept = await diagnoses.compare_kept(earlier, request_id)
        if kept is not None:
            more["comparison"] = {"earlier": earlier, **asdict(kept)}
    if answer.status_code != 200 or not more:
        return answer
    told = {**msgspec.json.decode(bytes(answer.body)), **more}
    return Response(msgspec.json.encode(told), media_type="application/json")


def _tell_admission(request_id: str, stats: PrefillStats | None) -> Response:
    """Say what is known of a request without a record of the run."""
    if stats is None:
        message = (
            f"Nothing is known of {request_id!r}: it is too long ago, or was never here. "
            "--cache-trace FILE records requests."
        )
        return error_response(HttpError(404, message))
    told = {
        "request_id": request_id,
        "prompt_tokens": stats.num_prompt_tokens,
        "cached_tokens": stats.num_cached_tokens,
        "sources": stats.hit_sources(),
        "dense_match_tokens": stats.dense_match_tokens,
        "spans": [
            {"begin": span.begin, "end": span.end, "reason": span.reason}
            for span in spans_of(stats)
        ],
    }
    return Response(msgspec.json.encode(told), media_type="application/json")


async def _replay(ids: Sequence[str], path: str, num_cores: int, *, remedies: bool) -> Response:
    """Explain a request of a record: each core has its own, and all but one do not know it."""
    answer = Response(status_code=404)
    for rank in range(num_cores):
        answer = await _explain(ids, trace_path(path, rank), remedies=remedies)
        if answer.status_code != 404:
            break
    return answer


async def _explain(ids: Sequence[str], path: str, *, remedies: bool) -> Response:
    command = ["cache", "explain", f"--trace={path}", "--json"]
    if not remedies:
        command.append("--no-remedies")
    async with _ONE_AT_A_TIME:
        # In a process of its own: a replay would hold up the server's event loop, and reads
        # variables that may not be changed here.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vllm", *command, "--", *ids),
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
