"""Each way to ask for structure: what it lets through, and what not."""

import json
from typing import Any

import pytest

from tests.v1.structured_output.conftest import Reader
from vllm.exceptions import UserInputError
from vllm.sampling_params import StructuredOutputsParams

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"$ref": "#/$defs/y"}},
    "required": ["x"],
    "$defs": {"y": {"enum": ["up", "down"]}},
}
CLOSED = {**POINT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"regex": "[a-f]{2}/\\d+"}, ["ab/12"], ["ab", "xy/1", "ab/"]),
        ({"choice": ["yes", 'a "quoted" one', "é\n"]}, ["yes", 'a "quoted" one', "é\n"], ["y", ""]),
        ({"json": POINT}, ['{"x":1}', '{"x": -2, "y": "up"}'], ['{"y":"up"}', '{"x":1,"z":0}']),
        ({"json": json.dumps(CLOSED)}, ['{\n  "x": 1\n}'], ['{"x":1,"z":0}', '{"x":1.5}']),
        ({"json_object": True}, ["{}", '{"a": [1, null]}'], ["[]", "1", "{", ""]),
        ({"grammar": 'start: "a" b\nb: "b"+ | "c"'}, ["abb", "ac"], ["a", "abc"]),
        ({"grammar": 'root ::= "a" num\nnum ::= [0-9]+'}, ["a12"], ["a"]),
    ],
)
def test_kinds(reader: Reader, asked: dict[str, Any], good: list[str], bad: list[str]) -> None:
    params = StructuredOutputsParams(**asked)
    for text in good:
        assert reader.accepts(params, text), text
    for text in bad:
        assert not reader.accepts(params, text), text


def test_whitespace_is_bounded_and_can_be_forbidden(reader: Reader) -> None:
    loose = StructuredOutputsParams(json=POINT)
    assert reader.accepts(loose, json.dumps({"x": 1, "y": "up"}, indent=4))
    assert not reader.accepts(loose, '{"x":   1}')
    tight = StructuredOutputsParams(json=POINT, disable_any_whitespace=True)
    assert reader.accepts(tight, '{"x":1,"y":"up"}')
    assert not reader.accepts(tight, '{"x": 1}')
    own = StructuredOutputsParams(json=POINT, whitespace_pattern="_")
    assert reader.accepts(own, '{"x":_1}')


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"json": {"type": "thing"}}, "thing"),
        ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "oneOf"),
        ({"grammar": "start: nowhere"}, "nowhere"),
        ({"json": {"$ref": "#"}}, "compiled: no text goes on to match it: its rules"),
        ({"grammar": "what"}, "neither Lark nor GBNF"),
        ({"grammar": "x ::= " + "a" * 70_000}, "characters"),
    ],
)
def test_what_is_no_grammar_says_why(reader: Reader, asked: dict[str, Any], match: str) -> None:
    with pytest.raises(UserInputError, match=match) as error:
        reader.backend.compile(StructuredOutputsParams(**asked))
    assert error.value.param == "structured_outputs"
    assert "<state>" not in str(error.value)
