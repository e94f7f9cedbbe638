"""``vllm parse``."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.parser.reading import D
from vllm.entrypoints.cli.main import main

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }
]
CALL = (
    f'\n\n<{D}tool_calls>\n<{D}invoke name="find">\n<{D}parameter name="text" string="true">x'
    f"</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>"
)


@pytest.fixture
def parse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    def run(answer: str, *flags: str, tools: Any = TOOLS) -> tuple[int, Any]:
        (tmp_path / "tools.json").write_text(json.dumps(tools), "utf-8")
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        code = main(["parse", "--tools", str(tmp_path / "tools.json"), *flags])
        printed = capsys.readouterr()
        return code, printed.out or printed.err

    return run


def test_a_recorded_answer_is_read_as_a_server_reads_it(parse: Any) -> None:
    said = f"hm</think>So.{CALL}"
    code, printed = parse(said, "--model", "deepseek-v4", "--in-reasoning", "--json")
    told = json.loads(printed)
    assert code == 0
    assert (told["reasoning"], told["content"], told["malformed"]) == ("hm", "So.", [])
    ((name, arguments),) = [(call["name"], call["arguments"]) for call in told["tool_calls"]]
    assert (name, json.loads(arguments)) == ("find", {"text": "x"})
    assert [(part["kind"], part["text"]) for part in told["parts"]] == [
        ("reasoning", "hm"),
        ("markup", "</think>"),
        ("content", "So."),
        ("call", CALL),
    ]


def test_why_a_call_is_malformed_is_said(parse: Any) -> None:
    said = "So.<tool_call>\n<function=later>\n</function>\n</tool_call>"
    code, printed = parse(said, "--tool-call-parser", "qwen3_coder")
    assert code == 3
    assert "no tool is named 'later'" in printed
    assert "content    'So.<tool_call>" in printed
    open_ = "<tool_call>\n<function=find>\n<parameter=text>\nx"
    code, printed = parse(open_, "--tool-call-parser", "qwen3_coder", "--json")
    assert code == 3
    assert [call["reason"] for call in json.loads(printed)["malformed"]] == [
        "the call is not closed"
    ]
    code, printed = parse(open_, "--tool-call-parser", "qwen3_coder", "--finish-reason", "length")
    assert code == 0
    assert "broken call" in printed


@pytest.mark.parametrize(
    "tools",
    [
        {"model": "m", "tools": TOOLS},
        [{"type": "function", "name": "find", "parameters": {}}],
        [{"name": "find", "input_schema": {"type": "object"}}],
    ],
)
def test_tools_of_any_api(parse: Any, tools: Any) -> None:
    said = "<tool_call>find\n<arg_key>text</arg_key><arg_value>x</arg_value></tool_call>"
    code, printed = parse(said, "--tool-call-parser", "glm", tools=tools)
    assert code == 0
    assert 'call       find {"text": "x"}' in printed


@pytest.mark.parametrize(
    ("flags", "tools", "said"),
    [
        ((), TOOLS, "give --model"),
        (("--tool-call-parser", "glm"), {"x": 1}, "holds no tools"),
        (("--tool-call-parser", "glm"), [{"type": "function"}], "must be an object with a name"),
        (("--tool-call-parser", "glm2"), TOOLS, "is unknown"),
    ],
)
def test_what_is_wrong_is_said(parse: Any, flags: tuple[str, ...], tools: Any, said: str) -> None:
    code, printed = parse("", *flags, tools=tools)
    assert code == 2
    assert said in printed
