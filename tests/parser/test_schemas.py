"""What a schema says of arguments; ``test_faults`` has the values that models write."""

from typing import Any

import pytest

from vllm.parser.schemas import Schema

ANY = frozenset(["null", "boolean", "integer", "number", "string", "array", "object"])
LOOP = {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}}
NESTED: dict[str, Any] = {"allOf": []}
NESTED["allOf"].append(NESTED)


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({}, ANY),
        (True, ANY),
        (None, ANY),
        ("x", ANY),
        ({"type": "any"}, ANY),
        ({"type": ["string", 5]}, ANY),
        ({"type": "number"}, {"integer", "number"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"enum": [1, "a"]}, {"integer", "number", "string"}),
        ({"const": None}, {"null"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["string", "array"]}]}, {"string"}),
        ({"anyOf": [{"type": "string"}, {}]}, ANY),
        # What rules itself out says nothing.
        ({"allOf": [{"type": "string"}, {"type": "array"}]}, ANY),
        (LOOP, ANY),
        (NESTED, ANY),
    ],
)
def test_kinds(schema: Any, kinds: frozenset[str]) -> None:
    assert Schema(schema).kinds == kinds


@pytest.mark.parametrize(
    ("schema", "takes"),
    [
        ({"type": "string"}, True),
        ({"type": ["string", "null"]}, True),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, True),
        ({"type": "string", "minLength": 1}, False),
        ({"type": "string", "enum": ["a"]}, False),
        ({"type": "string", "not": {"const": "a"}}, False),
        ({"allOf": [{"type": "string"}, {"pattern": "a"}]}, False),
        ({"type": "integer"}, False),
        ({}, False),
        (LOOP, False),
        (NESTED, False),
    ],
)
def test_any_text(schema: Any, takes: bool) -> None:
    assert Schema(schema).takes_any_text is takes


@pytest.mark.parametrize(
    ("schema", "value", "takes"),
    [
        ({"type": "integer"}, True, False),
        ({"type": "integer"}, 1.0, True),
        ({"type": "number", "minimum": 1, "exclusiveMaximum": 3}, 3, False),
        ({"enum": [1]}, True, False),
        ({"enum": [[1, 2]]}, [1, 2], True),
        ({"const": {"a": 1}}, {"a": 2}, False),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, 5, False),
        ({"not": {"type": "string"}}, "x", False),
        ({"required": ["a"]}, {}, False),
        ({"properties": {"a": {"type": "string"}}}, {"a": 1}, False),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"a": 1, "b": 1}, False),
        ({"patternProperties": {"^x": {"type": "string"}}}, {"x1": 1}, False),
        ({"additionalProperties": {"type": "string"}}, {"a": "x"}, True),
        ({"prefixItems": [{"type": "string"}], "items": {"type": "integer"}}, ["a", 1], True),
        ({"prefixItems": [{"type": "string"}], "items": {"type": "integer"}}, ["a", "b"], False),
        ({"items": False}, [1], False),
        ({"maxLength": 1}, "ab", False),
        ({"minItems": 1}, [], False),
        ({"$ref": "https://elsewhere/schema"}, 5, True),
        (LOOP, 5, True),
        (NESTED, 5, True),
    ],
)
def test_values(schema: Any, value: Any, takes: bool) -> None:
    assert Schema(schema).takes(value) is takes


NULLABLE = {"type": ["string", "null"]}
FLAG = {"type": ["boolean", "string"]}


@pytest.mark.parametrize("schema", [NULLABLE, {"type": "integer"}, {}, FLAG, {"enum": ["a", None]}])
@pytest.mark.parametrize(
    "text",
    [
        *("null", "nullx", " None ", "-1.5e3 ", "-1.5e3x", "[1", "{", "true", "trues", "x"),
        *('"a"', "'a'", "1" * 600, "", "  "),
    ],
)
def test_what_can_mean_nothing_more_never_can_again(schema: Any, text: str) -> None:
    verdicts = [Schema(schema).may_mean_more(text[:n]) for n in range(len(text) + 1)]
    assert verdicts == sorted(verdicts, reverse=True)
