"""Questions that go to several cores, and one answer made of theirs."""

from vllm.v1.engine.wire import (
    AskCacheView,
    AskHeldPrefixes,
    CacheSnapshot,
    CallAnswer,
    HeldPrefixes,
    PrefixCacheReset,
    ResetPrefixCache,
)

Question = ResetPrefixCache | AskHeldPrefixes | AskCacheView


class Gathering:
    """Answers of several cores to one question; a core that dies owes none.

    Owns: the answers so far.

    Args:
        question: What was asked.
        ranks: The cores that were asked.
    """

    def __init__(self, question: Question, ranks: set[int]) -> None:
        self._question = question
        self._waits_for = ranks
        self._answers: dict[int, CallAnswer] = {}

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will come."""
        return not self._waits_for

    def take(self, rank: int, answer: CallAnswer) -> None:
        """Note a core's answer."""
        self._waits_for.discard(rank)
        self._answers[rank] = answer

    def lose(self, rank: int) -> None:
        """Expect nothing of a core that died."""
        self._waits_for.discard(rank)

    def merge(self) -> CallAnswer:
        """Return the answer of all, in order of rank; where none is left, that nothing was done."""
        call_id = self._question.call_id
        answers = [self._answers[rank] for rank in sorted(self._answers)]
        if isinstance(self._question, ResetPrefixCache):
            resets = [a.success for a in answers if isinstance(a, PrefixCacheReset)]
            return PrefixCacheReset(call_id, bool(resets) and all(resets))
        if isinstance(self._question, AskHeldPrefixes):
            helds = [a for a in answers if isinstance(a, HeldPrefixes)]
            prefixes = [prefix for held in helds for prefix in held.prefixes]
            return HeldPrefixes(call_id, prefixes, any(held.forgotten for held in helds))
        views = [a for a in answers if isinstance(a, CacheSnapshot)]
        return views[0] if views else CacheSnapshot(call_id, b"", 0.0)
