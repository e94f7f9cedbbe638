"""One answer of several."""

import pytest

from vllm.v1.engine.data_parallel.gather import Gathering, Question
from vllm.v1.engine.wire import (
    AskCacheView,
    AskHeldPrefixes,
    CacheSnapshot,
    CallAnswer,
    HeldPrefixes,
    PrefixCacheReset,
    ResetPrefixCache,
)
from vllm.v1.messages import HeldPrefix

A, B = (HeldPrefix(name, 32, 1, True, None, 0) for name in "ab")


@pytest.mark.parametrize(
    ("question", "answers", "merged"),
    [
        (ResetPrefixCache(1), [PrefixCacheReset(1, True)] * 2, PrefixCacheReset(1, True)),
        (
            ResetPrefixCache(1),
            [PrefixCacheReset(1, True), PrefixCacheReset(1, False)],
            PrefixCacheReset(1, False),
        ),
        (
            AskHeldPrefixes(2, "a"),
            [HeldPrefixes(2, [A], True), HeldPrefixes(2, [B], False)],
            HeldPrefixes(2, [A, B], True),
        ),
        (AskCacheView(3), [CacheSnapshot(3, b"{}", 0.1)], CacheSnapshot(3, b"{}", 0.1)),
        # Where all died meanwhile, nothing was done.
        (ResetPrefixCache(1), [], PrefixCacheReset(1, False)),
        (AskHeldPrefixes(2), [], HeldPrefixes(2, [], False)),
        (AskCacheView(3), [], CacheSnapshot(3, b"", 0.0)),
    ],
)
def test_merged(question: Question, answers: list[CallAnswer], merged: CallAnswer) -> None:
    gathering = Gathering(question, set(range(3)))
    # In any order; what a core that died owed is not waited for.
    for rank in reversed(range(len(answers))):
        gathering.take(rank, answers[rank])
    assert not gathering.is_complete
    for rank in range(len(answers), 3):
        gathering.lose(rank)
    assert gathering.is_complete
    assert gathering.merge() == merged
