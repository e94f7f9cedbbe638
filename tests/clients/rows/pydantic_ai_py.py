"""pydantic-ai: ten turns over three APIs, and typed outputs."""

from typing import Any, Literal

from client import ASK, MODEL, TURNS, URL, V1, Row, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits


class Reply(BaseModel):
    """An answer."""

    ok: Literal[True]


def _openai() -> Any:
    return OpenAIProvider(base_url=V1, api_key="none")


def _agent(row: Row, model: Any) -> None:
    agent = Agent(model)
    agent.tool_plain(row.look_up)
    try:
        agent.run_sync(ASK, usage_limits=UsageLimits(request_limit=TURNS))
    except UsageLimitExceeded:
        row.check_agent()
        return
    raise AssertionError("it ended")


def _typed(row: Row) -> None:
    agent = Agent(OpenAIChatModel(MODEL, provider=_openai()), output_type=NativeOutput(Reply))
    made = agent.run_sync("Is it?")
    assert made.output == Reply(ok=True)
    row.shown = repr(made.output)


def _typed_by_tool(row: Row) -> None:
    agent = Agent(OpenAIChatModel(MODEL, provider=_openai()), output_type=Reply)
    made = agent.run_sync("Is it?")
    assert made.output == Reply(ok=True)
    row.shown = repr(made.output)


run(
    {
        "chat, 10 turns": lambda row: _agent(row, OpenAIChatModel(MODEL, provider=_openai())),
        "responses, 10 turns": lambda row: _agent(
            row, OpenAIResponsesModel(MODEL, provider=_openai())
        ),
        "messages, 10 turns": lambda row: _agent(
            row,
            AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")),
        ),
        "native output": _typed,
        "output by a tool": _typed_by_tool,
    },
    "pydantic-ai-slim",
)
