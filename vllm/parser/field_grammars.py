"""Forced calls in formats that write arguments field by field."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from vllm.parser.grammar_formats import (
    ANY_TEXT,
    Field,
    Format,
    any_of,
    arguments_of,
    fields_of,
    is_text_enum,
    json_of,
    listed,
    listed_in_order,
    name_in_errors,
    object_of,
    sequence,
    text,
)
from vllm.parser.schemas import Schema
from vllm.tokenizers.chat_tools import ToolSpec
from vllm.tokenizers.tool_calls import RAW_ARGUMENTS

# Deeper values than this have no format of their own where JSON cannot be used.
_MAX_DEPTH = 3
_MAX_UNSURE_FIELDS = 16


def qwen3_coder_call(tool: ToolSpec) -> Format:
    """Return the format of ``<tool_call><function=NAME><parameter=KEY>...``."""
    return sequence(
        text(f"<tool_call>\n<function={tool.name}>\n"),
        *_tagged_fields(tool, "<parameter={}>\n", "\n</parameter>\n"),
        text("</function>\n</tool_call>"),
    )


def glm_call(tool: ToolSpec) -> Format:
    """Return the format of ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>...``."""
    return sequence(
        text(f"<tool_call>{tool.name}\n"),
        *_tagged_fields(tool, "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n"),
        text("</tool_call>"),
    )


def _tagged_fields(tool: ToolSpec, opening: str, closing: str) -> list[Format]:
    """Fields between tags: texts as they are, all else as JSON."""
    fields = fields_of(tool)
    if fields is None:
        # Too much for one field after another: all of them as one JSON object.
        fields = [Field(RAW_ARGUMENTS, object_of(tool), True, name_in_errors(tool))]
    parts = []
    for field in fields:
        head = text(opening.format(field.name))
        # A text that follows a pattern too is only known to as JSON, and readers take it so.
        options = [sequence(head, field.json, text(closing))]
        if Schema(field.schema).takes_any_text:
            # Of a union, too: what a text means there its reader asks the schema.
            options = [sequence(head, ANY_TEXT, text(closing))]
        elif values := is_text_enum(field.schema, closing.strip()):
            options = [sequence(head, text(value), text(closing)) for value in values]
        parts.append(any_of(*options, *([] if field.is_required else [text("")])))
    return parts


def pythonic_call(tool: ToolSpec) -> Format:
    """Return the format of ``NAME(KEY=VALUE, ...)``; values are JSON, which readers take."""
    fields = fields_of(tool)
    is_plain = fields is not None and all(field.name.isidentifier() for field in fields)
    unsure = sum(not field.is_required for field in fields or ())
    if fields is None or not is_plain or unsure > _MAX_UNSURE_FIELDS:
        return sequence(text(f"{tool.name}(**"), arguments_of(tool), text(")"))
    items = [(sequence(text(f"{field.name}="), field.json), field.is_required) for field in fields]
    return sequence(text(f"{tool.name}("), listed(items, ", ") if items else text(""), text(")"))


def gemma_call(opening: str, closing: str, quote: str) -> Callable[[ToolSpec], Format]:
    """Return the maker of ``<opening>call:NAME{KEY:VALUE,...}<closing>``; texts stand in quotes.

    Args:
        opening: Token before a call.
        closing: Token behind it.
        quote: Token around a text, which no text can hold.
    """

    def call(tool: ToolSpec) -> Format:
        return sequence(
            text(f"{opening}call:{tool.name}"),
            _gemma_object(tool.parameters, quote, 0),
            text(closing),
        )

    return call


def _gemma_object(schema: Mapping[str, Any], quote: str, depth: int) -> Format:
    properties = schema.get("properties")
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    if not isinstance(properties, Mapping) or not properties:
        is_closed = schema.get("additionalProperties") is False
        return text("{}") if depth or is_closed else any_of(text("{}"), _gemma_any_object(quote))
    items = [
        (sequence(text(f"{name}:"), _gemma_value(value, quote, depth + 1)), name in required)
        for name, value in sorted(properties.items(), key=_without_case)
    ]
    unsure = [item for item in items if not item[1]]
    if len(unsure) == len(items) > _MAX_UNSURE_FIELDS:
        items = [(items[0][0], True), *items[1:]]
    return sequence(text("{"), listed_in_order(items, ","), text("}"))


def _without_case(item: tuple[str, Any]) -> str:
    # The order of keys in prompts: a forced call that comes back has its own tokens again.
    return item[0].lower()


def _gemma_any_object(quote: str) -> Format:
    key: Format = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,63}"}
    return sequence(text("{"), key, text(":"), _gemma_scalar(quote), text("}"))


def _gemma_value(schema: Any, quote: str, depth: int) -> Format:
    schema = schema if isinstance(schema, Mapping) else {}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return any_of(
            *(text(f"{quote}{v}{quote}" if isinstance(v, str) else json.dumps(v)) for v in values)
        )
    options = schema.get("anyOf") or schema.get("oneOf")
    kind = schema.get("type")
    if isinstance(kind, list) and kind:
        options = [{**schema, "type": one} for one in kind]
    if isinstance(options, list) and options:
        return any_of(*(_gemma_value(option, quote, depth) for option in options))
    if depth > _MAX_DEPTH:
        return _gemma_scalar(quote)
    if kind == "object":
        return _gemma_object(schema, quote, depth)
    if kind == "array":
        item = _gemma_value(schema.get("items"), quote, depth + 1)
        items = {
            "type": "tags_with_separator",
            "tags": [{"type": "tag", "begin": "", "content": item, "end": ""}],
            "separator": ",",
        }
        return sequence(text("["), items, text("]"))
    if kind in ("integer", "number", "boolean", "null"):
        return json_of({"type": kind, **_limits(schema)})
    return _gemma_text(quote) if kind == "string" else _gemma_scalar(quote)


def _limits(schema: Mapping[str, Any]) -> dict[str, Any]:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    return {name: schema[name] for name in names if name in schema}


def _gemma_text(quote: str) -> Format:
    return sequence(text(quote), ANY_TEXT, text(quote))


def _gemma_scalar(quote: str) -> Format:
    plain = json_of({"type": ["number", "boolean", "null"]})
    return any_of(_gemma_text(quote), plain)
