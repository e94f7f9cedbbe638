"""Values of arguments that a model wrote as text, typed by the tool's schema."""

import json
from collections.abc import Mapping
from typing import Any

_NAMES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def means_json(text: str, schema: Any, is_text: bool | None = None) -> str | None:
    """Return the JSON that a written value means, without outer white space; None: it is text.

    What the model said decides, unless the schema has no room for it; where the model said
    nothing, text is JSON if it can be and the schema does not ask for text.

    Args:
        text: As written.
        schema: Of the argument; anything that is no schema says nothing.
        is_text: What the model said; None: nothing.
    """
    stripped = text.strip()
    try:
        value = json.loads(stripped, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    types = _types(schema)
    if types is None:
        return None if is_text else stripped
    if is_text:
        return stripped if "string" not in types and _is_one_of(value, types) else None
    if is_text is None:
        return None if "string" in types else stripped
    return None if types == {"string"} and not isinstance(value, str) else stripped


def takes_text(schema: Any) -> bool:
    """Whether a value that the model calls a text is one, whatever it says."""
    types = _types(schema)
    return types is None or "string" in types


def asks_for_text(schema: Any) -> bool:
    """Whether a value of which the model does not say what it is must be a text."""
    types = _types(schema)
    return types is not None and "string" in types


def _is_one_of(value: Any, types: set[str]) -> bool:
    if value is None:
        return "null" in types
    name = _NAMES.get(type(value), "string")
    return name in types or (name == "integer" and "number" in types)


def _types(schema: Any) -> set[str] | None:
    """The types that a schema allows; None: it does not say."""
    if not isinstance(schema, Mapping):
        return None
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {str(kind) for kind in kinds}
    options = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(options, list) or not options:
        return None
    found = [_types(option) for option in options]
    known = [types for types in found if types is not None]
    return set().union(*known) if len(known) == len(found) else None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
