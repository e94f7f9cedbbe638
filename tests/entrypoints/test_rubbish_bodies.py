"""Random bodies to the routes of items and of blocks: refused or answered, never a server error."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.entrypoints.openai.conftest import SERVED_MODEL
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.rubbish import json_like
from vllm.config import VllmConfig
from vllm.entrypoints.anthropic.protocol import MessagesRequest
from vllm.entrypoints.openai.app import build_app
from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.entrypoints.openai.state import ServerState
from vllm.entrypoints.pooling.plan import VectorPlan
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.parser.registry import choose_parsers
from vllm.tokenizers import Tokenizer, make_chat_encoder

WORDS = ["message", "input_text", "function", "f", "auto", "required", "adaptive", "enabled"]
WORDS += ["ephemeral", "json_schema", "object", "none", "low", "tool_use", "resp_1"]
NAMES = ["type", "role", "content", "text", "name", "parameters", "input_schema", "format"]
NAMES += ["schema", "effort", "summary", "budget_tokens", "cache_control", "ttl", "mode", "tools"]
VALUES = json_like(NAMES, WORDS)
BASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/v1/responses": ({"input": "hi"}, sorted(ResponsesRequest.model_fields)),
    "/v1/messages": (
        {"max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]},
        sorted(MessagesRequest.model_fields),
    ),
}


@pytest.fixture(scope="module")
def app() -> FastAPI:
    """An application over an engine that answers anything."""
    tokenizer = Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)
    state, args = ServerState(), ServerArgs()
    app = build_app(state, args, CollectorRegistry())
    app.state.context = ServingContext(
        served_model=SERVED_MODEL,
        tokenizer=tokenizer,
        chat_encoder=make_chat_encoder({"model_type": "deepseek_v4"}, tokenizer),
        args=args,
        state=state,
        engine=FakeEngine(tokenizer),
        config=VllmConfig(),
        parsers=choose_parsers("deepseek_v4", None),
        client_metrics=app.state.client_metrics,
        vectors=VectorPlan(size=8),
    )
    state.set_ready()
    return app


@pytest.mark.slow
@pytest.mark.parametrize("path", list(BASES))
@given(st.data())
@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_no_body_breaks_the_server(app: FastAPI, path: str, data: st.DataObject) -> None:
    base, names = BASES[path]
    fields = st.dictionaries(st.sampled_from(names), VALUES, max_size=3)
    body = {**base, **data.draw(fields)}
    # Background work would outlive this test's event loop.
    body.pop("background", None)
    answer = asyncio.run(_post(app, path, json.dumps(body)))
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


async def _post(app: FastAPI, path: str, content: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(
            path, content=content, headers={"content-type": "application/json"}
        )
