"""DeepSeek-V4.1's calls: tags with a space, and V4's too, read in any pieces."""

import json

import pytest

from tests.parser.reading import TOOLS, D, calls_of, pieces_of, read
from vllm.parser.forced_calls import AnswerGrammar, answer_tag
from vllm.parser.pieces import AnswerBuilder
from vllm.parser.registry import ParserChoice, choose_parsers
from vllm.parser.written_calls import CALL_WRITERS
from vllm.tokenizers.tool_calls import MessageCall

CHOICE = ParserChoice("deepseek_v41", "deepseek_v41")


def spelled(gap: str, outer: str) -> str:
    return (
        f'\n\n<{D}{gap}{outer}>\n<{D}{gap}invoke name="find">\n'
        f'<{D}{gap}parameter name="text" string="true">a < b</{D}{gap}parameter>\n'
        f'<{D}{gap}parameter name="limit" string="false">5</{D}{gap}parameter>\n'
        f'</{D}{gap}invoke>\n<{D}{gap}invoke name="now">\n</{D}{gap}invoke>\n</{D}{gap}{outer}>'
    )


@pytest.mark.parametrize(
    ("gap", "outer"), [(" ", "calls"), ("", "tool_calls"), (" ", "tool_calls")]
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_both_spellings(gap: str, outer: str, size: int) -> None:
    text = "hm</think>So:" + spelled(gap, outer)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    builder = AnswerBuilder()
    builder.add(pieces_of(CHOICE, parts, in_reasoning=True))
    answer = builder.answer
    assert (answer.reasoning, answer.content) == ("hm", "So:")
    assert [(name, json.loads(own)) for name, own in calls_of(answer)] == [
        ("find", {"text": "a < b", "limit": 5}),
        ("now", {}),
    ]


def test_a_call_without_the_outer_tag() -> None:
    text = f'<{D} invoke name="find">\n<{D} parameter name="text" string="true">x'
    whole = f"{text}</{D} parameter>\n</{D} invoke>"
    assert calls_of(read(CHOICE, whole)) == [("find", '{"text": "x"}')]
    # What is neither spelling's is text.
    assert read(CHOICE, f"a <{D} > b").content == f"a <{D} > b"


def test_calls_are_written_and_forced_as_they_are_read() -> None:
    call = MessageCall("c", "find", '{"text": "x", "limit": 2}')
    written = CALL_WRITERS["deepseek_v41"]([call])
    assert calls_of(read(CHOICE, written)) == [("find", call.arguments)]
    forced = answer_tag("deepseek_v41", AnswerGrammar(TOOLS))
    shown = json.dumps(json.loads(forced), ensure_ascii=False)
    assert f"<{D} calls>" in shown
    assert f"<{D} invoke" in shown
    assert f"<{D}invoke" not in shown


@pytest.mark.parametrize("model_type", ["deepseek_v41", "deepseek_v41_text"])
def test_the_model_chooses_it(model_type: str) -> None:
    assert choose_parsers(model_type, "") == CHOICE
    assert choose_parsers("deepseek_v4", "") == ParserChoice("deepseek_v4", "deepseek_v4")
