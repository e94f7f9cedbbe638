import json
from typing import Any

import pytest

from tests.tokenizers.family_tokenizers import byte_level
from vllm.exceptions import UserInputError
from vllm.tokenizers import ChatOptions
from vllm.tokenizers.chat_template import JinjaChatEncoder
from vllm.tokenizers.chat_tools import parse_tools
from vllm.tokenizers.tool_forms import TOOL_FORMS, as_sent, plain, spelled_deeply, spelled_out

# As gpt-oss writes tools: descriptions and defaults are put into a line.
LINES = """{% for t in tools or [] %}{{ '// ' + t.function.description }}
{% for name, field in (t.function.parameters.properties or {}).items() %}
{{- name }}{% if field.default is defined and field.oneOf %}{{ ' // ' + field.default }}
{%- elif field.default is defined %}{{ ' // ' ~ field.default }}{% endif %}
{% endfor %}{% endfor %}{{ messages[0].content }}"""
HI = [{"role": "user", "content": "Hi"}]


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "look", **function}}]


def field(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


EITHER = [{"type": "string"}, {"type": "number"}]


@pytest.mark.parametrize(
    "function",
    [
        {},
        {"description": None},
        {"description": ""},
        {"parameters": None},
        {"parameters": {}},
        {"parameters": {"type": "object"}},
        {"parameters": {"type": "object", "properties": None}},
        {"parameters": field()},
        {"parameters": field(oneOf=EITHER, default=1)},
        {"parameters": field(oneOf=EITHER, default=None)},
        {"parameters": field(oneOf=EITHER, default=True)},
        {"parameters": field(oneOf=EITHER, default=["x"])},
        {"parameters": field(oneOf=EITHER, default={"k": "v"})},
        {"parameters": field(oneOf=EITHER, default="x")},
        {"description": "d", "parameters": field(oneOf=EITHER, default=1.5)},
        {"strict": None},
    ],
)
def test_what_is_optional_is_no_reason_to_refuse(function: dict[str, Any]) -> None:
    encoder = JinjaChatEncoder(byte_level(), LINES)
    options = ChatOptions(tools=parse_tools(tool(**function)))
    text = encoder.encode_chat(HI, options).text
    assert text.startswith("// ")
    assert "None" not in text.replace("null", "")


def test_a_default_is_told_as_json() -> None:
    encoder = JinjaChatEncoder(byte_level(), LINES)
    options = ChatOptions(tools=parse_tools(tool(parameters=field(oneOf=EITHER, default=True))))
    assert "a // true" in encoder.encode_chat(HI, options).text


def test_templates_that_take_tools_get_them_as_they_were_sent() -> None:
    encoder = JinjaChatEncoder(byte_level(), "{{ tools | tojson }}{{ messages[0].content }}")
    given = tool(parameters=field(default=1))
    text = encoder.encode_chat(HI, ChatOptions(tools=parse_tools(given))).text
    assert json.loads(text.removesuffix("Hi")) == given


def test_what_no_form_helps_is_told_by_the_first_refusal() -> None:
    template = (
        "{% if tools %}{{ raise_exception('no ' ~ tools[0].function.description) }}{% endif %}"
    )
    encoder = JinjaChatEncoder(byte_level(), template)
    with pytest.raises(UserInputError, match="no d"):
        encoder.encode_chat(HI, ChatOptions(tools=parse_tools(tool(description="d"))))


def test_each_form_says_what_it_promises() -> None:
    function = {
        "name": "f",
        "parameters": {
            "properties": {
                "a": {
                    "anyOf": [{"type": "null", "default": 0}],
                    "x-own": 1,
                    "type": ["string", "null"],
                }
            },
            "$defs": {"B": {"items": {"default": []}}},
        },
    }
    assert as_sent(function) is function
    assert spelled_out(function)["description"] == ""
    deep = spelled_deeply(function)["parameters"]
    assert deep["properties"]["a"]["anyOf"][0]["default"] == "0"
    assert deep["$defs"]["B"]["items"] == {"default": "[]", "description": ""}
    kept = plain(function)["parameters"]["properties"]["a"]
    assert kept == {"type": "string", "description": ""}
    assert TOOL_FORMS[0] is as_sent
