"""``--json-flag.key value``."""

import argparse
import json
from typing import Any

import pytest

from vllm.utils.argparse_utils import FlexibleArgumentParser, json_object


@pytest.fixture
def parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog="p")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--options", "-o", type=json_object)
    parser.add_argument("--other", type=json_object)
    parser.add_argument("--number", type=float)
    return parser


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--options.a", "1"], {"a": 1}),
        (["--options.a=x", "--options.b.c", "true"], {"a": "x", "b": {"c": True}}),
        (["--options.b.c", "[1, 2]", "--options.b.d", '"5"'], {"b": {"c": [1, 2], "d": "5"}}),
        (["--options.list+", "1", "--options.list+", "two"], {"list": [1, "two"]}),
        (["-o.a_b", "null"], {"a_b": None}),
        (["--options.a", "1", "--options.a", "2"], {"a": 2}),
    ],
)
def test_keys_make_an_object(parser: Any, arguments: list[str], value: dict[str, Any]) -> None:
    assert parser.parse_args(arguments).options == value
    assert parser.parse_args(["--options", json.dumps(value)]).options == value


def test_others_stay_as_they_are(parser: Any) -> None:
    arguments = ["--number", "1.5", "--options.a", "1", "--other.a", "2"]
    arguments += ["--", "a.b", "--options.x"]
    expected = argparse.Namespace(
        words=["a.b", "--options.x"], options={"a": 1}, other={"a": 2}, number=1.5
    )
    assert parser.parse_args(arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--options", "{}", "--options.a", "1"], "choose one"),
        (["--options.", "1"], "names no key"),
        (["--options.a", "1", "--options.a.b", "2"], "'a' has a value already"),
        (["--options.a", "1", "--options.a+", "2"], "no list"),
        (["--optoins.a", "1"], "unknown flag --optoins.a"),
    ],
)
def test_what_does_not_fit_is_told(
    parser: Any, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(arguments)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
