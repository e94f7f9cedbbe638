"""Three dialects of asking for structure."""

import json
from typing import Any

import pytest

from vllm.entrypoints.openai.protocol.requests import CompletionRequest
from vllm.entrypoints.openai.structured_fields import make_structured_outputs
from vllm.exceptions import UserInputError
from vllm.sampling_params import StructuredOutputsParams

SCHEMA = {"type": "integer"}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


def make(**fields: Any) -> StructuredOutputsParams | None:
    return make_structured_outputs(CompletionRequest.model_validate({"prompt": "x", **fields}))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"response_format": TAG}, {"structural_tag": json.dumps(TAG)}),
        ({"structured_outputs": {"structural_tag": TAG}}, {"structural_tag": json.dumps(TAG)}),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": None, "disable_fallback": True}},
            {"json": SCHEMA},
        ),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            {"regex": "a", "whitespace_pattern": " "},
        ),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": "{}", "guided_whitespace_pattern": ""}, {"json": "{}"}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "start: X"}, {"grammar": "start: X"}),
    ],
)
def test_dialects(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    made = make(**fields)
    if made is not None and made.whitespace_pattern == "":
        made.whitespace_pattern = None
    assert made == (None if expected is None else StructuredOutputsParams(**expected))


def test_older_names_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        make(guided_regex="a")
    assert "guided_regex" in caplog.text


def test_the_same_said_twice_is_said_once() -> None:
    """Some clients speak to servers of different ages in one request."""
    both = make(structured_outputs={"grammar": "root ::= [a]"}, guided_grammar="root ::= [a]")
    assert both == make(guided_grammar="root ::= [a]")
    text = json.dumps(SCHEMA, indent=1)
    assert make(structured_outputs={"json": SCHEMA}, guided_json=text) == make(guided_json=SCHEMA)
    for text in ("{", "[" * 100_000):
        with pytest.raises(UserInputError, match="both ask for structure"):
            make(structured_outputs={"json": SCHEMA}, guided_json=text)


@pytest.mark.parametrize(
    ("form", "same"),
    [
        ({"type": "json_object", "value": SCHEMA}, {"json": SCHEMA}),
        ({"type": "json", "value": SCHEMA}, {"json": SCHEMA}),
        ({"type": "regex", "value": "[0-9]"}, {"regex": "[0-9]"}),
    ],
)
def test_values_beside_the_type(form: dict[str, Any], same: dict[str, Any]) -> None:
    assert make(response_format=form) == make(structured_outputs=same)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"response_format": TAG, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "structured_outputs"),
        ({"guided_json": 3}, "structured_outputs"),
    ],
)
def test_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UserInputError) as error:
        make(**fields)
    assert error.value.param == param
