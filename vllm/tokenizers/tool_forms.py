"""Forms of a tool for templates that trip over what its client left out, or over how it is said.

Tools go into prompts as they were sent, wherever the template takes them so. Each next form spells
out more of what the API calls optional, or says less of what templates do not expect.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ToolForm = Callable[[Mapping[str, Any]], Mapping[str, Any]]
# Of a JSON schema: what is a schema itself, by name, in a list, or alone.
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE = ("items", "additionalProperties", "not")
_PLAIN = ("type", "description", "properties", "required", "items", "enum", "title")


def as_sent(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a function as its client wrote it."""
    return function


def spelled_out(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a function with a description and parameters, empty where it has none."""
    parameters = function.get("parameters") or {}
    schema = {"type": "object", "properties": {}, **parameters}
    given = {name: value for name, value in function.items() if value is not None}
    return {**given, "description": given.get("description", ""), "parameters": schema}


def spelled_deeply(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a function whose fields are described too, and whose defaults are texts.

    A default is told as the JSON that it is, which templates can put into a line.
    """
    outer = spelled_out(function)
    return {**outer, "parameters": _map_schema(outer["parameters"], _describe)}


def plain(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a function whose schema says types, descriptions, choices and what is needed."""
    outer = spelled_deeply(function)
    return {**outer, "parameters": _map_schema(outer["parameters"], _keep_plain)}


TOOL_FORMS: Sequence[ToolForm] = (as_sent, spelled_out, spelled_deeply, plain)


def _describe(schema: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: value for name, value in schema.items() if value is not None}
    told.setdefault("description", "")
    if "default" in schema and not isinstance(schema["default"], str):
        told["default"] = json.dumps(schema["default"], ensure_ascii=False)
    return told


def _keep_plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in schema.items() if name in _PLAIN}
    kind = kept.get("type")
    if not isinstance(kind, str):
        named = [entry for entry in kind or () if isinstance(entry, str) and entry != "null"]
        kept["type"] = named[0] if len(named) == 1 else "any"
    return kept


def _map_schema(schema: Any, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    """Return a schema with every schema in it changed, the inner ones first."""
    if not isinstance(schema, Mapping):
        return schema
    mapped = dict(schema)
    for name in _NAMED:
        inner = mapped.get(name)
        if isinstance(inner, Mapping):
            mapped[name] = {key: _map_schema(entry, change) for key, entry in inner.items()}
    for name in _LISTED:
        inner = mapped.get(name)
        if isinstance(inner, Sequence) and not isinstance(inner, str):
            mapped[name] = [_map_schema(entry, change) for entry in inner]
    for name in _ALONE:
        if isinstance(mapped.get(name), Mapping):
            mapped[name] = _map_schema(mapped[name], change)
    return change(mapped)
