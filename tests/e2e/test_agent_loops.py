"""Agents of ten turns with tools, over each API: every turn takes up where the last one ended.

Calls are forced by grammar, so nothing here depends on what the model would like to say.
"""

import itertools
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message
from openai.types.responses import Response

from tests.e2e.server_process import ServerProcess

MODEL = "deepseek-v4"
UNIT = 32
NUM_TURNS = 10
SCHEMA: Any = {
    "type": "object",
    # Every value is short, or this small model might never end one.
    "properties": {"key": {"type": "string", "maxLength": 8}, "deep": {"type": "boolean"}},
    "required": ["key", "deep"],
    "additionalProperties": False,
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
    tool = {"type": "function", "name": "look_up", "parameters": SCHEMA, "strict": True}
    body: Any = {
        "model": MODEL,
        "instructions": f"You are agent {effort} {stateless} {streams}. Look things up.",
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "look_up"},
        "reasoning": {"effort": effort},
        "max_output_tokens": 300,
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
        call = answer.output[-1]
        assert call.type == "function_call", answer
        result = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": RESULT * (turn % 3 + 1),
        }
        items = [*items, *_sent_back(answer), result] if stateless else [result]
    return answers


def _sent_back(answer: Response) -> list[Any]:
    """An answer's items without what stateless clients leave out."""
    return [item.to_dict(exclude_none=True) for item in answer.output]


@pytest.mark.parametrize(
    ("effort", "stateless", "streams"),
    [("none", False, False), ("low", True, True), ("low", False, True)],
)
def test_responses(client: openai.OpenAI, effort: str, stateless: bool, streams: bool) -> None:
    answers = responses_agent(client, effort, stateless=stateless, streams=streams)
    usages = [answer.usage for answer in answers if answer.usage is not None]
    check_cached(
        [usage.input_tokens_details.cached_tokens for usage in usages],
        [usage.total_tokens for usage in usages],
    )
    for before, usage in itertools.pairwise(usages):
        written = usage.input_tokens_details.cache_write_tokens
        assert (
            written == usage.input_tokens // UNIT * UNIT - (before.total_tokens - 1) // UNIT * UNIT
        )


def messages_agent(client: anthropic.Anthropic, *, thinks: bool, streams: bool) -> list[Message]:
    """The messages of an agent that calls its tool in every turn."""
    system: Any = {"type": "text", "text": f"You are agent {thinks} {streams}. Look things up."}
    body: Any = {
        "model": MODEL,
        "system": [{**system, "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "look_up", "description": "Looks up.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "look_up"},
        "thinking": {"type": "adaptive"} if thinks else {"type": "disabled"},
        "max_tokens": 300,
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
        text = {"type": "text", "text": RESULT * (turn % 3 + 1)}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [text]}
        blocks = [block.to_dict() for block in answer.content]
        messages += [
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result]},
        ]
    return answers


@pytest.mark.parametrize(("thinks", "streams"), [(False, False), (True, True)])
def test_messages(server: ServerProcess, thinks: bool, streams: bool) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        answers = messages_agent(client, thinks=thinks, streams=streams)
    prompts = [_prompt_tokens(answer) for answer in answers]
    ends = [p + answer.usage.output_tokens for p, answer in zip(prompts, answers, strict=True)]
    check_cached([answer.usage.cache_read_input_tokens or 0 for answer in answers], ends)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.usage.input_tokens == prompt % UNIT  # all full units are kept


def _prompt_tokens(answer: Message) -> int:
    usage = answer.usage
    read, created = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    return usage.input_tokens + (read or 0) + (created or 0)
