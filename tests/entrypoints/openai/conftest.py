"""An application over a fake engine."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tests.entrypoints.openai.fake_engine import FakeEngine
from vllm.config import VllmConfig
from vllm.entrypoints.openai.app import build_app
from vllm.entrypoints.openai.context import ServedModel, ServingContext
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.entrypoints.openai.state import ServerState
from vllm.entrypoints.pooling.plan import VectorPlan
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.parser.registry import choose_parsers
from vllm.tokenizers import Tokenizer, make_chat_encoder

SERVED_MODEL = ServedModel(
    names=("tiny", "alias"),
    root="deepseek-v4",
    max_model_len=64,
    vocab_size=2048,
    max_logprobs=20,
    is_embedded=True,
    has_priority=False,
    fingerprint="fp-1",
    created=1,
)


@dataclass
class Served:
    """An application and its parts."""

    app: FastAPI
    client: httpx.AsyncClient
    engine: FakeEngine
    state: ServerState
    context: ServingContext


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The embedded checkpoint's tokenizer."""
    return Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)


@pytest.fixture
async def serve(tokenizer: Tokenizer) -> AsyncIterator[Callable[..., Served]]:
    """Build applications; settings of the server and of the served model may be given."""
    clients: list[httpx.AsyncClient] = []

    def build(
        served_model: dict[str, Any] | None = None,
        ready: bool = True,
        config: VllmConfig | None = None,
        **args: Any,
    ) -> Served:
        state = ServerState()
        server_args = ServerArgs(**args)
        app = build_app(state, server_args, CollectorRegistry())
        engine = FakeEngine(tokenizer)
        context = ServingContext(
            served_model=replace(
                SERVED_MODEL, vocab_size=tokenizer.vocab_size, **(served_model or {})
            ),
            tokenizer=tokenizer,
            chat_encoder=make_chat_encoder({"model_type": "deepseek_v4"}, tokenizer),
            args=server_args,
            state=state,
            engine=engine,
            config=config or VllmConfig(),
            parsers=choose_parsers(
                "deepseek_v4", None, server_args.tool_call_parser, server_args.reasoning_parser
            ),
            client_metrics=app.state.client_metrics,
            vectors=VectorPlan(size=8),
        )
        app.state.context = context
        if ready:
            state.set_ready()
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://test")
        clients.append(client)
        return Served(app, client, engine, state, context)

    yield build
    for client in clients:
        await client.aclose()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """An application with default settings."""
    return serve()
