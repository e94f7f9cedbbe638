"""openai (Python): chats, responses, completions."""

import json
from typing import Any

import openai
from client import ARGUMENTS, ASK, MODEL, SCHEMA, TOO_LONG, TURNS, V1, Row, run

client = openai.OpenAI(base_url=V1, api_key="none", max_retries=0)
FUNCTION = {"name": "look_up", "parameters": SCHEMA}


def chat_agent(row: Row) -> None:
    messages: list[Any] = [{"role": "user", "content": ASK}]
    tools: Any = [{"type": "function", "function": FUNCTION}]
    for _ in range(TURNS):
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        message = answer.choices[0].message
        (call,) = message.tool_calls
        row.cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        row.tokens += answer.usage.completion_tokens
        assert answer.usage.completion_tokens_details.reasoning_tokens == 2
        result = row.look_up(**json.loads(call.function.arguments))
        messages += [message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": result}]
    row.check_agent()


def chat_stream(row: Row) -> None:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": ASK}],
        tools=tools,
        stream_options={"include_usage": True},
    ) as stream:
        answer = stream.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    row.tokens = answer.usage.completion_tokens
    assert row.tokens == 14
    row.shown = answer.choices[0].finish_reason


def responses_agent(row: Row) -> None:
    items: Any = [{"role": "user", "content": ASK}]
    previous = None
    for _ in range(TURNS):
        answer = client.responses.create(
            model=MODEL,
            input=items,
            previous_response_id=previous,
            tools=[{"type": "function", **FUNCTION}],
        )
        previous = answer.id
        call = answer.output[-1]
        row.cached.append(answer.usage.input_tokens_details.cached_tokens)
        row.tokens += answer.usage.output_tokens
        result = row.look_up(**json.loads(call.arguments))
        items = [{"type": "function_call_output", "call_id": call.call_id, "output": result}]
    row.check_agent()


def context_overflow(row: Row) -> None:
    try:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": TOO_LONG}]
        )
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
        row.shown = error.code
        return
    raise AssertionError("no error")


def not_served(row: Row) -> None:
    try:
        client.embeddings.create(model=MODEL, input="x")
    except openai.NotFoundError as error:
        assert "Embeddings" in str(error)
        row.shown = "NotFoundError"
        return
    raise AssertionError("no error")


def models(row: Row) -> None:
    assert client.models.retrieve(MODEL).id == MODEL
    assert MODEL in [model.id for model in client.models.list()]
    scored = client.completions.create(
        model=MODEL, prompt="One two", echo=True, max_tokens=0, logprobs=1
    )
    assert scored.choices[0].text == "One two"
    row.shown = "models, echo"


run(
    {
        "chat, 10 turns": chat_agent,
        "chat, streamed": chat_stream,
        "responses, 10 turns": responses_agent,
        "context overflow": context_overflow,
        "what is not served": not_served,
        "models, scoring": models,
    },
    "openai",
)
