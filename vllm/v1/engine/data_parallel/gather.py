"""Questions that go to every core, and one answer made of theirs."""

from vllm.v1.engine.wire import HeldPrefixes, PrefixCacheReset
from vllm.v1.messages import HeldPrefix

CoreAnswer = PrefixCacheReset | HeldPrefixes


class Gathering:
    """Answers of several cores to one question; a core that dies owes none.

    Owns: the answers so far.

    Args:
        ranks: The cores that were asked.
    """

    def __init__(self, ranks: set[int]) -> None:
        self._waits_for = ranks
        self._answers: dict[int, CoreAnswer] = {}

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will come."""
        return not self._waits_for

    def take(self, rank: int, answer: CoreAnswer) -> None:
        """Note a core's answer."""
        self._waits_for.discard(rank)
        self._answers[rank] = answer

    def lose(self, rank: int) -> None:
        """Expect nothing of a core that died."""
        self._waits_for.discard(rank)

    def merge(self) -> CoreAnswer | None:
        """Return the answer of all, in order of rank; None: there was no core left to answer."""
        answers = [self._answers[rank] for rank in sorted(self._answers)]
        if not answers:
            return None
        first = answers[0]
        if isinstance(first, PrefixCacheReset):
            resets = [a for a in answers if isinstance(a, PrefixCacheReset)]
            return PrefixCacheReset(first.call_id, all(reset.success for reset in resets))
        helds = [a for a in answers if isinstance(a, HeldPrefixes)]
        prefixes: list[HeldPrefix] = [prefix for held in helds for prefix in held.prefixes]
        return HeldPrefixes(first.call_id, prefixes, any(held.forgotten for held in helds))
