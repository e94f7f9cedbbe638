"""haystack-ai: agents over both APIs, streamed and not, and a format."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from client import (
    MODEL,
    SAID,
    SCHEMA,
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
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import Tool
from haystack.utils import Secret
from openai import BadRequestError
from pydantic import BaseModel


class Reply(BaseModel):
    """An answer."""

    ok: Literal[True]


def _make(generator: Any, model: str, url: str, **fields: Any) -> Any:
    key = Secret.from_token(WORKER_KEY)
    return generator(api_key=key, model=model, api_base_url=url, max_retries=0, **fields)


def _agent(
    row: Row, generator: Any, on_chunk: Callable[[StreamingChunk], None] | None = None
) -> None:
    tool = Tool("look_up", "Looks a record up.", SCHEMA, row.look_up)
    model = _make(generator, WORKER, WORKER_V1, streaming_callback=on_chunk)
    agent = Agent(chat_generator=model, tools=[tool])
    messages = agent.run(messages=[ChatMessage.from_user("Find the records.")])["messages"]
    for message in messages:
        usage = message.meta.get("usage") or {}
        row.tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
    assert row.calls == WORKER_CALLS, row.calls
    assert messages[-1].text == SAID, messages[-1]
    row.shown = messages[-1].text


def _streamed(row: Row) -> None:
    parts: list[StreamingChunk] = []
    _agent(row, OpenAIChatGenerator, parts.append)
    assert "".join(part.content for part in parts) == SAID
    row.shown = f"{len(parts)} parts"


def _structured(row: Row) -> None:
    model = _make(OpenAIChatGenerator, MODEL, V1, generation_kwargs={"response_format": Reply})
    said = model.run(messages=[ChatMessage.from_user("Is it?")])["replies"][0].text
    row.shown = repr(Reply.model_validate_json(said))


def _overflow(row: Row) -> None:
    model = _make(OpenAIChatGenerator, MODEL, V1)
    ask = partial(model.run, messages=[ChatMessage.from_user(TOO_LONG)])
    expect_overflow(row, BadRequestError, ask)


run(
    {
        "chat, agent": lambda row: _agent(row, OpenAIChatGenerator),
        "chat, agent, streamed": _streamed,
        "responses, agent": lambda row: _agent(row, OpenAIResponsesChatGenerator),
        "structured output": _structured,
        "context overflow": _overflow,
    },
    "haystack-ai",
)
