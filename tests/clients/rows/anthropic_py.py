"""anthropic (Python): messages, its tool runner, prefill."""

from typing import Any

import anthropic
from anthropic import beta_tool
from client import ASK, MODEL, RESULT, SCHEMA, TOO_LONG, TURNS, URL, Row, run

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
TOOL: Any = {"name": "look_up", "input_schema": SCHEMA}


def agent(row: Row) -> None:
    messages: list[Any] = [{"role": "user", "content": ASK}]
    for _ in range(TURNS):
        with client.messages.stream(
            model=MODEL, max_tokens=500, messages=messages, tools=[TOOL]
        ) as stream:
            answer = stream.get_final_message()
        assert answer.stop_reason == "tool_use"
        call = answer.content[-1]
        row.cached.append(answer.usage.cache_read_input_tokens)
        row.tokens += answer.usage.output_tokens
        row.look_up(**call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
        messages += [
            {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
            {"role": "user", "content": [result]},
        ]
    row.check_agent()


def tool_runner(row: Row) -> None:
    @beta_tool
    def look_up(key: str, days: int) -> str:
        """Look a record up.

        Args:
            key: Its key.
            days: How old it may be.
        """
        return row.look_up(key, days)

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=500,
        max_iterations=TURNS,
        tools=[look_up],
        messages=[{"role": "user", "content": ASK}],
    )
    for message in runner:
        row.cached.append(message.usage.cache_read_input_tokens)
        row.tokens += message.usage.output_tokens
    # The last answer's call may be left to the caller.
    row.check_agent(len(row.calls))
    assert len(row.calls) >= TURNS - 1


def context_overflow(row: Row) -> None:
    try:
        client.messages.create(
            model=MODEL, max_tokens=50, messages=[{"role": "user", "content": TOO_LONG}]
        )
    except anthropic.BadRequestError as error:
        assert "prompt is too long" in str(error)
        row.shown = "prompt is too long"
        return
    raise AssertionError("no error")


run(
    {"messages, 10 turns": agent, "tool runner": tool_runner, "context overflow": context_overflow},
    "anthropic",
)
