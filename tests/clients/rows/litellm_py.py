"""litellm: OpenAI's and Anthropic's routes, a full context."""

import json
from typing import Any

import litellm
from client import ASK, MODEL, SCHEMA, TOO_LONG, TURNS, URL, V1, Row, run

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]


def agent(row: Row) -> None:
    messages: list[Any] = [{"role": "user", "content": ASK}]
    for _ in range(TURNS):
        answer = litellm.completion(
            model=f"openai/{MODEL}", api_base=V1, api_key="none", messages=messages, tools=TOOLS
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls
        row.cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        row.tokens += answer.usage.completion_tokens
        result = row.look_up(**json.loads(call.function.arguments))
        messages += [message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": result}]
    row.check_agent()


def _overflow(row: Row, **fields: Any) -> None:
    try:
        litellm.completion(
            api_key="none",
            messages=[{"role": "user", "content": TOO_LONG}],
            max_tokens=20,
            **fields,
        )
    except litellm.ContextWindowExceededError:
        row.shown = "ContextWindowExceededError"
        return
    raise AssertionError("no error")


run(
    {
        "chat, 10 turns": agent,
        "context overflow": lambda row: _overflow(row, model=f"openai/{MODEL}", api_base=V1),
        "context overflow, messages": lambda row: _overflow(
            row, model=f"anthropic/{MODEL}", api_base=URL
        ),
    },
    "litellm",
)
