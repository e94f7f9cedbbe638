"""One answer of several."""

from concurrent.futures import Future
from typing import Any

import pytest

from vllm.exceptions import EngineCoreLostError, EngineError
from vllm.v1.engine.data_parallel.gather import Gathering
from vllm.v1.engine.questions import (
    AskHeld,
    CacheSnapshot,
    HeldReply,
    Question,
    ResetCache,
    ViewCache,
)
from vllm.v1.engine.wire import Answer, ErrorInfo
from vllm.v1.messages import HeldPrefix

A, B = (HeldPrefix(name, 32, 1, True, None, 0) for name in "ab")


def gather(question: Question[Any]) -> tuple[list[Future[Answer]], list[Answer]]:
    """Return what three cores are to answer, and where the answer of all comes."""
    calls: list[Future[Answer]] = [Future() for _ in range(3)]
    done: list[Answer] = []
    Gathering(question.to_message(5), calls, done.append)
    return calls, done


@pytest.mark.parametrize(
    ("question", "replies", "merged"),
    [
        (ResetCache(), [True] * 2, True),
        (ResetCache(), [True, False], False),
        (AskHeld("a"), [HeldReply([A], True), HeldReply([B], False)], HeldReply([A, B], True)),
        (ViewCache(), [CacheSnapshot(b"{}", 0.1)], CacheSnapshot(b"{}", 0.1)),
        # Where all died meanwhile, nothing was done.
        (ResetCache(), [], False),
        (AskHeld(), [], HeldReply([], False)),
        (ViewCache(), [], CacheSnapshot(b"", 0.0)),
    ],
)
def test_merged(question: Question[Any], replies: list[Any], merged: Any) -> None:
    calls, done = gather(question)
    # In any order; what a core that died owed is not waited for.
    for rank in reversed(range(len(replies))):
        calls[rank].set_result(question.to_answer(rank, replies[rank]))
    for rank in range(len(replies), 3):
        assert done == []
        calls[rank].set_exception(EngineCoreLostError("it died"))
    (answer,) = done
    assert answer.call_id == 5
    assert question.read(answer) == merged


def test_nobody_is_left() -> None:
    done: list[Answer] = []
    Gathering(ResetCache().to_message(5), [], done.append)
    assert [ResetCache().read(answer) for answer in done] == [False]


def test_one_that_refuses_speaks_for_all() -> None:
    calls, done = gather(ResetCache())
    calls[0].set_result(ResetCache().to_answer(0, True))
    calls[1].set_result(Answer(1, error=ErrorInfo("EngineError", "not now")))
    calls[2].set_result(ResetCache().to_answer(2, True))
    with pytest.raises(EngineError, match="not now"):
        ResetCache().read(done[0])
