"""Asking a live server for an explanation."""

import asyncio
from typing import Any
from urllib.parse import quote

import aiohttp

from vllm.exceptions import ConfigError

_TIMEOUT = aiohttp.ClientTimeout(total=600)


def fetch_explanation(
    url: str, request_id: str, api_key: str | None, earlier_id: str | None = None
) -> dict[str, Any]:
    """Return what ``GET /v1/cache/explain/{request_id}`` says, compared with an earlier one.

    Raises:
        ConfigError: The server does not answer, or refuses.
    """
    place = f"{url.rstrip('/')}/v1/cache/explain/{quote(request_id, safe='')}"
    if earlier_id is not None:
        place += f"?earlier={quote(earlier_id, safe='')}"
    return asyncio.run(_fetch(place, api_key))


async def _fetch(place: str, api_key: str | None) -> dict[str, Any]:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, trust_env=False) as session,
            session.get(place, headers=headers) as response,
        ):
            body = await response.json(content_type=None)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ConfigError(f"{place} does not answer ({error}): is the server up?") from error
    if response.status != 200 or not isinstance(body, dict):
        told = body.get("error", body) if isinstance(body, dict) else body
        message = told.get("message", told) if isinstance(told, dict) else told
        raise ConfigError(
            f"{place} answers {response.status}: {message} (the route is there with "
            "VLLM_SERVER_DEV_MODE=1)"
        )
    return body
