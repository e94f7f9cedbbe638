"""Schemas that are followed as far as they can be: what a grammar cannot enforce is passed over.

Tools' schemas come from generators that know nothing of grammars. Unless a tool is ``strict``,
nobody promised to enforce all of it, so a value that cannot be compiled is left out as an unknown
keyword is:

    {"type": "string", "pattern": "^(?!x).*$", "maxLength": 9}
    {"type": "string", "maxLength": 9}

Rules that contradict each other stay: no answer could follow them, and who wrote them should know.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

# Keywords whose values may be beyond a grammar, those that are enforced together side by side.
_VALUES = (
    ("pattern", "format", "minLength", "maxLength"),
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ALONE = (
    "items",
    "additionalProperties",
    "additionalItems",
    "not",
    "contains",
    "if",
    "then",
    "else",
)
# How the library says that rules contradict each other.
_CONTRADICTION = "Unsatisfiable schema"
_MAX_KNOWN = 4096


def is_lax(schema: Mapping[str, Any]) -> bool:
    """Whether a schema says that what cannot be enforced may be passed over."""
    own = schema.get("x-guidance")
    return isinstance(own, Mapping) and own.get("lenient") is True


def loosen(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema, and those in it, without the values that cannot be enforced."""
    loose = dict(schema)
    for group in _VALUES:
        for name in _find_unenforceable(loose, [name for name in group if name in loose]):
            del loose[name]
    patterns = loose.get("patternProperties")
    if isinstance(patterns, Mapping):
        known = {key: rule for key, rule in patterns.items() if _fits({"pattern": key}, "string")}
        if len(known) < len(patterns):
            # What it says of further properties was said beside all of them.
            loose |= {"patternProperties": known, "additionalProperties": True}
    for name in _NAMED:
        if isinstance(loose.get(name), Mapping):
            loose[name] = {key: _loosen_any(inner) for key, inner in loose[name].items()}
    for name in _LISTED:
        if isinstance(loose.get(name), list):
            loose[name] = [_loosen_any(inner) for inner in loose[name]]
    for name in _ALONE:
        if isinstance(loose.get(name), Mapping):
            loose[name] = loosen(loose[name])
    return loose


def _loosen_any(schema: Any) -> Any:
    return loosen(schema) if isinstance(schema, Mapping) else schema


def _find_unenforceable(schema: Mapping[str, Any], names: Sequence[str]) -> Iterable[str]:
    """Return which of some keywords cannot be enforced, each alone or all together."""
    kind = schema.get("type")
    rules = {name: schema[name] for name in names}
    if not rules or _fits(rules, kind):
        return ()
    alone = [name for name in names if not _fits({name: schema[name]}, kind)]
    if alone:
        return alone
    return names


def _fits(rules: Mapping[str, Any], kind: Any) -> bool:
    """Whether rules for values of a type can be compiled, or contradict each other."""
    typed = rules if kind is None else {"type": kind, **rules}
    try:
        return _compiles(json.dumps({**typed, "x-guidance": {"lenient": True}}))
    except ValueError:  # what JSON cannot spell, the compiler's caller says so
        return True


@lru_cache(_MAX_KNOWN)
def _compiles(schema: str) -> bool:
    fault = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    return not fault or fault.startswith(_CONTRADICTION)
