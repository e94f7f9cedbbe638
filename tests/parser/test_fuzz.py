"""Broken answers are read: nothing is lost, made up, or told otherwise where it is streamed."""

import random
import time

import pytest

from tests.parser.fuzz import CHOICES, MARKS, TOOLS, Case, find_fault, find_faults
from vllm.parser.interface import ParseOptions, ToolUse

SEED = 20261128


def test_broken_answers():
    faults = find_faults(2000, SEED)
    assert not faults, f"seed {SEED}: {faults[:3]}"


@pytest.mark.parametrize("family", CHOICES)
def test_well_formed_answers_keep_their_calls(family):
    """The assertions of the fuzzer hold for what models are taught to write, too."""
    for text in ("", " ", "\n", "Yes.", "<", "[", "{", "<think>", "</think>"):
        assert find_fault(Case(family, text, "stop", False), random.Random(0)) is None


def seconds_of(family: str, text: str) -> float:
    """Processor time of reading a text, the best of three."""

    def once() -> float:
        parser = CHOICES[family].make_parser(ParseOptions(tools=TOOLS, tool_use=ToolUse.PARSE))
        begin = time.process_time()
        parser.feed(text, [])
        parser.finish("stop")
        return time.process_time() - begin

    return min(once() for _ in range(3))


def opening_marks() -> list[str]:
    begun = [
        '<tool_call>\n{"name": "find", "arguments": {"a": [',
        "<tool_call>\n<function=find>\n<parameter=cmd>\n</parameter>\n",
        "<tool_call>find\n<arg_key>cmd</arg_key>\n<arg_value></arg_value>",
        "<|tool_call>call:find{a:[",
        "[find(a=[",
        '[TOOL_CALLS][{"name": "find", ',
        " ",
        "\n",
    ]
    openings = [mark for mark in MARKS if mark[0] in "<[" and "/" not in mark and "end" not in mark]
    return [*openings[::2], *begun]


@pytest.mark.parametrize("family", CHOICES)
def test_time_is_linear_in_the_text(family):
    """Four times the text takes about four times as long, and not sixteen."""
    for mark in opening_marks():
        number = 8000 // len(mark)
        small = seconds_of(family, mark * number)
        if small < 0.002:
            number *= 4
            small = seconds_of(family, mark * number)
        assert seconds_of(family, mark * number * 4) < 10 * small + 0.05, mark
