"""Agents of ten turns with tools, over each API: every turn takes up where the last one ended.

The model of ``scripted`` says the same in every turn, in the tokens of a prompt that quotes it.
"""

import itertools
import json
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message
from openai.types.responses import Response

from tests.e2e.server_process import ServerProcess

UNIT = 32
NUM_TURNS = 10
ARGUMENTS = {"key": "Bérgen 🏔", "days": 3}
SCHEMA: Any = {
    "type": "object",
    "properties": {"key": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["key", "days"],
}
RESULT = "The record holds nothing of note. "


def check_cached(cached: list[int], ends: list[int]) -> None:
    """Every turn read all full units of the turn before: prompt and answer, but the last token.

    The model computes no state for a token that it ends with.

    Args:
        cached: Cached tokens of each turn.
        ends: Prompt and answer of each turn in tokens.
    """
    assert len(cached) == NUM_TURNS
    assert cached[1:] == [(end - 1) // UNIT * UNIT for end in ends[:-1]]
    assert ends == sorted(ends)


def responses_agent(
    client: openai.OpenAI, effort: str, *, stateless: bool = False, streams: bool = False
) -> list[Response]:
    """The responses of an agent that calls its tool in every turn."""
    body: Any = {
        "model": "agent",
        # Another system prompt each time: no run may hit another's turns.
        "instructions": f"You are agent {effort} {stateless} {streams}.",
        "tools": [{"type": "function", "name": "look_up", "parameters": SCHEMA, "strict": True}],
        "reasoning": {"effort": effort},
        "temperature": 0,
        "store": not stateless,
        "include": ["reasoning.encrypted_content"] if stateless else [],
    }
    items: list[Any] = [{"role": "user", "content": "Find the record. " * 8}]
    answers: list[Response] = []
    for turn in range(NUM_TURNS):
        if not stateless and answers:
            body["previous_response_id"] = answers[-1].id
        if streams:
            with client.responses.stream(input=items, **body) as stream:
                answer: Response = stream.get_final_response()
        else:
            answer = client.responses.create(input=items, **body)
        answers.append(answer)
        assert [item.type for item in answer.output if item.type != "reasoning"] == [
            "message",
            "function_call",
        ]
        call: Any = answer.output[-1]
        assert json.loads(call.arguments) == ARGUMENTS
        output = RESULT * (turn % 3 + 1)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
        items = [*items, *_sent_back(answer), result] if stateless else [result]
    return answers


def _sent_back(answer: Response) -> list[Any]:
    """An answer's items as stateless clients send them: reasoning in its opaque form only."""
    items = [item.to_dict(exclude_none=True) for item in answer.output]
    for item in items:
        if item["type"] == "reasoning":
            assert item["encrypted_content"]
            del item["content"]
    return items


@pytest.mark.parametrize(
    ("effort", "stateless", "streams"),
    [("none", False, False), ("low", True, True), ("high", False, True)],
)
def test_responses(scripted: ServerProcess, effort: str, stateless: bool, streams: bool) -> None:
    with openai.OpenAI(base_url=scripted.url + "/v1", api_key="none", max_retries=0) as client:
        answers = responses_agent(client, effort, stateless=stateless, streams=streams)
    usages = [answer.usage for answer in answers if answer.usage is not None]
    check_cached(
        [usage.input_tokens_details.cached_tokens for usage in usages],
        [usage.total_tokens for usage in usages],
    )
    for before, usage in itertools.pairwise(usages):
        new = usage.input_tokens // UNIT - (before.total_tokens - 1) // UNIT
        assert usage.input_tokens_details.cache_write_tokens == new * UNIT
        # The words and the mark that ends them are a token each.
        assert usage.output_tokens_details.reasoning_tokens == (0 if effort == "none" else 2)
    thoughts = [item for answer in answers for item in answer.output if item.type == "reasoning"]
    assert len(thoughts) == (0 if effort == "none" else NUM_TURNS)


def messages_agent(client: anthropic.Anthropic, *, thinking: Any, streams: bool) -> list[Message]:
    """The messages of an agent that calls its tool in every turn."""
    system: Any = {"type": "text", "text": f"You are agent {thinking} {streams}."}
    body: Any = {
        "model": "agent",
        "system": [{**system, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "tools": [{"name": "look_up", "description": "Looks up.", "input_schema": SCHEMA}],
        "thinking": thinking,
        "max_tokens": 2000,
        "extra_body": {"temperature": 0},
    }
    messages: list[Any] = [{"role": "user", "content": "Find the record. " * 8}]
    answers: list[Message] = []
    for turn in range(NUM_TURNS):
        if streams:
            with client.messages.stream(messages=messages, **body) as stream:
                answer: Message = stream.get_final_message()
        else:
            answer = client.messages.create(messages=messages, **body)
        assert answer.stop_reason == "tool_use", answer
        answers.append(answer)
        call = answer.content[-1]
        assert call.type == "tool_use"
        assert call.input == ARGUMENTS
        text = {"type": "text", "text": RESULT * (turn % 3 + 1)}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [text]}
        blocks = [block.to_dict(exclude_none=True) for block in answer.content]
        messages += [
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result]},
        ]
    return answers


@pytest.mark.parametrize(
    ("thinking", "streams"),
    [
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, True),
    ],
)
def test_messages(scripted: ServerProcess, thinking: Any, streams: bool) -> None:
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as client:
        answers = messages_agent(client, thinking=thinking, streams=streams)
    prompts = [_prompt_tokens(answer) for answer in answers]
    ends = [p + answer.usage.output_tokens for p, answer in zip(prompts, answers, strict=True)]
    check_cached([answer.usage.cache_read_input_tokens or 0 for answer in answers], ends)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.usage.input_tokens == prompt % UNIT  # all full units are kept
        first: Any = answer.content[0]
        if thinking["type"] == "disabled":
            assert first.type == "text"
        else:
            assert first.thinking == ("" if "display" in thinking else "I look it up.")


def _prompt_tokens(answer: Message) -> int:
    usage = answer.usage
    read, created = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    return usage.input_tokens + (read or 0) + (created or 0)
