"""The server under load, and one request to it."""

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from vllm.benchmarks.client.dialects import Dialect, StreamState, error_text
from vllm.benchmarks.client.observation import Observation
from vllm.benchmarks.client.sse import EventDecoder
from vllm.benchmarks.datasets.prompt import BenchRequest
from vllm.exceptions import ConfigError

# A stuck stream must not hold a run for ever, but slow servers are measured too.
_TIMEOUT = aiohttp.ClientTimeout(total=6 * 3600)
_READ_BUFFER = 1 << 20
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask, and how.

    Attributes:
        base_url: Scheme, host and port.
        dialect: The API.
        model: Sent as "model".
        path: The route, where it is not the API's own.
        headers: Sent with every request.
        sampling: Sent in every body.
    """

    base_url: str
    dialect: Dialect
    model: str = ""
    path: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.base_url.rstrip("/") + (self.path or self.dialect.default_path)

    def all_headers(self) -> dict[str, str]:
        """Return the headers, the key of OPENAI_API_KEY among them unless one is given."""
        headers = dict(self.headers)
        key = os.environ.get("OPENAI_API_KEY")
        if key and not any(name.lower() == "authorization" for name in headers):
            headers["Authorization"] = f"Bearer {key}"
        return headers


def open_session(num_connections: int) -> aiohttp.ClientSession:
    """Return a session with that many connections at most; 0: any number."""
    return aiohttp.ClientSession(
        timeout=_TIMEOUT,
        read_bufsize=_READ_BUFFER,
        connector=aiohttp.TCPConnector(limit=num_connections, ttl_dns_cache=600),
        # The environment's proxies are for the internet, not for the server under test.
        trust_env=False,
    )


async def find_model(session: aiohttp.ClientSession, target: Target) -> tuple[str, str]:
    """Return the name and the root of the first model that is served.

    Raises:
        ConfigError: The server does not say.
    """
    url = target.base_url.rstrip("/") + "/v1/models"
    try:
        async with session.get(url, headers=target.all_headers()) as response:
            body = await response.json(content_type=None)
            first = body["data"][0]
            return str(first["id"]), str(first.get("root") or first["id"])
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{url} does not say which model is served ({type(error).__name__}: {error}): is the "
            "server up? Else give --model."
        ) from error


async def wait_ready(
    session: aiohttp.ClientSession, target: Target, request: BenchRequest, timeout_s: float
) -> None:
    """Send a request until one succeeds.

    Raises:
        ConfigError: None did in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        seen = await send(session, target, request, time.perf_counter(), "ready")
        if seen.success:
            return
        if time.monotonic() >= deadline:
            raise ConfigError(f"{target.url} did not answer in {timeout_s:g} s: {seen.error}")
        await asyncio.sleep(_RETRY_S)


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    request: BenchRequest,
    origin: float,
    request_id: str,
) -> Observation:
    """Send one request and watch its answer; failures are in the observation.

    Args:
        session: Connections.
        target: Whom to ask.
        request: What to ask.
        origin: When the run began, by ``time.perf_counter``.
        request_id: Sent as X-Request-Id.
    """
    body = {**target.dialect.body(request, target.model), **target.sampling, **request.extra_body}
    seen = Observation(
        turn=request.turn,
        num_prompt_tokens=request.num_prompt_tokens,
        num_wanted_tokens=request.num_output_tokens,
    )
    state = StreamState()
    headers = {**target.all_headers(), "X-Request-Id": request_id}
    begin = time.perf_counter()
    seen.start_s = begin - origin
    try:
        async with session.post(target.url, json=body, headers=headers) as response:
            if response.status != 200:
                seen.error = f"HTTP {response.status}: {await _error_of(response)}"
            else:
                await _watch(response, target.dialect, state, seen, begin)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    seen.latency_s = time.perf_counter() - begin
    _settle(seen, state)
    return seen


async def _watch(
    response: aiohttp.ClientResponse,
    dialect: Dialect,
    state: StreamState,
    seen: Observation,
    begin: float,
) -> None:
    decoder = EventDecoder()
    async for piece in response.content.iter_any():
        now = time.perf_counter() - begin
        for event in decoder.feed(piece):
            dialect.take(event, state)
            if state.has_tokens:
                state.num_chunks += 1
                seen.chunk_s.append(now)


async def _error_of(response: aiohttp.ClientResponse) -> str:
    text = await response.text(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        return text[:500] or str(response.reason)
    if isinstance(body, dict):
        return error_text(body.get("error") or body.get("detail") or body)
    return text[:500]


def _settle(seen: Observation, state: StreamState) -> None:
    """Take what the stream said, once it is over."""
    seen.text = "".join(state.texts)
    seen.request_id = state.request_id
    seen.usage = usage = state.usage
    seen.num_output_tokens = state.num_chunks
    if not seen.error:
        if state.error:
            seen.error = state.error
        elif not state.is_done:
            seen.error = "the stream ended before the answer did"
        elif not seen.chunk_s:
            seen.error = "the answer has no token"
    if usage.prompt_tokens is not None:
        seen.num_prompt_tokens = usage.prompt_tokens
    if usage.completion_tokens is not None:
        seen.num_output_tokens = usage.completion_tokens
    if not seen.success:
        seen.num_output_tokens = 0
