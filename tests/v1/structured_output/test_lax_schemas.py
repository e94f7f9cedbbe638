"""Values that a grammar cannot enforce are passed over where nobody promised to enforce them."""

import json
from typing import Any

import pytest

from vllm.exceptions import UserInputError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.lax_schemas import is_lax, loosen

BEYOND: list[dict[str, Any]] = [
    {"type": "string", "pattern": "^(?!x).*$"},
    {"type": "string", "pattern": "^(?<=a)b"},
    {"type": "string", "pattern": "(a)\\1"},
    {"type": "string", "pattern": "\\bfoo\\b"},
    {"type": "string", "pattern": "["},
    {"type": "string", "pattern": "\\Aabc\\Z"},
    {"type": "string", "pattern": 5},
    {"type": "string", "minLength": -1},
    {"type": "string", "maxLength": 2.5},
    {"type": "integer", "minimum": -9223372036854775808},
    {"type": "integer", "minimum": -(2**63) + 1},
    {"type": "number", "maximum": 1e30},
    {"type": "number", "minimum": -1e308},
    {"type": "number", "multipleOf": 1e-30},
    {"type": "number", "multipleOf": 0},
    {"type": "integer", "minimum": "3"},
    {"type": ["string", "null"], "pattern": "(?=a)"},
    {"pattern": "(?=a)"},
]


@pytest.mark.parametrize("schema", BEYOND, ids=lambda s: json.dumps(s)[:40])
def test_what_cannot_be_enforced_is_passed_over(reader, schema: dict[str, Any]) -> None:
    (beyond,) = schema.keys() - {"type"}
    assert beyond not in loosen(schema)
    for place in (
        {"properties": {"a": schema}},
        {"properties": {"a": {"type": "array", "items": schema}}},
        {"properties": {"a": {"anyOf": [schema, {"type": "boolean"}]}}},
        {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": schema}},
        {"properties": {}, "additionalProperties": schema},
    ):
        lax = {"type": "object", **place, "x-guidance": {"lenient": True}}
        assert is_lax(lax)
        reader.backend.compile(StructuredOutputsParams(json=lax))


@pytest.mark.parametrize("schema", BEYOND[:4] + BEYOND[9:12], ids=lambda s: json.dumps(s)[:40])
def test_a_strict_schema_is_refused_by_name(reader, schema: dict[str, Any]) -> None:
    strict = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(UserInputError, match=r"structured_outputs.json cannot be compiled"):
        reader.backend.compile(StructuredOutputsParams(json=strict))


def test_what_stands_beside_is_enforced_still(reader) -> None:
    schema = {"type": "string", "pattern": "^(?!x)", "maxLength": 3}
    assert loosen(schema) == {"type": "string", "maxLength": 3}
    asked = StructuredOutputsParams(json={**schema, "x-guidance": {"lenient": True}})
    assert reader.accepts(asked, '"xyz"')
    assert not reader.accepts(asked, '"wxyz"')


def test_patterns_of_names_that_cannot_be_enforced_leave_names_open(reader) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^(?!x)": {"type": "integer"}, "^y": {"type": "string"}},
        "additionalProperties": False,
        "x-guidance": {"lenient": True},
    }
    asked = StructuredOutputsParams(json=schema)
    assert reader.accepts(asked, '{"a": 1, "b": 2, "y": "z"}')
    assert not reader.accepts(asked, '{"y": 3}')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "string", "pattern": "^a$", "minLength": 2},
    ],
)
def test_contradictions_stay(schema: dict[str, Any]) -> None:
    assert loosen(schema) == schema


def test_what_can_be_enforced_stays_as_it_is() -> None:
    schema = {
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "pattern": "^a+$"},
            "minimum": {"type": "integer", "minimum": 0, "maximum": 2**62},
            "list": {"type": "array", "items": [{"type": "number"}], "minItems": 1},
            "any": True,
        },
        "default": {"pattern": "("},
        "required": ["pattern"],
    }
    assert loosen(schema) == schema
