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
    """Processor time of reading a text."""
    parser = CHOICES[family].make_parser(ParseOptions(tools=TOOLS, tool_use=ToolUse.PARSE))
    begin = time.process_time()
    parser.feed(text, [])
    parser.finish("stop")
    return time.process_time() - begin


def opening_marks(family: str) -> list[str]:
    """A third of all marks, another for each family, and what begins a call."""
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
    return [*openings[list(CHOICES).index(family) % 3 :: 3], *begun]


@pytest.mark.parametrize("family", CHOICES)
def test_time_is_linear_in_the_text(family):
    """Eight times the text takes about eight times as long, and not sixty-four."""
    for mark in opening_marks(family):
        number = 4000 // len(mark)

        def is_linear(number: int = number, mark: str = mark) -> bool:
            small = seconds_of(family, mark * number)
            return seconds_of(family, mark * number * 8) < 24 * small + 0.05

        # Another process may take the caches away: what is linear is so in one of three runs.
        assert any(is_linear() for _ in range(3)), mark
