"""What a tool's schema says of its arguments, and what a value that a model wrote means by it.

Every reader of a family's calls asks here: a written value is what validates, and a text last.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from vllm.parser.literals import read_literal, spell_text
from vllm.utils.json_references import follow_reference

Check = Callable[[Any], bool]

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# As some generators of schemas spell them.
_TYPE_NAMES = {name: name for name in _TYPES} | {
    **{"str": "string", "text": "string", "int": "integer", "float": "number", "double": "number"},
    **{"bool": "boolean", "list": "array", "tuple": "array", "dict": "object", "map": "object"},
    **{"none": "null", "NoneType": "null"},
}
_ANY = frozenset(_TYPES)
# References to references, and schemas in schemas: more than anybody writes.
_MAX_STEPS = 64
_MAX_DEPTH = 64
_MAX_KEY_CHARS = 256
_MAX_KNOWN_FIELDS = 256
# Patterns of names that take no time to try: no group is repeated, and few letters are.
_REPEATED_GROUP = re.compile(r"\)[*+?{]|\\[1-9]|\(\?[^:]")
_MAX_REPEATS = 3
_NUMBER_BEGINS = re.compile(r"-?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d*)?)?\s*", re.ASCII)
_MAX_NUMBER_CHARS = 512
_CONSTANTS = {
    "null": ("null", "None"),
    "boolean": ("true", "false", "True", "False"),
}
_OPENINGS = {"object": "{", "array": "[("}
# What says more of a text than that it is one.
_TEXT_LIMITS = ("pattern", "format", "minLength", "maxLength", "const", "enum", "contentEncoding")


class Schema:
    """A part of a tool's schema; what is no schema says nothing.

    Owns: what it has found out of its fields.

    Args:
        node: The part.
        root: The schema that its references are of.
    """

    def __init__(self, node: Any, root: Any = None) -> None:
        self._node = node
        self._root = node if root is None else root
        self._fields: dict[str, Schema] = {}

    # ---- what it says ------------------------------------------------------------------------

    def field(self, key: str) -> "Schema":
        """Return the schema of an object's member."""
        known = self._fields.get(key)
        if known is None:
            found = self._find_fields(self._node, key[:_MAX_KEY_CHARS], 0)
            known = Schema(_all_of(found), self._root)
            if len(self._fields) < _MAX_KNOWN_FIELDS:
                self._fields[key] = known
        return known

    @property
    def item(self) -> "Schema":
        """The schema of an array's items."""
        found = [node["items"] for node in self._views(self._node, 0) if "items" in node]
        return Schema(_all_of([node for node in found if isinstance(node, Mapping)]), self._root)

    @cached_property
    def field_names(self) -> frozenset[str]:
        """Names of the members that it lists."""
        names: set[str] = set()
        for node in self._views(self._node, 0):
            listed = node.get("properties")
            names.update(listed if isinstance(listed, Mapping) else ())
        return frozenset(names)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The types that values may have; all where it does not say."""
        return self._kinds(self._node, 0)

    @cached_property
    def is_open(self) -> bool:
        """Whether it does not say which types values have."""
        return self.kinds == _ANY

    @cached_property
    def asks_for_text(self) -> bool:
        """Whether it says that values are, or may be, texts."""
        return "string" in self.kinds and not self.is_open

    @cached_property
    def takes_any_text(self) -> bool:
        """Whether whatever is written is a text that it takes."""
        return self.asks_for_text and self._takes_any_text(self._node, 0)

    # ---- what a value means ------------------------------------------------------------------

    def read(self, text: str, is_text: bool | None = None) -> str | None:
        """Return the JSON of what a written value means; None: it can be no value.

        Args:
            text: As written.
            is_text: What the model said of it; None: nothing.
        """
        if is_text and "string" in self.kinds:
            return spell_text(text)
        literal = read_literal(text)
        values = [] if literal is None else [(json.loads(literal), literal)]
        if is_text:
            fits = [json_ for value, json_ in values if self.takes(value)]
            return fits[0] if fits else spell_text(text)
        if is_text is None and self.takes_any_text:
            # What stands in quotes is text like any other.
            values = [pair for pair in values if not isinstance(pair[0], str)]
        for value, spelled in [*values, (text, spell_text(text))]:
            if self.takes(value):
                return spelled
        if is_text is None and self.asks_for_text:
            return spell_text(text)
        if values:
            return values[0][1]
        return spell_text(text) if "string" in self.kinds else None

    def may_mean_more(self, text: str) -> bool:
        """Whether a value that begins so can still mean something else than its text.

        What is no beginning never becomes one again, however the value goes on.
        """
        begun = text.lstrip()
        if not begun:
            return True
        kinds = self.kinds
        if begun[0] in "\"'":
            return not self.takes_any_text
        if any(begun[0] in opening for kind, opening in _OPENINGS.items() if kind in kinds):
            return True
        has_numbers = kinds & {"integer", "number"} and len(begun) <= _MAX_NUMBER_CHARS
        if has_numbers and _NUMBER_BEGINS.fullmatch(begun):
            return True
        words = [word for kind in _CONSTANTS if kind in kinds for word in _CONSTANTS[kind]]
        return any(word.startswith(begun) or word == begun.rstrip() for word in words)

    def takes(self, value: Any) -> bool:
        """Whether a value follows it; what is not known here is passed over."""
        return self._takes(value, self._node, 0)

    # ---- walking -----------------------------------------------------------------------------

    def _views(self, node: Any, depth: int) -> list[Mapping[str, Any]]:
        """A schema and those that it is joined of, whichever way."""
        node = self._resolve(node)
        if not isinstance(node, Mapping) or depth > _MAX_DEPTH:
            return []
        views = [node]
        for name in ("allOf", "anyOf", "oneOf"):
            for inner in _listed(node, name):
                views += self._views(inner, depth + 1)
        for name in ("then", "else"):
            views += self._views(node.get(name), depth + 1)
        return views

    def _resolve(self, node: Any) -> Any:
        """A schema whose reference, if it is one, is followed; with what stands beside it."""
        for _ in range(_MAX_STEPS):
            if not isinstance(node, Mapping) or not isinstance(node.get("$ref"), str):
                return node
            beside = {key: value for key, value in node.items() if key != "$ref"}
            target = follow_reference(self._root, node["$ref"])
            # Of another document, or of nothing: anything may follow it.
            target = True if target is None else target
            node = {"allOf": [target, beside]} if _says_something(beside) else target
        return True

    def _find_fields(self, node: Any, key: str, depth: int) -> list[Any]:
        """What is said of a member, all of which holds."""
        node = self._resolve(node)
        if not isinstance(node, Mapping) or depth > _MAX_DEPTH:
            return []
        found = _own_fields(node, key)
        for inner in _listed(node, "allOf"):
            found += self._find_fields(inner, key, depth + 1)
        for options in (
            _listed(node, "anyOf"),
            _listed(node, "oneOf"),
            [node[name] for name in ("then", "else") if name in node],
        ):
            each = [self._find_fields(inner, key, depth + 1) for inner in options]
            known = [_all_of(fields) for fields in each if fields]
            found += [{"anyOf": known}] if known else []
        return found

    def _kinds(self, node: Any, depth: int) -> frozenset[str]:
        node = self._resolve(node)
        if not isinstance(node, Mapping) or depth > _MAX_DEPTH:
            return _ANY
        kinds = _own_kinds(node)
        for inner in _listed(node, "allOf"):
            kinds &= self._kinds(inner, depth + 1)
        for name in ("anyOf", "oneOf"):
            options = _listed(node, name)
            if options:
                either = [self._kinds(inner, depth + 1) for inner in options]
                kinds &= frozenset().union(*either)
        # A schema that rules itself out says nothing.
        return kinds or _ANY

    def _takes_any_text(self, node: Any, depth: int) -> bool:
        node = self._resolve(node)
        if not isinstance(node, Mapping):
            return node is not False
        if depth > _MAX_DEPTH or any(name in node for name in (*_TEXT_LIMITS, "not", "if")):
            return False
        if "string" not in _own_kinds(node):
            return False
        if not all(self._takes_any_text(inner, depth + 1) for inner in _listed(node, "allOf")):
            return False
        either = [_listed(node, name) for name in ("anyOf", "oneOf")]
        return all(
            any(self._takes_any_text(inner, depth + 1) for inner in options)
            for options in either
            if options
        )

    # ---- validating --------------------------------------------------------------------------

    def _takes(self, value: Any, node: Any, depth: int) -> bool:
        node = self._resolve(node)
        if node is False:
            return False
        if not isinstance(node, Mapping) or depth > _MAX_DEPTH:
            return True
        kind = _kind_of(value)
        if not kind & _own_kinds(node):
            return False
        if not _is_listed(value, node):
            return False

        def takes(inner: Any) -> bool:
            return self._takes(value, inner, depth + 1)

        if not all(map(takes, _listed(node, "allOf"))):
            return False
        if any(options and not any(map(takes, options)) for options in _either(node)):
            return False
        if "not" in node and _says_something(node["not"]) and takes(node["not"]):
            return False
        if isinstance(value, Mapping):
            return self._takes_object(value, node, depth)
        if isinstance(value, list):
            return self._takes_array(value, node, depth)
        return _takes_scalar(value, node)

    def _takes_object(self, value: Mapping[str, Any], node: Mapping[str, Any], depth: int) -> bool:
        required = node.get("required")
        if isinstance(required, list) and not all(name in value for name in required):
            return False
        for key, member in value.items():
            fields = _own_fields(node, key[:_MAX_KEY_CHARS], keep_false=True)
            if not all(self._takes(member, field, depth + 1) for field in fields):
                return False
        return _is_between(len(value), node, "minProperties", "maxProperties")

    def _takes_array(self, value: Sequence[Any], node: Mapping[str, Any], depth: int) -> bool:
        first = _listed(node, "prefixItems")
        if not all(
            self._takes(item, inner, depth + 1) for item, inner in zip(value, first, strict=False)
        ):
            return False
        rest = node.get("items", True)
        if isinstance(rest, Mapping | bool) and not all(
            self._takes(item, rest, depth + 1) for item in value[len(first) :]
        ):
            return False
        return _is_between(len(value), node, "minItems", "maxItems")


def _own_kinds(node: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema names itself, or whose values it lists."""
    kinds = _ANY
    said = node.get("type")
    names = [said] if isinstance(said, str) else said
    if isinstance(names, list) and names:
        known = [_TYPE_NAMES.get(name) if isinstance(name, str) else None for name in names]
        if None not in known:
            kinds = frozenset(name for name in known if name is not None)
            kinds |= {"integer"} if "number" in kinds else frozenset()
    values = node.get("enum")
    if isinstance(values, list) and values:
        kinds &= frozenset().union(*map(_kind_of, values))
    if "const" in node:
        kinds &= _kind_of(node["const"])
    if node.get("nullable") is True:
        kinds |= {"null"}
    return kinds or _ANY


def _own_fields(node: Mapping[str, Any], key: str, *, keep_false: bool = False) -> list[Any]:
    """What a schema says itself of a member."""
    properties, patterns = node.get("properties"), node.get("patternProperties")
    found: list[Any] = []
    is_listed = isinstance(properties, Mapping) and key in properties
    if isinstance(properties, Mapping) and is_listed:
        found.append(properties[key])
    if isinstance(patterns, Mapping):
        found += [inner for pattern, inner in patterns.items() if _fits(pattern, key)]
    if not found and "additionalProperties" in node:
        found.append(node["additionalProperties"])
    return [inner for inner in found if keep_false or not isinstance(inner, bool)]


def _fits(pattern: Any, key: str) -> bool:
    """Whether a name follows a pattern; one that may take long to try is passed over."""
    if not isinstance(pattern, str) or _REPEATED_GROUP.search(pattern):
        return False
    if sum(pattern.count(char) for char in "*+{") > _MAX_REPEATS:
        return False
    try:
        return re.search(pattern, key) is not None
    except (re.error, OverflowError):
        return False


def _kind_of(value: Any) -> frozenset[str]:
    """The types that a value has."""
    if value is None:
        return frozenset(["null"])
    if isinstance(value, bool):
        return frozenset(["boolean"])
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset(["integer", "number"])
    if isinstance(value, float):
        return frozenset(["number"])
    if isinstance(value, str):
        return frozenset(["string"])
    return frozenset(["array" if isinstance(value, list) else "object"])


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values are one in JSON, where true is not 1."""
    return bool(_kind_of(value) & _kind_of(other)) and bool(value == other)


def _is_listed(value: Any, node: Mapping[str, Any]) -> bool:
    """Whether a value is one of those that a schema lists, if it lists any."""
    if value is None and node.get("nullable") is True:
        return True
    values = node.get("enum")
    if "const" in node and not _is_same(value, node["const"]):
        return False
    return not isinstance(values, list) or any(_is_same(value, other) for other in values)


def _takes_scalar(value: Any, node: Mapping[str, Any]) -> bool:
    if isinstance(value, str):
        return _is_between(len(value), node, "minLength", "maxLength")
    if isinstance(value, bool) or value is None:
        return True
    above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
    return (
        _is_between(value, node, "minimum", "maximum")
        and not (_is_number(above) and value <= above)
        and not (_is_number(below) and value >= below)
    )


def _is_between(number: Any, node: Mapping[str, Any], low: str, high: str) -> bool:
    least, most = node.get(low), node.get(high)
    return not (_is_number(least) and number < least) and not (_is_number(most) and number > most)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _listed(node: Mapping[str, Any], name: str) -> list[Any]:
    value = node.get(name)
    return value if isinstance(value, list) else []


def _either(node: Mapping[str, Any]) -> list[list[Any]]:
    return [_listed(node, "anyOf"), _listed(node, "oneOf")]


def _all_of(found: Sequence[Any]) -> Any:
    if not found:
        return {}
    return found[0] if len(found) == 1 else {"allOf": list(found)}


def _says_something(node: Any) -> bool:
    """Whether a schema says something of values, and not only of itself."""
    notes = ("title", "description", "default", "examples", "deprecated", "$comment", "$defs")
    return isinstance(node, Mapping) and any(name not in notes for name in node)
