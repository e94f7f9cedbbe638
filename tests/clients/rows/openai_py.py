"""openai (Python): chats, responses, completions."""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import openai
from client import (
    ARGUMENTS,
    ASK,
    IMAGE,
    MODEL,
    SCHEMA,
    TOO_LONG,
    TURNS,
    V1,
    WORKER,
    WORKER_V1,
    Row,
    expect_overflow,
    run,
)

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
    messages: Any = [{"role": "user", "content": TOO_LONG}]
    ask = partial(client.chat.completions.create, model=MODEL, messages=messages)
    expect_overflow(row, openai.BadRequestError, ask)


def not_served(row: Row) -> None:
    try:
        client.moderations.create(model=MODEL, input="x")
    except openai.NotFoundError as error:
        assert "Moderation" in str(error)
        row.shown = "NotFoundError"
        return
    raise AssertionError("no error")


def embeddings(row: Row) -> None:
    """It asks for base64 by itself, and decodes it."""
    texts = ["One two", "three"]
    packed = client.embeddings.create(model=MODEL, input=texts).data
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float").data
    assert [item.embedding for item in packed] == [item.embedding for item in plain]
    short = client.embeddings.create(model=MODEL, input=texts[0], dimensions=16).data[0]
    assert len(short.embedding) == 16
    row.shown = f"{len(plain[0].embedding)} dimensions"


def decisions(row: Row) -> None:
    asked: Any = [
        {"type": "predicate", "instructions": "Is it red?"},
        {
            "type": "choice",
            "name": "which",
            "instructions": "Which?",
            "choices": [{"value": True}, {"value": "true", "description": "the word"}],
        },
        {"type": "score", "instructions": "How?", "levels": [{"label": "a"}, {"label": "b"}]},
    ]
    told = client.decisions.create(
        model=MODEL,
        input="A red lamp. " * 40,
        questions=asked,
        prompt_cache_options={"mode": "implicit", "ttl": "30m"},
    )
    predicate, choice, score = told.answers
    assert (predicate.type, choice.name, score.name) == ("predicate", "which", None)
    assert [entry.value for entry in choice.probabilities] == [True, "true"]
    row.cached.append(told.usage.input_tokens_details.cached_tokens)
    row.shown = f"{predicate.probability:.2f}, {choice.choice}, {score.score:.2f}"


def batch(row: Row) -> None:
    """A file up, a batch through, its results down, all of it removed."""
    lines = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": [{"role": "user", "content": f"{ASK} {i}"}]},
        }
        for i in range(3)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while made.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.1)
        made = client.batches.retrieve(made.id)
    assert made.status == "completed", made
    rows = client.files.content(made.output_file_id).text.splitlines()
    assert {json.loads(line)["custom_id"] for line in rows} == {f"line-{i}" for i in range(3)}
    assert made.id in [one.id for one in client.batches.list()]
    for name in (file.id, made.output_file_id):
        assert client.files.delete(name).deleted
    row.tokens = made.usage.output_tokens
    row.shown = f"{made.request_counts.completed} lines"


def image(row: Row) -> None:
    part: Any = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}
    chat: Any = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
    _check_refused(row, lambda: client.chat.completions.create(model=MODEL, messages=chat))
    url = f"data:image/png;base64,{IMAGE}"
    item: Any = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    _check_refused(row, lambda: client.responses.create(model=MODEL, input=[item]))


def _check_refused(row: Row, ask: Callable[[], Any]) -> None:
    try:
        ask()
    except openai.BadRequestError as error:
        assert "picture" in str(error), error
        row.shown = str(error)
        return
    raise AssertionError("no error")


def wrong_key(row: Row) -> None:
    other = openai.OpenAI(base_url=WORKER_V1, api_key="another", max_retries=0)
    try:
        other.chat.completions.create(model=WORKER, messages=[{"role": "user", "content": ASK}])
    except openai.AuthenticationError as error:
        row.shown = f"AuthenticationError: {error.code}"
        return
    raise AssertionError("no error")


def left_stream(row: Row) -> None:
    """Whoever leaves a stream is not waited for, and the next answer is whole."""
    long = "Find " * 400
    for _ in range(4):
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": long}],
            stream=True,
            extra_body={"ignore_eos": True, "min_tokens": 2000},
            max_tokens=2000,
        )
        next(iter(stream))
        stream.close()
    chat_stream(row)


def models(row: Row) -> None:
    assert client.models.retrieve(MODEL).id == MODEL
    assert MODEL in [model.id for model in client.models.list()]
    scored = client.completions.create(
        model=MODEL, prompt="One two", echo=True, max_tokens=0, logprobs=1
    )
    assert scored.choices[0].text == "One two"
    row.shown = "models, echo"


def two_systems(row: Row) -> None:
    """As opencode sends a conversation: two system messages, and two of the user's in a row."""
    messages: list[Any] = [
        {"role": "system", "content": "You are opencode. " * 40},
        {"role": "system", "content": "The folder is /home/user. " * 20},
        {"role": "user", "content": ASK},
    ]
    for _ in range(3):
        said = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=200)
        usage = said.usage
        row.cached.append(usage.prompt_tokens_details.cached_tokens)
        row.tokens += usage.completion_tokens
        messages += [
            {"role": "assistant", "content": said.choices[0].message.content or "Done."},
            {"role": "user", "content": "Go on."},
            {"role": "user", "content": ASK},
        ]
    assert row.cached[1:] == sorted(row.cached[1:]), row.cached
    assert row.cached[1] > 200, row.cached
    row.shown = f"{row.cached[-1]} tokens read"


run(
    {
        "chat, 10 turns": chat_agent,
        "opencode's two system messages": two_systems,
        "chat, streamed": chat_stream,
        "responses, 10 turns": responses_agent,
        "context overflow": context_overflow,
        "embeddings": embeddings,
        "decisions": decisions,
        "files and batches": batch,
        "what is not served": not_served,
        "image, refused": image,
        "wrong key, refused": wrong_key,
        "left streams": left_stream,
        "models, scoring": models,
    },
    "openai",
)
