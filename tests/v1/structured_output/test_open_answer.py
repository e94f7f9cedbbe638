"""What went on in answers between tags."""

import json
from typing import Any

import pytest

from vllm.parser.forced_calls import AnswerGrammar, answer_tag
from vllm.parser.grammar_formats import json_of
from vllm.parser.registry import REASONING_PARSERS
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers.chat_tools import parse_tools
from vllm.v1.structured_output.open_answer import find_open_answer, must_hold_value

_SCHEMA = {
    "type": "object",
    "properties": {"t": {"type": "string"}, "l": {"type": "array"}},
    "required": ["t", "l"],
}
_TOOLS = parse_tools([{"function": {"name": "f", "parameters": _SCHEMA}}])
_ON = "so on and " * 9
_D = "｜DSML｜"
_CALL = '<tool_call>\n{"name": "f", "arguments": '


def _params(dialect: str, **asked: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(
        structural_tag=answer_tag(dialect, AnswerGrammar(_TOOLS, **asked))
    )


@pytest.mark.parametrize(
    ("dialect", "text", "said"),
    [
        ("hermes", f'{_CALL}{{"t": "{_ON}', "unfinished text at $.t"),
        (
            "hermes",
            f'{_CALL}{{"t": "a", "l": []}}}}\n</tool_call>\n{_CALL}{{"t": "{_ON}',
            "unfinished text at $.t",
        ),
        ("hermes", f'{_CALL}{{"t": "a", "l": [{"1, " * 30}', "unfinished list at $.l"),
        ("hermes", "<tool_call>\n", None),
        (
            "hermes",
            f'{_CALL}{{"t": "a", "l": []}}}}\n</tool_call>\nSee def f() {{ x, "hel',
            None,
        ),
        ("hermes", f'{_CALL}{{"t": "a", "l": []}}}}\n</tool', None),
        (
            "qwen3_coder",
            f"<tool_call>\n<function=f>\n<parameter=t>\n{_ON}",
            "unfinished text at <parameter=t>",
        ),
        (
            "qwen3_coder",
            '<tool_call>\n<function=f>\n<parameter=t>\n"a\n</parameter>\n<parameter=l>\n['
            + "1, " * 9,
            "unfinished list at $",
        ),
        ("pythonic", f'[f(t="{_ON}', "unfinished text at $"),
        ("pythonic", f'[f(t="a", l=[{"1, " * 30}', "unfinished list at $"),
        ("kimi_k2", f'<|tool_call_argument_begin|>{{"t": "{_ON}', "unfinished text at $.t"),
        (
            "deepseek_v4",
            f'<{_D}invoke name="f">\n<{_D}parameter name="t" string="true">{_ON}',
            f'unfinished text at <{_D}parameter name="t" string="true">',
        ),
    ],
)
def test_calls(dialect: str, text: str, said: str | None) -> None:
    part = find_open_answer(text, _params(dialect))
    assert (None if part is None else part.short) == said


@pytest.mark.parametrize("closed", ["", "]" * 2_000 + "}}\n</tool"])
def test_more_brackets_than_python_reads_are_no_error(closed: str) -> None:
    part = find_open_answer(f'{_CALL}{{"l": ' + "[" * 2_000 + closed, _params("hermes"))
    assert (part and part.kind) == (None if closed else "nesting")


def test_an_answer_beside_calls_and_a_thought_before_both() -> None:
    asked = _params("hermes", form=json_of(_SCHEMA), thought=REASONING_PARSERS["qwen3"])
    for text, said in (
        (f'{{"t": "{_ON}', "unfinished text at $.t"),
        (f"<think>{_ON}", "unfinished text at <think>"),
        (f'<think>"</think>\n\n{{"t": "{_ON}', "unfinished text at $.t"),
        (f'<think>a</think>\n\n{_CALL}{{"t": "{_ON}', "unfinished text at $.t"),
    ):
        part = find_open_answer(text, asked)
        assert part is not None
        assert part.short == said


def test_other_grammars_have_no_values() -> None:
    for asked in (
        {"regex": "a+"},
        {"choice": ["a"]},
        {"structural_tag": json.dumps({"format": 5})},
    ):
        assert find_open_answer("aaa", StructuredOutputsParams(**asked)) is None  # type: ignore[arg-type]


def _triggered(**asked: bool) -> StructuredOutputsParams:
    call = {"type": "tag", "begin": "<c>", "content": json_of(_SCHEMA), "end": "</c>"}
    tags = {"type": "triggered_tags", "triggers": ["<c>"], "tags": [call], **asked}
    return StructuredOutputsParams(
        structural_tag=json.dumps({"type": "structural_tag", "format": tags})
    )


@pytest.mark.parametrize(
    ("asked", "must"),
    [
        (StructuredOutputsParams(json={}), True),
        (StructuredOutputsParams(regex="a+"), False),
        (StructuredOutputsParams(choice=["a", "b"]), False),
        (_params("hermes"), True),
        (_params("hermes", form=json_of(_SCHEMA)), True),
        (_triggered(), False),
        (_triggered(at_least_one=True), True),
        (_params("qwen3_coder"), True),
        (_params("deepseek_v4"), True),
        (_params("pythonic"), True),
    ],
)
def test_what_must_hold_a_value(asked: StructuredOutputsParams, must: bool) -> None:
    assert must_hold_value(asked) == must


def test_where_a_part_stands_is_one_short_line() -> None:
    begin = "<c>\nWARNING forged\x1b[2J" + "x" * 50_000
    text = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": "</c>"}
    tag = json.dumps({"type": "structural_tag", "format": text})
    part = find_open_answer(begin + _ON, StructuredOutputsParams(structural_tag=tag))
    assert part is not None
    assert part.short.isprintable()
    assert len(part.short) < 250
