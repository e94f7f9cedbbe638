"""Kinds of request fields."""

from typing import Any

import pytest

from vllm.entrypoints.openai.protocol.fields import (
    HARMLESS_FIELDS,
    NEUTRAL_FIELDS,
    check_extra_fields,
    ignored_fields_header,
)
from vllm.entrypoints.openai.protocol.requests import ChatCompletionRequest, CompletionRequest
from vllm.exceptions import UnsupportedFeatureError


def test_neutral_values_pass_and_others_are_named() -> None:
    for name, field in NEUTRAL_FIELDS.items():
        for value in (None, *field.values):
            assert check_extra_fields({name: value}) == []
        with pytest.raises(UnsupportedFeatureError, match=name) as caught:
            check_extra_fields({name: {"something": "else"}})
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("length_penalty", 1.0), ("best_of", 1), ("modalities", ["text"])],
)
def test_json_spellings_of_neutral_values(name: str, value: Any) -> None:
    assert check_extra_fields({name: value}) == []


@pytest.mark.parametrize(
    ("name", "value"), [("use_beam_search", 0), ("best_of", True), ("length_penalty", True)]
)
def test_numbers_and_booleans_differ(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedFeatureError):
        check_extra_fields({name: value})


def test_tools() -> None:
    assert check_extra_fields({"tools": None}) == []
    assert check_extra_fields({"tool_choice": "none", "parallel_tool_calls": False}) == []
    for asked in ({"tools": []}, {"tools": [{}]}, {"tool_choice": "auto"}):
        with pytest.raises(UnsupportedFeatureError, match="/v1/chat/completions"):
            check_extra_fields(asked)


def test_only_unknown_names_are_reported() -> None:
    fields = {"user": "u", "best_of": 1, "strange": 1, "parallel_tool_calls": True}
    assert check_extra_fields(fields) == ["strange"]
    assert check_extra_fields(None) == []


def test_no_field_has_two_kinds() -> None:
    honoured = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    assert not honoured & set(NEUTRAL_FIELDS)
    assert not honoured & HARMLESS_FIELDS
    assert not set(NEUTRAL_FIELDS) & HARMLESS_FIELDS


def test_the_header_carries_only_what_a_header_can() -> None:
    assert ignored_fields_header([]) == {}
    header = ignored_fields_header(["a b", "ü\n", "\ud800", "x" * 500, *map(str, range(100))])
    value = header["X-Ignored-Fields"]
    assert value.isascii()
    assert value.isprintable()
    assert len(value) < 3000
