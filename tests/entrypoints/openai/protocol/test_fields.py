"""Kinds of request fields."""

from typing import Any

import pytest

from vllm.entrypoints.openai.protocol.fields import (
    CHAT,
    COMPLETIONS,
    check_extra_fields,
    ignored_fields_header,
)
from vllm.exceptions import UnsupportedFeatureError


@pytest.mark.parametrize(
    ("name", "value"),
    [("length_penalty", 1.0), ("best_of", 1), ("modalities", ["text"])],
)
def test_json_spellings_of_neutral_values(name: str, value: Any) -> None:
    assert check_extra_fields({name: value}, CHAT) == []


@pytest.mark.parametrize(
    ("name", "value"), [("use_beam_search", 0), ("best_of", True), ("length_penalty", True)]
)
def test_numbers_and_booleans_differ(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedFeatureError):
        check_extra_fields({name: value})


def test_tools_of_chats_on_completions() -> None:
    assert check_extra_fields({"tools": None, "tool_choice": "none"}, COMPLETIONS) == []
    for asked in ({"tools": []}, {"tools": [{}]}, {"tool_choice": "auto"}):
        with pytest.raises(UnsupportedFeatureError, match="/v1/chat/completions"):
            check_extra_fields(asked, COMPLETIONS)


def test_names_without_effect_are_reported() -> None:
    fields = {"user": "u", "best_of": 1, "strange": 1, "store": None}
    assert check_extra_fields(fields) == ["user", "strange"]
    assert check_extra_fields(None) == []


def test_the_header_carries_only_what_a_header_can() -> None:
    assert ignored_fields_header([]) == {}
    header = ignored_fields_header(["a b", "ü\n", "\ud800", "x" * 500, *map(str, range(100))])
    value = header["X-Ignored-Fields"]
    assert value.isascii()
    assert value.isprintable()
    assert len(value) < 3000
