"""huggingface_hub's InferenceClient, which names no model where its user does not."""

import json
from typing import Any

from client import ASK, SCHEMA, TURNS, V1, Row, run
from huggingface_hub import InferenceClient

CLIENT = InferenceClient(base_url=V1, api_key="none")
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]
REPLY = {
    "type": "object",
    "properties": {"ok": {"const": True}},
    "required": ["ok"],
    "additionalProperties": False,
}


def agent(row: Row) -> None:
    messages: list[Any] = [{"role": "user", "content": ASK}]
    for _ in range(TURNS):
        answer = CLIENT.chat_completion(messages, tools=TOOLS, max_tokens=200)
        message = answer.choices[0].message
        (call,) = message.tool_calls
        row.cached.append(answer.usage.prompt_tokens_details["cached_tokens"])
        row.tokens += answer.usage.completion_tokens
        result = row.look_up(**json.loads(call.function.arguments))
        made = {"name": call.function.name, "arguments": call.function.arguments}
        messages += [
            {
                "role": "assistant",
                "content": message.content,
                "tool_calls": [{"id": call.id, "type": "function", "function": made}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
    row.check_agent()


def streamed(row: Row) -> None:
    arguments = ""
    for chunk in CLIENT.chat_completion(
        [{"role": "user", "content": ASK}],
        tools=TOOLS,
        max_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.usage:
            row.tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            arguments += "".join(c.function.arguments or "" for c in choice.delta.tool_calls or ())
    row.look_up(**json.loads(arguments))
    row.check_agent(1)


def _formed(row: Row, form: Any) -> None:
    question = [{"role": "user", "content": "Is it?"}]
    answer = CLIENT.chat_completion(question, response_format=form, max_tokens=100)
    row.tokens = answer.usage.completion_tokens
    row.shown = str(json.loads(answer.choices[0].message.content or ""))
    assert row.shown == "{'ok': True}"


run(
    {
        "chat, 10 turns": agent,
        "chat, streamed": streamed,
        "json_object with a schema": lambda row: _formed(
            row, {"type": "json_object", "value": REPLY}
        ),
        "json_schema": lambda row: _formed(
            row, {"type": "json_schema", "json_schema": {"name": "reply", "schema": REPLY}}
        ),
    },
    "huggingface_hub",
)
