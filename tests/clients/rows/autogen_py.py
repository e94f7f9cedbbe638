"""autogen: an agent over chat completions, streamed and not, and a format."""

import asyncio
from typing import Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from client import (
    MODEL,
    SAID,
    TOO_LONG,
    V1,
    WORKER,
    WORKER_CALLS,
    WORKER_KEY,
    WORKER_V1,
    Row,
    expect_overflow,
    run,
)
from openai import BadRequestError
from pydantic import BaseModel


class Reply(BaseModel):
    """An answer."""

    ok: Literal[True]


def _make(model: str, url: str) -> OpenAIChatCompletionClient:
    info = {"vision": False, "function_calling": True, "json_output": True}
    info |= {"structured_output": True, "family": "unknown"}
    return OpenAIChatCompletionClient(
        model=model, base_url=url, api_key=WORKER_KEY, model_info=info, max_retries=0
    )


def _agent(row: Row, is_streamed: bool) -> None:
    async def look_up(key: str, days: int) -> str:
        """Look a record up."""
        return row.look_up(key, days)

    async def go() -> TaskResult:
        model = _make(WORKER, WORKER_V1)
        agent = AssistantAgent(
            "finder",
            model_client=model,
            tools=[look_up],
            max_tool_iterations=5,
            model_client_stream=is_streamed,
        )
        async for event in agent.run_stream(task="Find the records."):
            last = event
        row.tokens = model.total_usage().completion_tokens
        return last

    said = asyncio.run(go()).messages[-1].content
    assert row.calls == WORKER_CALLS, row.calls
    assert said == SAID, said
    row.shown = said


def _structured(row: Row) -> None:
    asked = _make(MODEL, V1).create([UserMessage(content="Is it?", source="me")], json_output=Reply)
    row.shown = repr(Reply.model_validate_json(asyncio.run(asked).content))


def _overflow(row: Row) -> None:
    asked = _make(MODEL, V1).create([UserMessage(content=TOO_LONG, source="me")])
    expect_overflow(row, BadRequestError, lambda: asyncio.run(asked))


run(
    {
        "agent": lambda row: _agent(row, False),
        "agent, streamed": lambda row: _agent(row, True),
        "structured output": _structured,
        "context overflow": _overflow,
    },
    "autogen-agentchat",
)
