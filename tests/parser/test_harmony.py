"""gpt-oss answers."""

import pytest

from tests.parser.reading import calls_of, read
from vllm.parser.registry import ParserChoice

CHOICE = ParserChoice("openai_gptoss", "openai")
CALL = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>"
NEXT = "<|start|>assistant"


def message(channel: str, text: str) -> str:
    return f"<|channel|>{channel}<|message|>{text}"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (message("final", "Yes."), "", "Yes.", []),
        (message("analysis", "hm<") + NEXT + message("final", "a < b"), "hm<", "a < b", []),
        (message("analysis", "hm"), "hm", "", []),
        (message("commentary", "So.") + "<|end|>" + NEXT + CALL + '{"text": "x"}', "", "So.",
         [("find", '{"text": "x"}')]),
        # The recipient may stand with the role, and in the analysis.
        (" to=functions.now<|channel|>analysis<|message|>{}<|call|>", "", "", [("now", "{}")]),
        (CALL + "{}<|call|>" + NEXT + CALL + "{}", "", "", [("find", "{}")] * 2),
        (CALL + "<|call|>", "", "", [("find", "{}")]),
        (CALL + "not JSON<|call|>", "", CALL + "not JSON<|call|>", []),
        ("<|channel|>commentary to=python<|message|>print(1)<|call|>", "",
         "<|channel|>commentary to=python<|message|>print(1)<|call|>", []),
        # Which of two functions its arguments are for, nobody can say.
        ("<|channel|>commentary to=functions.now to=functions.find<|message|>{}<|call|>", "",
         "<|channel|>commentary to=functions.now to=functions.find<|message|>{}<|call|>", []),
        ("<|channel|>commentary to=now to=functions.now<|message|>{}<|call|>", "", "",
         [("now", "{}")]),
        (message("analysis", "hm") + message("final", "Yes."), "hm", "Yes.", []),
        ("No heads at all.", "", "No heads at all.", []),
        ("<|channel|>ana", "", "", []),
        ("", "", "", []),
    ],
)  # fmt: skip
def test_answers(text, reasoning, content, calls):
    answer = read(CHOICE, text)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert calls_of(answer) == calls


def test_a_call_is_whole_when_its_arguments_are():
    for said in ("", " ", '{"text": "x"', '{"text": "x"<|ca'):
        assert read(CHOICE, CALL + said, "length").tool_calls == []
    for said in ("{}", " {}\n<|ca", "{}<|call|>", "{} and more"):
        assert calls_of(read(CHOICE, CALL + said, "length")) == [("find", "{}")]


def test_without_a_reasoning_parser_all_is_content():
    choice = ParserChoice("none", "openai")
    text = message("analysis", "hm ") + "<|end|>" + NEXT + message("final", "Yes.")
    assert read(choice, text).content == "hm Yes."
