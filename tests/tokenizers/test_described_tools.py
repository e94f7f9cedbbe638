"""Tools for templates that know of none."""

import json
from typing import Any

from tests.tokenizers.family_tokenizers import byte_level
from vllm.parser.written_calls import CALL_WRITERS
from vllm.tokenizers.chat_messages import ChatOptions
from vllm.tokenizers.chat_template import JinjaChatEncoder
from vllm.tokenizers.chat_tools import parse_tools

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN
# As Gemma's: no system texts, and turns that alternate.
STRICT = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] or "
    "(m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
)
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"unit": {"enum": ["c", "f"]}, "city": {"type": "string"}},
        "required": ["city"],
    },
}
TOOLS = parse_tools([{"type": "function", "function": TOOL}])
CALL = {"id": "c1", "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}  # fmt: skip
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Rome?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "20 degrees"},
]
WRITTEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def render(template: str, chat: list[dict[str, Any]], tools: Any = TOOLS, **options: Any) -> str:
    encoder = JinjaChatEncoder(byte_level(), template, write_calls=CALL_WRITERS["hermes"])
    return encoder.encode_chat(chat, ChatOptions(tools=tools, **options)).text


def test_a_template_that_shows_tools_is_left_alone() -> None:
    encoder = JinjaChatEncoder(byte_level(), WITH_TOOLS, write_calls=CALL_WRITERS["hermes"])
    assert not encoder.ignores_tools
    shown = render(WITH_TOOLS, CHAT[:2])
    assert shown == JinjaChatEncoder(byte_level(), WITH_TOOLS).encode_chat(
        CHAT[:2], ChatOptions(tools=TOOLS)
    ).text  # fmt: skip
    assert "functions" not in shown


def test_tools_calls_and_results_stand_in_the_prompt() -> None:
    assert JinjaChatEncoder(byte_level(), PLAIN).ignores_tools
    shown = render(PLAIN, CHAT)
    system, user, call, result, opened = shown.split("<|")[1:]
    assert system.startswith("system|>Be brief.\n\nYou can call these functions:")
    assert json.dumps(TOOL) in system
    # The example is a call of the first function with what it needs.
    assert '{"name": "get_weather", "arguments": {"city": "..."}}' in system
    assert user == "user|>Weather in Rome?\n"
    assert call == f"assistant|>{WRITTEN}\n"
    assert result == "user|>Result of get_weather:\n20 degrees\n"
    assert opened == "assistant|>"


def test_without_a_writer_nothing_is_told() -> None:
    encoder = JinjaChatEncoder(byte_level(), PLAIN)
    shown = encoder.encode_chat(CHAT[:2], ChatOptions(tools=TOOLS)).text
    assert "get_weather" not in shown


def test_without_tools_a_chat_is_as_before() -> None:
    plain = JinjaChatEncoder(byte_level(), PLAIN).encode_chat(CHAT[:2], ChatOptions()).text
    assert render(PLAIN, CHAT[:2], tools=()) == plain


def test_templates_without_system_texts_get_them_in_the_question() -> None:
    shown = render(STRICT, [*CHAT, {"role": "user", "content": "And?"}])
    roles = [part.partition("|>")[0] for part in shown.split("<|")[1:]]
    assert roles == ["user", "assistant", "user"]
    for text in ("Be brief.", "get_weather", "Weather in Rome?", WRITTEN, "20 degrees", "And?"):
        assert text in shown


def test_growing_chats_keep_their_beginning() -> None:
    short = render(PLAIN, CHAT[:2], add_generation_prompt=False)
    assert render(PLAIN, CHAT, add_generation_prompt=False).startswith(short)
