"""anthropic (Python): messages, its tool runner, prefill."""

from typing import Any

import anthropic
from anthropic import beta_tool
from client import (
    ASK,
    IMAGE,
    MODEL,
    RESULT,
    SCHEMA,
    TOO_LONG,
    TURNS,
    URL,
    URL_WORKER,
    WORKER,
    Row,
    run,
)

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


def image(row: Row) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    block: Any = {"type": "image", "source": source}
    try:
        client.messages.create(
            model=MODEL, max_tokens=50, messages=[{"role": "user", "content": [block]}]
        )
    except anthropic.BadRequestError as error:
        assert "picture" in str(error), error
        row.shown = str(error)
        return
    raise AssertionError("no error")


def wrong_key(row: Row) -> None:
    other = anthropic.Anthropic(base_url=URL_WORKER, api_key="another", max_retries=0)
    try:
        other.messages.create(
            model=WORKER, max_tokens=50, messages=[{"role": "user", "content": ASK}]
        )
    except anthropic.AuthenticationError as error:
        row.shown = str(error)
        return
    raise AssertionError("no error")


def left_stream(row: Row) -> None:
    """Whoever leaves a stream is not waited for, and the next answer is whole."""
    for _ in range(4):
        with client.messages.stream(
            model=MODEL,
            max_tokens=2000,
            messages=[{"role": "user", "content": ASK}],
            extra_body={"ignore_eos": True, "min_tokens": 2000},
        ) as stream:
            next(iter(stream))
    said = client.messages.create(
        model=MODEL, max_tokens=200, messages=[{"role": "user", "content": ASK}]
    )
    row.tokens = said.usage.output_tokens
    assert said.stop_reason == "end_turn"
    row.shown = said.content[-1].text


def refused_tool(row: Row) -> None:
    """Anthropic's own tools with a server behind them are refused by name."""
    tool: Any = {"type": "web_search_20250305", "name": "web_search"}
    try:
        client.messages.create(
            model=MODEL,
            max_tokens=50,
            messages=[{"role": "user", "content": ASK}],
            tools=[tool],
        )
    except anthropic.BadRequestError as error:
        assert "web_search" in str(error), error
        row.shown = str(error)
        return
    raise AssertionError("no error")


def billing_line(row: Row) -> None:
    """Claude Code's first block, both of its digits other in each request."""
    prompt = "You are Claude Code. " * 60
    turn: Any = {"role": "user", "content": ASK}
    late: Any = {"role": "system", "content": "Today is a Tuesday."}
    counts: set[int] = set()
    for i in range(4):
        line = (
            f"x-anthropic-billing-header: cc_version=2.1.332.{i}a{i}; cc_entrypoint=cli; "
            f"cch={i * 7919:05x};"
        )
        system: Any = [{"type": "text", "text": text} for text in (line, prompt)]
        said = client.messages.create(
            model=MODEL, max_tokens=200, system=system, messages=[turn, late]
        )
        row.cached.append(said.usage.cache_read_input_tokens)
        row.tokens += said.usage.output_tokens
        counted = client.messages.count_tokens(model=MODEL, system=system, messages=[turn, late])
        counts.add(counted.input_tokens)
    (length,) = counts
    assert min(row.cached[1:]) > length - 64, (row.cached, length)
    row.shown = f"{row.cached[-1]} of {length} tokens read"


run(
    {
        "messages, 10 turns": agent,
        "Claude Code's billing line": billing_line,
        "tool runner": tool_runner,
        "context overflow": context_overflow,
        "image, refused": image,
        "wrong key, refused": wrong_key,
        "server's tool, refused": refused_tool,
        "left streams": left_stream,
    },
    "anthropic",
)
