"""The operator's routes, there only with ``--admin-api-key`` or ``VLLM_SERVER_DEV_MODE=1``.

They change or show what other users of the server rely on, so an open server must not have them.
The operator's key guards them; without one an API key does, like any other route.
"""

import dataclasses
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from vllm import envs
from vllm.entrypoints.openai.routes import Context
from vllm.v1.engine.questions import ResetCache

dev_router = APIRouter(tags=["development"])


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body, enc_hook=str), media_type="application/json")


@dev_router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    context: Context,
    reset_running_requests: Annotated[
        bool, Query(description="Set running requests back, so that nothing holds the cache.")
    ] = False,
    reset_external: Annotated[
        bool, Query(description="Have the KV connector, if there is one, forget its prefixes too.")
    ] = False,
) -> Response:
    """Forget every cached prefix, and tell subscribers of KV events at once.

    ``success`` is false, with nothing forgotten, while requests use any of them.
    """
    success = await context.engine.ask(ResetCache(reset_running_requests, reset_external))
    return _json({"success": success})


@dev_router.get("/server_info")
async def server_info(context: Context) -> Response:
    """Show the resolved configuration and the variables that differ from their defaults."""
    config = context.config
    sections = dataclasses.asdict(config)
    if sections["cache_config"]["prefix_hash_seed"] is not None:
        sections["cache_config"]["prefix_hash_seed"] = "(hidden)"
    if sections["scheduler_config"]["tenants"] is not None:
        sections["scheduler_config"]["tenants"]["by_key"] = "(hidden)"
    variables = {name: getattr(envs, name) for name in dir(envs) if envs.is_set(name)}
    if "VLLM_API_KEY" in variables:
        variables["VLLM_API_KEY"] = "(hidden)"
    return _json({"vllm_config": sections, "environment": variables})
