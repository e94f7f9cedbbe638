"""Pieces, and the whole that they join to."""

import pytest

from vllm.parser.pieces import (
    AnswerBuilder,
    ContentText,
    ReasoningText,
    ThoughtClosed,
    ToolCallStart,
    settle_thoughts,
)

CALL = ToolCallStart(0, "a", "f")


@pytest.mark.parametrize(
    ("pieces", "settled"),
    [
        ([ContentText("one"), ContentText("two"), ThoughtClosed(3)],
         [ContentText("one"), ReasoningText("two")]),
        ([ContentText("onetwo"), ThoughtClosed(3)], [ContentText("one"), ReasoningText("two")]),
        ([ContentText("one"), ContentText("two"), ThoughtClosed(6), ContentText("x")],
         [ReasoningText("one"), ReasoningText("two"), ContentText("x")]),
        ([ContentText("one"), CALL, ContentText("two"), ThoughtClosed(3)],
         [ContentText("one"), CALL, ReasoningText("two")]),
        # Its beginning was told before.
        ([ContentText("two"), ThoughtClosed(5)], [ContentText("two")]),
        ([CALL, ThoughtClosed(5)], [CALL]),
    ],
)  # fmt: skip
def test_content_that_was_a_thought(pieces, settled):
    assert settle_thoughts(pieces) == settled
    if sum(len(p.text) for p in pieces if isinstance(p, ContentText)) >= 6:
        one, other = AnswerBuilder(), AnswerBuilder()
        one.add(pieces)
        other.add(settled)
        assert one.answer == other.answer
