"""Objects that hold the properties which their schemas name, and no others.

JSON Schema lets further properties follow. A model that is sampled under such a grammar invents
them, one after another, until its limit. So an object whose schema has ``properties`` is closed
here, unless the schema says itself what else it may hold (``additionalProperties``,
``unevaluatedProperties``).

All schemas of one value close it together: those of ``allOf``, the target of ``$ref`` beside other
keywords, and each option of ``anyOf`` or ``oneOf`` with what stands beside the options:

    {"allOf": [{"$ref": A}, {"properties": {"b": …}}]}   holds A's properties and b
    {"properties": {"k": …}, "oneOf": [{… a …}, {… b …}]}   holds k and a, or k and b
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.exceptions import UserInputError
from vllm.utils.json_references import follow_reference

_OPTIONS = ("anyOf", "oneOf")
_CONDITIONAL = ("then", "else")
# Schemas of the same value, beside a schema's own keywords.
_IN_PLACE = ("properties", "patternProperties", "allOf", *_OPTIONS, *_CONDITIONAL, "$ref")
# Of these, what needs to know what stands beside it.
_LEADING_ON = ("allOf", *_OPTIONS, *_CONDITIONAL, "$ref")
# Of other values: one schema, several, or several by name.
_ONE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames")
_SOME = ("prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
# Schemas looked at in all: far more than a real one has, and a fraction of a second.
_MAX_VISITS = 200_000
_MAX_CHAIN = 64


def find_schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all schemas in it; what is true is one that says nothing."""
    waiting = [schema]
    while waiting:
        item = waiting.pop()
        if item is True:
            yield {}
        if not isinstance(item, dict):
            continue
        yield item
        waiting += [item[key] for key in (*_ONE, *_CONDITIONAL) if key in item]
        for key in (*_SOME, "allOf", *_OPTIONS):
            if isinstance(item.get(key), list):
                waiting += item[key]
        for key in _NAMED:
            if isinstance(item.get(key), dict):
                waiting += item[key].values()


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects hold nothing that it does not name.

    Raises:
        UserInputError: Its references lead too far, or its parts refer to each other too often.
    """
    return _Closing(schema).close_whole()


@dataclass(slots=True)
class _Names:
    """What schemas of one value say of an object's properties.

    Attributes:
        properties: Names, in order.
        patterns: Patterns of names, in order.
        is_named: Whether a schema has ``properties``, if only empty ones.
        is_said: Whether a schema says itself what else an object may hold.
    """

    properties: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    is_named: bool = False
    is_said: bool = False

    def add(self, other: "_Names") -> None:
        """Take in another's."""
        self.properties |= other.properties
        self.patterns |= other.patterns
        self.is_named |= other.is_named
        self.is_said |= other.is_said

    def joined(self, other: "_Names") -> "_Names":
        """Return both."""
        both = _Names(dict(self.properties), dict(self.patterns), self.is_named, self.is_said)
        both.add(other)
        return both


class _Closing:
    """Closes one schema.

    Owns: copies of definitions that are left open, for who closes them with others.
    """

    def __init__(self, whole: dict[str, Any]) -> None:
        self._whole = whole
        self._copies: dict[tuple[str, frozenset[str], frozenset[str]], str] = {}
        self._made: dict[str, Any] = {}
        self._visits = 0

    def close_whole(self) -> dict[str, Any]:
        made: dict[str, Any] = self._close(self._whole, _Names())
        if self._made:
            made["$defs"] = {**made.get("$defs", {}), **self._made}
        return made

    def _close(self, schema: Any, beside: _Names) -> Any:
        """Return a schema of a value of its own.

        Args:
            schema: Any, booleans and what is none included.
            beside: What other schemas of the value name, which close it too.
        """
        if not isinstance(schema, dict):
            return schema
        refers_only = [key for key in _IN_PLACE if key in schema] == ["$ref"]
        if refers_only and not beside.is_named:
            return self._open(schema, beside, keeps_reference=True)
        made = self._open(schema, beside)
        names = self._gather(schema, skip=_OPTIONS)
        if not names.is_named or not _may_be_object(schema):
            return made
        names = self._gather(schema)
        if names.is_said:
            return made
        names.add(beside)
        made["properties"] = _with_all(made.get("properties"), names.properties)
        if names.patterns:
            made["patternProperties"] = _with_all(made.get("patternProperties"), names.patterns)
        made.pop("unevaluatedProperties", None)
        made["additionalProperties"] = False
        return made

    def _open(self, schema: Any, beside: _Names, *, keeps_reference: bool = False) -> Any:
        """Return a schema that others close, with all other values in it closed."""
        if not isinstance(schema, dict):
            return schema
        self._visit()
        made = dict(schema)
        for key in _NAMED:
            if isinstance(inner := schema.get(key), dict):
                made[key] = {name: self._close(item, _Names()) for name, item in inner.items()}
        for key in _ONE:
            if isinstance(schema.get(key), dict):
                made[key] = self._close(schema[key], _Names())
        for key in _SOME:
            if isinstance(schema.get(key), list):
                made[key] = [self._close(item, _Names()) for item in schema[key]]
        for key in _CONDITIONAL:
            if key in schema:
                made[key] = self._open(schema[key], beside.joined(self._gather(schema)))
        if isinstance(schema.get("allOf"), list):
            made["allOf"] = self._open_all(schema, beside)
        for key in _OPTIONS:
            if isinstance(schema.get(key), list):
                rest = beside.joined(self._gather(schema, skip=(key,)))
                made[key] = [self._close(item, rest) for item in schema[key]]
        if not keeps_reference and isinstance(schema.get("$ref"), str):
            rest = beside.joined(self._gather(schema, skip=("$ref",)))
            made["$ref"] = self._copy(schema["$ref"], rest)
        return made

    def _open_all(self, schema: Mapping[str, Any], beside: _Names) -> list[Any]:
        """Return the schemas of ``allOf``, each beside the others."""
        rest = beside.joined(self._gather(schema, skip=("allOf",)))
        items = schema["allOf"]
        named = [self._gather(item) for item in items]
        opened = []
        for item in items:
            others = rest
            if isinstance(item, dict) and any(key in item for key in _LEADING_ON):
                others = rest.joined(_Names())
                for one, names in zip(items, named, strict=True):
                    self._visit()
                    if one is not item:
                        others.add(names)
            opened.append(self._open(item, others))
        return opened

    def _copy(self, reference: str, beside: _Names) -> str:
        """Return a reference to a copy that is left open, where the definition would be closed."""
        target = follow_reference(self._whole, reference)
        if not isinstance(target, dict):
            return reference
        names = self._gather(target)
        if not names.is_named or names.is_said:
            return reference
        key = (reference, frozenset(beside.properties), frozenset(beside.patterns))
        if key not in self._copies:
            name = f"open {len(self._copies)}"
            while name in (self._whole.get("$defs") or {}):
                name += "'"
            self._copies[key] = name
            self._made[name] = self._open(target, beside)
        return f"#/$defs/{self._copies[key].replace(' ', '%20')}"

    def _gather(self, schema: Any, skip: Iterable[str] = (), chain: tuple[str, ...] = ()) -> _Names:
        """Return what a schema names, with all that it says of the same value.

        Args:
            schema: The schema.
            skip: Its keywords to pass over.
            chain: References that led here.
        """
        names = _Names()
        if not isinstance(schema, dict):
            return names
        self._visit()
        if isinstance(own := schema.get("properties"), dict):
            names.is_named = True
            names.properties |= dict.fromkeys(own)
        if isinstance(own := schema.get("required"), list):
            # What must be there may be there, of whatever kind.
            names.properties |= dict.fromkeys(name for name in own if isinstance(name, str))
        if isinstance(own := schema.get("patternProperties"), dict):
            names.patterns |= dict.fromkeys(own)
        names.is_said = "additionalProperties" in schema or (
            schema.get("unevaluatedProperties", False) is not False
        )
        parts = [schema.get(key) for key in _CONDITIONAL if key not in skip]
        for key in ("allOf", *_OPTIONS):
            if key not in skip and isinstance(schema.get(key), list):
                parts += schema[key]
        for part in parts:
            names.add(self._gather(part, chain=chain))
        reference = schema.get("$ref")
        if "$ref" not in skip and isinstance(reference, str) and reference not in chain:
            if len(chain) == _MAX_CHAIN:
                raise UserInputError(
                    f"the schema's $ref {reference[:60]!r} is reached by {_MAX_CHAIN} others, one "
                    "leading to the next: refer to it more directly.",
                    "structured_outputs",
                )
            names.add(
                self._gather(follow_reference(self._whole, reference), chain=(*chain, reference))
            )
        return names

    def _visit(self) -> None:
        self._visits += 1
        if self._visits > _MAX_VISITS:
            raise UserInputError(
                f"the schema's parts refer to each other so often that closing its objects takes "
                f"more than {_MAX_VISITS:,} steps: give additionalProperties yourself, or make it "
                "smaller.",
                "structured_outputs",
            )


def _may_be_object(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type", "object")
    return "object" in kind if isinstance(kind, list) else kind == "object"


def _with_all(own: Mapping[str, Any] | None, names: Iterable[str]) -> dict[str, Any]:
    """A schema's own properties, and others' behind them, of which it says nothing."""
    return {**(own or {}), **{name: True for name in names if name not in (own or {})}}
