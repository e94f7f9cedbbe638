"""Agents of ten turns on a model that speaks Gemma 4's format: thoughts, calls, its end tokens."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.e2e.scripted_checkpoint import write_scripted
from tests.e2e.server_process import ServerProcess

UNIT = 32
NUM_TURNS = 10
ARGUMENTS = {"city": "Oslo", "days": 3}
# As releases end: a turn's end, and the token that opens a result, which is not the model's to say.
TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|turn>system\n{% for t in tools %}<|tool>{{ t | tojson }}<tool|>{% endfor %}"
    "<turn|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|turn>user\n"
    "response:{value:{{ m.content }}}<tool_response|><turn|>\n"
    "{% else %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.reasoning_content %}<|channel>thought\n"
    "{{ m.reasoning_content }}\n<channel|>{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ '{' }}"
    "{% for k, v in c.function.arguments.items() %}{{ ',' if not loop.first else '' }}{{ k }}:"
    '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}{% endfor %}'
    "}<tool_call|><|tool_response>{% endfor %}"
    "{% if not m.tool_calls %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
SCRIPT = {
    "\n": [
        "<|channel>",
        "thought\nI must look this up.\n",
        "<channel|>",
        "Let me see.",
        "<|tool_call>",
        'call:look{city:<|"|>Oslo<|"|>,days:3}',
        "<tool_call|>",
        "<|tool_response>",
    ],
    "turn": ["<turn|>"],
}
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]

# Nothing is left to the model but the form: one text, of quotes, breaks, braces and letters.
ODD = 'say "it\'s"\n{a:1}, [<b>] \\n \u00e9\u6f22\U0001f98a'
FIXED = {
    "type": "object",
    "properties": {"text": {"type": "string", "enum": [ODD]}},
    "required": ["text"],
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": FIXED}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("gemma4")
    write_scripted("gemma4", folder / "checkpoint", SCRIPT, TEMPLATE)
    flags = ("--served-model-name", "agent", "--max-model-len", "4096")
    environment = {"VLLM_ASCEND_REFERENCE": "0"}
    model = str(folder / "checkpoint")
    with ServerProcess(folder / "log", *flags, environment=environment, model=model) as running:
        yield running


def check_cached(cached: list[int], ends: list[int]) -> None:
    assert cached[1:] == [(end - 1) // UNIT * UNIT for end in ends[:-1]]
    assert len(cached) == NUM_TURNS


def test_openai(server: ServerProcess) -> None:
    messages: list[Any] = [{"role": "user", "content": "How is the weather? " * 8}]
    cached, ends = [], []
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        for turn in range(NUM_TURNS):
            answer = client.chat.completions.create(
                model="agent", messages=messages, tools=TOOLS, temperature=0.0
            )
            message: Any = answer.choices[0].message
            assert message.reasoning == "I must look this up."
            assert message.content == "Let me see."
            assert answer.choices[0].finish_reason == "tool_calls"
            (call,) = message.tool_calls
            assert json.loads(call.function.arguments) == ARGUMENTS
            usage: Any = answer.usage
            cached.append(usage.prompt_tokens_details.cached_tokens)
            ends.append(usage.total_tokens)
            messages += [
                message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": f"rain {turn}"},
            ]
        check_cached(cached, ends)
        # Off its script the model says anything that the grammar allows: here one text, unless it
        # thinks first, which it would do for ever.
        asked = {"model": "agent", "prompt": "<|channel>", "add_special_tokens": False}
        found = httpx.post(f"{server.url}/tokenize", json=asked, timeout=60).json()
        (channel,) = found["tokens"]
        for choice in ("required", {"type": "function", "function": {"name": "now"}}):
            forced: Any = client.chat.completions.create(
                model="agent",
                messages=[{"role": "user", "content": "What time is it?"}],
                tools=[NOW],
                tool_choice=choice,  # type: ignore[arg-type]
                max_tokens=120,
                temperature=0.0,
                logit_bias={str(channel): -100},
                parallel_tool_calls=False,
            ).choices[0]
            (call,) = forced.message.tool_calls
            assert call.function.name == "now"
            assert json.loads(call.function.arguments) == {"text": ODD}


def test_anthropic(server: ServerProcess) -> None:
    messages: list[Any] = [{"role": "user", "content": "Which weather is it? " * 8}]
    tools: Any = [{"name": "look", "description": "Looks up.", "input_schema": SCHEMA}]
    cached, ends = [], []
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        for turn in range(NUM_TURNS):
            with client.messages.stream(
                model="agent",
                messages=messages,
                tools=tools,
                max_tokens=400,
                thinking={"type": "adaptive"},
                extra_body={"temperature": 0},
            ) as stream:
                answer = stream.get_final_message()
            assert answer.stop_reason == "tool_use"
            assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
            call: Any = answer.content[-1]
            assert call.input == ARGUMENTS
            usage = answer.usage
            read = usage.cache_read_input_tokens or 0
            created = usage.cache_creation_input_tokens or 0
            cached.append(read)
            ends.append(usage.input_tokens + read + created + usage.output_tokens)
            result = {"type": "tool_result", "tool_use_id": call.id, "content": f"rain {turn}"}
            messages += [
                {
                    "role": "assistant",
                    "content": [block.to_dict(exclude_none=True) for block in answer.content],
                },
                {"role": "user", "content": [result]},
            ]
    check_cached(cached, ends)
