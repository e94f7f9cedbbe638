"""Objects that hold what their schemas name: against jsonschema's unevaluatedProperties."""

import json
import random
from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.v1.structured_output.conftest import Reader
from vllm.exceptions import UserInputError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.closed_objects import close_objects

NAMES = "abcd"
ONE = {"const": 1}


def named(*names: str, **rest: Any) -> dict[str, Any]:
    """A schema of an object with some properties, which must be there if ``needs`` says so."""
    return {"type": "object", "properties": dict.fromkeys(names, ONE), **rest}


def list_objects() -> Iterator[dict[str, int]]:
    for taken in product((False, True), repeat=len(NAMES)):
        yield {name: 1 for name, is_there in zip(NAMES, taken, strict=True) if is_there}


def accepts(reader: Reader, schema: dict[str, Any], value: dict[str, Any], **options: Any) -> bool:
    """Whether a grammar takes an object in one order of its properties."""
    params = StructuredOutputsParams(
        json={**schema, "x-guidance": {"coerce_one_of": True}},
        disable_any_whitespace=True,
        **options,
    )
    return any(
        reader.accepts(params, json.dumps(dict(order), separators=(",", ":")))
        for order in permutations(value.items())
    )


def choose(schema: dict[str, Any], whole: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas that remain when one option of each choice is taken."""
    found: list[dict[str, Any]] = [{}]
    for key, value in schema.items():
        if key in ("anyOf", "oneOf"):
            ways = [{"allOf": [one]} for option in value for one in choose(option, whole)]
        elif key == "allOf":
            parts = product(*(choose(part, whole) for part in value))
            ways = [{"allOf": list(part)} for part in parts]
        elif key == "$ref":
            target = whole["$defs"][value.rpartition("/")[2]]
            ways = [{"allOf": [one]} for one in choose(target, whole)]
        else:
            ways = [{key: value}]
        found = [
            {**one, **way, "allOf": [*one.get("allOf", ()), *way.get("allOf", ())]}
            for one in found
            for way in ways
        ]
    return found


def is_closed(schema: dict[str, Any], value: dict[str, Any]) -> bool:
    """The rule: valid by some choice of options, with nothing that these do not name."""
    return any(
        Draft202012Validator({**way, "unevaluatedProperties": False}).is_valid(value)
        for way in ({k: v for k, v in one.items() if v != []} for one in choose(schema, schema))
    )


BASE = {"Base": named("a", required=["a"]), "Deep": {"allOf": [{"$ref": "#/$defs/Base"}]}}
# By what they show: each is closed as a whole, and each of its parts stands for others too.
CLUSTERS: dict[str, dict[str, Any]] = {
    "plain": named("a", "b"),
    "none": {"type": "object", "properties": {}},
    "or null": named("a", type=["object", "null"]),
    "untyped": {"properties": {"a": ONE}},
    "all of two": {"allOf": [named("a", required=["a"]), named("b", required=["b"])]},
    "beside all of": {**named("c"), "allOf": [named("a"), {"required": ["a"]}]},
    "nested all of": {"allOf": [{"allOf": [named("a")]}, named("b")]},
    "a base class": {"$defs": BASE, "allOf": [{"$ref": "#/$defs/Base"}, named("b")]},
    "a base's base": {"$defs": BASE, "allOf": [{"$ref": "#/$defs/Deep"}, named("b")]},
    "beside a reference": {"$defs": BASE, "$ref": "#/$defs/Base", **named("c")},
    "only a reference": {"$defs": BASE, "$ref": "#/$defs/Base"},
    "any of": {"anyOf": [named("a", required=["a"]), named("b", required=["b"])]},
    "options": {
        **named("c", required=["c"]),
        "anyOf": [named("a", required=["a"]), named("b", required=["b"])],
    },
    "options that only require": {
        **named("a", "b"),
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "options by reference": {
        "$defs": BASE,
        **named("c"),
        "anyOf": [{"$ref": "#/$defs/Base"}, named("b", required=["b"])],
    },
    "options in all of": {
        "allOf": [named("c"), {"anyOf": [named("a", required=["a"]), named("b", required=["b"])]}]
    },
    "options by reference in all of": {
        "$defs": {"Either": {"anyOf": [named("a", required=["a"]), named("b", required=["b"])]}},
        "allOf": [named("c"), {"$ref": "#/$defs/Either"}],
    },
    "patterns": {**named("a"), "patternProperties": {"^[bc]$": ONE}},
    "unevaluated": {"allOf": [named("a"), named("b")], "unevaluatedProperties": False},
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_an_object_holds_what_its_schemas_name_together(reader: Reader, name: str) -> None:
    schema = CLUSTERS[name]
    for value in list_objects():
        assert accepts(reader, schema, value) == is_closed(schema, value), value


def test_random_schemas(reader: Reader) -> None:
    rng = random.Random(7)

    def draw(depth: int) -> dict[str, Any]:
        kind = rng.choice(["plain", "allOf", "anyOf", "both"] if depth else ["plain"])
        own = rng.sample(NAMES, rng.randrange(1, 3))
        plain = named(*own, required=rng.sample(own, 1))
        parts = [draw(depth - 1) for _ in range(2)] if depth else []
        whole = {"plain": plain, "both": {**plain, "allOf": parts}}
        return whole.get(kind) or {kind: parts}

    for _ in range(20):
        schema = draw(2)
        for value in list_objects():
            assert accepts(reader, schema, value) == is_closed(schema, value), (schema, value)


@pytest.mark.parametrize(
    "opened",
    [
        {**named("a"), "additionalProperties": True},
        {**named("a"), "additionalProperties": ONE},
        {"allOf": [named("a"), {"additionalProperties": True}]},
        {"$defs": {"B": {**named("a"), "additionalProperties": True}}, "$ref": "#/$defs/B"},
        {"type": "object"},
        {"type": "object", "additionalProperties": ONE},
    ],
)
def test_a_schema_can_open_its_objects(reader: Reader, opened: dict[str, Any]) -> None:
    assert accepts(reader, opened, {"d": 1})


def test_a_request_can_open_them(reader: Reader) -> None:
    assert not accepts(reader, named("a"), {"d": 1})
    assert accepts(reader, named("a"), {"d": 1}, disable_additional_properties=False)
    assert not accepts(reader, named("a"), {"d": 1}, disable_additional_properties=True)


def test_values_inside_are_closed_too(reader: Reader) -> None:
    inner = named("a", required=["a"])
    for schema in (
        named("a") | {"properties": {"a": inner}},
        {"type": "object", "additionalProperties": inner},
        {"type": "object", "patternProperties": {"^a$": inner}, "additionalProperties": False},
        {"allOf": [{"properties": {"a": inner}}]},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/I"}}, "$defs": {"I": inner}},
        # A definition that stands for itself here and is part of another there.
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/I"}, "b": {"allOf": [{"$ref": "#/$defs/I"}]}},
            "$defs": {"I": inner},
        },
    ):
        assert accepts(reader, schema, {"a": {"a": 1}})
        assert not accepts(reader, schema, {"a": {"a": 1, "z": 1}})
    listed = {"type": "array", "items": inner}
    assert reader.accepts(StructuredOutputsParams(json=listed), '[{"a": 1}]')
    assert not reader.accepts(StructuredOutputsParams(json=listed), '[{"a": 1, "z": 1}]')


def test_what_is_required_and_not_described_is_named_too(reader: Reader) -> None:
    schema = named("a", required=["b"])
    assert accepts(reader, schema, {"a": 1, "b": 7})
    assert not accepts(reader, schema, {"a": 1, "b": 7, "c": 1})


def test_trees_refer_to_themselves(reader: Reader) -> None:
    node = {"allOf": [{"$ref": "#/$defs/Base"}], "properties": {"next": {"$ref": "#/$defs/Node"}}}
    schema = {"$ref": "#/$defs/Node", "$defs": {**BASE, "Node": node}}
    assert accepts(reader, schema, {"a": 1, "next": {"a": 1, "next": {"a": 1}}})
    assert not accepts(reader, schema, {"a": 1, "next": {"a": 1, "z": 1}})


def test_what_is_data_stays_as_it_is() -> None:
    data = {"properties": {"x": 1}}
    schema = {"enum": [data], "const": data, "default": data, "examples": [data], "not": data}
    assert close_objects(dict(schema)) == schema


def test_what_takes_too_long_is_refused() -> None:
    many = {"anyOf": [named("a")] * 3}
    with pytest.raises(UserInputError, match="give additionalProperties yourself"):
        close_objects({"allOf": [dict(many) for _ in range(1000)]})
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(200)}
    with pytest.raises(UserInputError, match="refer to it more directly"):
        close_objects({"$defs": chain, "allOf": [{"$ref": "#/$defs/d0"}]})
    loop = {"$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}, named("a")]}}}
    assert close_objects({**loop, "allOf": [{"$ref": "#/$defs/A"}, named("b")]})
