"""An application over a real engine in this process."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tests.entrypoints.openai.conftest import serve, tokenizer
from vllm.entrypoints.openai.app import build_app
from vllm.entrypoints.openai.http_server import start_context
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.entrypoints.openai.state import ServerState
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.engine_args import AsyncEngineArgs

__all__ = ["serve", "tokenizer"]  # fixtures


@dataclass(frozen=True)
class RealServer:
    """An application over a real engine."""

    client: httpx.AsyncClient
    engine: AsyncLLM


Serve = Callable[..., Awaitable[RealServer]]


@pytest.fixture
async def serve_model(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serve]:
    """Serve a model; settings of the server and the engine may be given."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    servers: list[RealServer] = []

    async def serve(
        model: str, server: dict[str, Any] | None = None, **settings: Any
    ) -> RealServer:
        args, state = ServerArgs(**(server or {})), ServerState()
        config = AsyncEngineArgs(model=model, **settings).create_vllm_config()
        tenants = config.scheduler_config.tenants
        app = build_app(state, args, CollectorRegistry(), tenants)
        engine = AsyncLLM(config)
        app.state.context = start_context(config, args, state, app.state.client_metrics)(engine)
        state.set_ready()
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)
        servers.append(RealServer(client, engine))
        return servers[-1]

    yield serve
    for server in servers:
        await server.client.aclose()
        server.engine.shutdown()
