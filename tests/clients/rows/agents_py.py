"""openai-agents: ten turns over both APIs, and output types."""

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded
from client import ASK, MODEL, TURNS, V1, Row, run
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Reply(BaseModel):
    """An answer."""

    ok: Literal[True]


def _run(row: Row, model_class: Any, output_type: Any, turns: int = TURNS) -> Any:
    @function_tool
    def look_up(key: str, days: int) -> str:
        """Look a record up."""
        return row.look_up(key, days)

    @function_tool
    def find(key: Literal["Oslo", "Bergen"]) -> str:
        """Find a record. A free text might have no end: no word of this model's fits here."""
        return row.look_up(key, 3)

    async def go() -> Any:
        client = AsyncOpenAI(base_url=V1, api_key="none", max_retries=0)
        agent = Agent(
            name="a",
            instructions="Look it up.",
            model=model_class(model=MODEL, openai_client=client),
            tools=[look_up if output_type is None else find],
            output_type=output_type,
            model_settings=ModelSettings(max_tokens=2000),
        )
        return await Runner.run(agent, ASK, max_turns=turns)

    return asyncio.run(go())


def _agent(row: Row, model_class: Any, output_type: Any = None) -> None:
    try:
        _run(row, model_class, output_type)
    except MaxTurnsExceeded:
        row.check_agent(len(row.calls))
        assert len(row.calls) >= TURNS - 1
        return
    raise AssertionError("it ended")


def _typed(row: Row, model_class: Any) -> None:
    """The model may call, or answer in the type: whichever it does follows its grammar."""
    try:
        made = _run(row, model_class, Reply, 3)
        assert made.final_output == Reply(ok=True)
        row.shown = repr(made.final_output)
    except MaxTurnsExceeded:
        assert row.calls
        row.shown = f"{len(row.calls)} calls"


run(
    {
        "chat, 10 turns": lambda row: _agent(row, OpenAIChatCompletionsModel),
        "responses, 10 turns": lambda row: _agent(row, OpenAIResponsesModel),
        "chat, tools and output_type": lambda row: _typed(row, OpenAIChatCompletionsModel),
        "responses, tools and output_type": lambda row: _typed(row, OpenAIResponsesModel),
    },
    "openai-agents",
)
