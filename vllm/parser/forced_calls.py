"""Calls that cannot fail: the grammar of an answer that must call, as a structural tag.

Formats are those of docs/structured_output.md. Every argument follows its schema, required ones are
there, and nothing but calls follows the reasoning.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.tokenizers.chat_tools import ToolSpec
from vllm.tokenizers.deepseek_v4_tools import BLOCK_CLOSE, BLOCK_GAP, BLOCK_OPEN, DSML

Format = dict[str, Any]
# Of a schema's root: what says more than that some properties are there.
_COMBINATORS = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "minProperties", "maxProperties"),
)
# Of a text: what only a grammar of JSON checks.
_TEXT_LIMITS = ("pattern", "format", "minLength", "maxLength", "const", "enum")
_DEFINITIONS = ("$defs", "definitions")


def forced_calls(
    dialect: str, tools: Sequence[ToolSpec], one_call: bool, in_reasoning: bool
) -> str:
    """Return the structural tag of an answer that calls at least one of ``tools``.

    Args:
        dialect: Name of the format of calls.
        tools: Those that may be called, at least one.
        one_call: Whether one call is all.
        in_reasoning: Whether the grammar begins behind reasoning that the prompt has opened.
    """
    return json.dumps({"format": _MAKERS[dialect](tools, one_call, in_reasoning)})


def _deepseek(tools: Sequence[ToolSpec], one_call: bool, in_reasoning: bool) -> Format:
    tags = [
        _tag(f'<{DSML}invoke name="{tool.name}">\n', _parameters(tool), f"</{DSML}invoke>\n")
        for tool in tools
    ]
    opening = _text(f"{BLOCK_GAP}{BLOCK_OPEN}\n")
    return _sequence(opening, _calls(tags, "", one_call), _text(BLOCK_CLOSE))


def _parameters(tool: ToolSpec) -> Format:
    """The arguments of one call, in the order of their schema."""
    schema = tool.parameters
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not _is_list_of_parameters(schema, properties, required):
        # Too much for one parameter after another: all of them as one JSON object.
        return _json_parameter("arguments", dict(schema) | {"type": "object"})
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    parts = [
        _parameter(name, value, shared, name in required) for name, value in properties.items()
    ]
    return _sequence(*parts) if parts else _text("")


def _is_list_of_parameters(schema: Mapping[str, Any], properties: Any, required: Any) -> bool:
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    odd = any(set(name) & set('"<>\n') or not name for name in properties)
    says_more = any(name in schema for name in _COMBINATORS)
    return not odd and not says_more and all(name in list(properties) for name in required)


def _parameter(name: str, schema: Any, shared: Mapping[str, Any], is_required: bool) -> Format:
    schema = schema if isinstance(schema, Mapping) else {}
    as_json = _json_parameter(name, {**schema, **shared})
    options = [as_json]
    if schema.get("type") == "string" and not any(limit in schema for limit in _TEXT_LIMITS):
        head = f'<{DSML}parameter name="{name}" string="true">'
        options = [_sequence(_text(head), {"type": "any_text"}, _text(f"</{DSML}parameter>\n"))]
    elif _is_text_enum(schema):
        head = f'<{DSML}parameter name="{name}" string="true">'
        options = [_text(f"{head}{value}</{DSML}parameter>\n") for value in schema["enum"]]
    return _or(*options) if is_required else _or(*options, _text(""))


def _is_text_enum(schema: Mapping[str, Any]) -> bool:
    values = schema.get("enum")
    if schema.get("type") != "string" or not isinstance(values, list) or not values:
        return False
    return all(isinstance(value, str) and DSML not in value for value in values)


def _json_parameter(name: str, schema: Mapping[str, Any]) -> Format:
    head = f'<{DSML}parameter name="{name}" string="false">'
    return _sequence(_text(head), _json(schema), _text(f"</{DSML}parameter>\n"))


def _hermes(tools: Sequence[ToolSpec], one_call: bool, in_reasoning: bool) -> Format:
    tags = [
        _tag(
            f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": ',
            _json(_object(tool)),
            "}\n</tool_call>",
        )
        for tool in tools
    ]
    calls = _calls(tags, "\n", one_call)
    # A model whose prompt leaves the reasoning to it may open and close it first.
    thought = _sequence(_text("<think>"), {"type": "any_text"}, _text("</think>\n\n"))
    before = _text("\n\n") if in_reasoning else thought
    return _sequence(_or(_text(""), before), calls)


def _llama(tools: Sequence[ToolSpec], one_call: bool, in_reasoning: bool) -> Format:
    tags = [
        _tag(f'{{"name": {json.dumps(tool.name)}, "parameters": ', _json(_object(tool)), "}")
        for tool in tools
    ]
    return _calls(tags, "; ", one_call)


def _harmony(tools: Sequence[ToolSpec], one_call: bool, in_reasoning: bool) -> Format:
    # The token that ends a call ends the answer: there is one call at most.
    tags = [
        _tag(
            f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>",
            _json(_object(tool)),
            "",
        )
        for tool in tools
    ]
    thought = _sequence(
        _text("<|channel|>analysis<|message|>"),
        {"type": "any_text"},
        _text("<|end|><|start|>assistant"),
    )
    return _sequence(_or(_text(""), thought), _or(*tags))


_MAKERS: Mapping[str, Callable[[Sequence[ToolSpec], bool, bool], Format]] = {
    "deepseek_v4": _deepseek,
    "hermes": _hermes,
    "qwen3": _hermes,
    "llama3_json": _llama,
    "openai": _harmony,
}


def _object(tool: ToolSpec) -> dict[str, Any]:
    return {**tool.parameters, "type": "object"}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _json(schema: Mapping[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": dict(schema)}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _or(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _calls(tags: Sequence[Format], separator: str, one_call: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": one_call,
    }
