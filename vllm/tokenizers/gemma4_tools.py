"""Gemma 4's spelling of tools, calls and results: objects with bare keys, in order of their keys.

    <|tool>declaration:find{description:<|"|>Looks up.<|"|>,parameters:{properties:{
        text:{description:<|"|>What<|"|>,type:<|"|>STRING<|"|>}},required:[<|"|>text<|"|>],
        type:<|"|>OBJECT<|"|>}}<tool|>
    <|tool_call>call:find{n:42,text:<|"|>x<|"|>}<tool_call|>
    <|tool_response>response:find{value:<|"|>nothing<|"|>}<tool_response|>

(without the line breaks). Of a schema the model is told descriptions, types, choices of texts, what
lists and objects are made of, what may be null and what must be given. A declaration whose
parameters have no type lacks their closing brace: models were trained on it so.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.tokenizers.chat_tools import ToolSpec
from vllm.tokenizers.tool_calls import RAW_ARGUMENTS, MessageCall, split_object

QUOTE = '<|"|>'
# Words of a schema, which are no fields where an object without properties is taken for them.
_SCHEMA_WORDS = frozenset({"description", "type", "properties", "required", "nullable"})


def spell_tool(tool: ToolSpec) -> str:
    """Return the declaration of a function."""
    function = tool.function
    pieces = [f"description:{_quoted(function.get('description', ''))}"]
    parameters = function.get("parameters")
    if parameters:
        pieces.append(f"parameters:{{{_parameters(parameters)}")
    if "response" in function:
        pieces.append(f"response:{{{_response(function['response'])}")
    return f"<|tool>declaration:{tool.name}{{{','.join(pieces)}}}<tool|>"


def spell_call(call: MessageCall) -> str:
    """Return a call; arguments that are no object are one field."""
    is_object = split_object(call.arguments) is not None
    given = json.loads(call.arguments) if is_object else {RAW_ARGUMENTS: call.arguments}
    return f"<|tool_call>call:{call.name}{spell_value(given, quotes_keys=False)}<tool_call|>"


def spell_result(name: str, text: str) -> str:
    """Return what a function answered."""
    return f"<|tool_response>response:{name}{{value:{_quoted(text)}}}<tool_response|>"


def spell_value(value: Any, *, quotes_keys: bool = True) -> str:
    """Return a JSON value; numbers as Python writes them."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Mapping):
        pairs = (
            (_quoted(key) if quotes_keys else key, spell_value(entry, quotes_keys=quotes_keys))
            for key, entry in _sorted(value)
        )
        return "{" + ",".join(f"{key}:{spelled}" for key, spelled in pairs) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(spell_value(v, quotes_keys=quotes_keys) for v in value) + "]"
    return str(value)


def _quoted(text: Any) -> str:
    return f"{QUOTE}{text}{QUOTE}"


def _sorted(mapping: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(mapping.items(), key=lambda item: item[0].lower())


def _entry(schema: Any, name: str) -> Any:
    """Return what a schema says under a name; None where it is none, as ``true`` is one too."""
    return schema.get(name) if isinstance(schema, Mapping) else None


def _type_of(schema: Any) -> str:
    kind = _entry(schema, "type")
    is_silent = kind is None and not (isinstance(schema, Mapping) and "type" in schema)
    return "" if is_silent else str(kind).upper()


def _parameters(schema: Mapping[str, Any]) -> str:
    pieces = []
    if _entry(schema, "properties"):
        pieces.append(f"properties:{{{_fields(schema['properties'])}}},")
    if _entry(schema, "required"):
        pieces.append(f"required:{_names(schema['required'])},")
    if _entry(schema, "type"):
        pieces.append(f"type:{_quoted(_type_of(schema))}}}")
    return "".join(pieces)


def _response(schema: Any) -> str:
    description = _entry(schema, "description")
    pieces = [f"description:{_quoted(description)},"] if description else []
    if _type_of(schema) == "OBJECT":
        pieces.append(f"type:{_quoted('OBJECT')}}}")
    return "".join(pieces)


def _fields(properties: Any, *, leaves_out: frozenset[str] = frozenset()) -> str:
    if not isinstance(properties, Mapping):
        return ""
    return ",".join(
        f"{name}:{{{','.join(_field(schema))}}}"
        for name, schema in _sorted(properties)
        if name not in leaves_out
    )


def _field(schema: Any) -> list[str]:
    """Return what the model is told of one field, its type last."""
    kind, pieces = _type_of(schema), []
    if description := _entry(schema, "description"):
        pieces.append(f"description:{_quoted(description)}")
    if kind == "STRING" and (choices := _entry(schema, "enum")):
        pieces.append(f"enum:{spell_value(choices)}")
    items = _entry(schema, "items")
    if kind == "ARRAY" and isinstance(items, Mapping) and items:
        pieces.append(f"items:{{{_items(items)}}}")
    if _entry(schema, "nullable"):
        pieces.append("nullable:true")
    if kind == "OBJECT":
        # An object that lists no properties is taken for the list of them.
        own = _entry(schema, "properties")
        is_listed = isinstance(own, Mapping)
        inner = _fields(own) if is_listed else _fields(schema, leaves_out=_SCHEMA_WORDS)
        pieces.append(f"properties:{{{inner}}}")
        if required := _entry(schema, "required"):
            pieces.append(f"required:{_names(required)}")
    return [*pieces, f"type:{_quoted(kind)}"]


def _items(schema: Mapping[str, Any]) -> str:
    pieces = []
    for name, entry in _sorted(schema):
        if entry is None:
            continue
        if name == "properties":
            spelled = f"{{{_fields(entry)}}}"
        elif name == "required":
            spelled = _names(entry)
        elif name == "type":
            kinds = entry.upper() if isinstance(entry, str) else [str(k).upper() for k in entry]
            spelled = spell_value(kinds)
        else:
            spelled = spell_value(entry)
        pieces.append(f"{name}:{spelled}")
    return ",".join(pieces)


def _names(names: Sequence[Any]) -> str:
    return "[" + ",".join(map(_quoted, names)) + "]"
