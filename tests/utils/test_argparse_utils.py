"""The command line's habits."""

import argparse
from typing import Any

import pytest

from vllm.utils.argparse_utils import (
    FlexibleArgumentParser,
    RefusedFlag,
    human_int,
    human_int_or_auto,
    json_object,
    json_string_list,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-1", -1),
        ("4096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("2m", 2_000_000),
        ("2M", 2 << 20),
        ("1.5k", 1500),
        ("25.6k", 25600),
        ("1G", 1 << 30),
        ("9007199254740993", 9007199254740993),
        ("1,000", 1000),
    ],
)
def test_human_numbers(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1x", "0x10", "1 k", "1.0001k", "nan", "auto"])
def test_no_numbers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        human_int(text)


def test_auto() -> None:
    assert human_int_or_auto("auto") == human_int_or_auto("-1") == -1
    assert human_int_or_auto("4k") == 4000


def test_json() -> None:
    assert json_object('{"a": 1}') == {"a": 1}
    assert json_string_list('["a", "b"]') == ["a", "b"]
    assert json_string_list("*") == ["*"]
    for parse, text in ((json_object, "[1]"), (json_object, "{"), (json_string_list, "[1]")):
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)


@pytest.fixture
def parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog="p")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--max-model-len", type=human_int)
    parser.add_argument("--text")
    parser.add_refused_flags(
        [
            RefusedFlag(("--tensor-parallel-size", "-tp"), ("1",)),
            RefusedFlag(("--enable-lora",), is_switch=True),
            RefusedFlag(("--root-path",), ("",)),
        ]
    )
    return parser


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-model-len", "1k"],
        ["--max_model_len", "1k"],
        ["--max_model-len=1k"],
    ],
)
def test_both_spellings(parser: FlexibleArgumentParser, arguments: list[str]) -> None:
    assert parser.parse_args(arguments).max_model_len == 1000


def test_values_keep_their_underscores(parser: FlexibleArgumentParser) -> None:
    assert parser.parse_args(["--text=a_b"]).text == "a_b"
    assert parser.parse_args(["a_b", "--text", "c_d"]).text == "c_d"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-tp", "1"],
        ["--tensor_parallel_size=1"],
        ["--no-enable-lora"],
        ["--root-path", ""],
    ],
)
def test_harmless_values_pass_and_leave_no_trace(
    parser: FlexibleArgumentParser, arguments: list[str]
) -> None:
    expected = vars(parser.parse_args(["m"]))
    assert vars(parser.parse_args(["m", *arguments])) == expected


def _error(parser: FlexibleArgumentParser, arguments: list[str], capsys: Any) -> str:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(arguments)
    assert caught.value.code == 2
    return str(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["-tp", "8"], "--tensor-parallel-size 8"),
        (["--tensor-parallel-size"], "--tensor-parallel-size"),
        (["--enable_lora"], "--enable-lora"),
        (["--root-path", "/x"], "--root-path /x"),
    ],
)
def test_known_flags_are_refused_by_name(
    parser: FlexibleArgumentParser, arguments: list[str], name: str, capsys: Any
) -> None:
    assert f"{name} is known but not supported yet" in _error(parser, arguments, capsys)


def test_unknown_flags_get_a_suggestion(parser: FlexibleArgumentParser, capsys: Any) -> None:
    assert "did you mean --max-model-len?" in _error(parser, ["--max-modl-len", "3"], capsys)
    assert "see --help" in _error(parser, ["--zzzzzz"], capsys)
    assert "unknown flag --max-model" in _error(parser, ["--max-model", "3"], capsys)
    assert "unexpected argument" in _error(parser, ["a", "b"], capsys)
