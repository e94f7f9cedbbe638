"""The end of the reasoning is found wherever steps and drafts cut the answer."""

import random

import pytest

from vllm.sampling_params import ReasoningSpan, StructuredOutputsParams
from vllm.v1.structured_output.reasoning import ReasoningTracker
from vllm.v1.structured_output.request import StructuredOutputRequest


@pytest.mark.parametrize("seed", range(20))
def test_any_split_finds_the_same_end(seed: int) -> None:
    rng = random.Random(seed)
    ends = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
    tokens = [rng.randrange(3) for _ in range(40)]
    found = (i for i in range(len(ends), 41) if tokens[i - len(ends) : i] == ends)
    expected = next(found, None)
    request = StructuredOutputRequest(
        StructuredOutputsParams(regex="a"),
        reasoning_ended=False,
        reasoning=ReasoningTracker(ReasoningSpan(ends)),
    )
    rest: list[int] = []
    position = 0
    while position < len(tokens):
        size = rng.randrange(1, 6)
        piece = tokens[position : position + size]
        rest += piece if request.reasoning_ended else request.pass_reasoning(piece)
        position += size
    assert request.reasoning_ended is (expected is not None)
    assert rest == ([] if expected is None else tokens[expected:])


def test_an_answer_that_does_not_begin_to_reason_has_none() -> None:
    span = ReasoningSpan([9], start_token_ids=[2])
    tracker = ReasoningTracker(span)
    assert tracker.opening_id == 2
    assert tracker.find_end([5, 9]) == 0
    assert tracker.find_end([2, 5, 9, 4]) == 3
    assert tracker.find_end([]) is None
    tracker.follow([2])
    assert tracker.opening_id is None
    assert tracker.find_end([5]) is None


def test_without_a_span_nothing_ends() -> None:
    request = StructuredOutputRequest(StructuredOutputsParams(regex="a"), reasoning_ended=False)
    assert request.pass_reasoning([1, 2]) == []
    assert request.reasoning_ended is False
