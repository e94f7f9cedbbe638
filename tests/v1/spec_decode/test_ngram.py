"""Prompt lookup against a plain search."""

import random

import numpy as np

from vllm.v1.spec_decode.ngram import NgramProposer
from vllm.v1.spec_decode.weighing import Agreement


def search(tokens: list[int], k: int, low: int, high: int) -> set[tuple[int, ...]]:
    """Return every continuation of the longest earlier match that is as long as possible."""
    for n in range(min(high, len(tokens) - 1), low - 1, -1):
        suffix = tokens[-n:]
        found = [
            tuple(tokens[i + n : i + n + k])
            for i in range(len(tokens) - n)
            if tokens[i : i + n] == suffix
        ]
        if found:
            most = max(map(len, found))
            return {draft for draft in found if len(draft) == most}
    return set()


def test_random_texts_over_a_small_vocabulary() -> None:
    rng = random.Random(0)
    for _ in range(500):
        low = rng.randrange(1, 4)
        high = rng.randrange(low, 6)
        k = rng.randrange(1, 5)
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        draft = NgramProposer(k, low, high).find(np.array(tokens, dtype=np.int64))
        expected = search(tokens, k, low, high)
        assert (tuple(draft) in expected) if expected else not draft


def test_the_latest_full_match_wins() -> None:
    tokens = np.array([1, 2, 7, 8, 1, 2, 9, 9, 1, 2])
    assert NgramProposer(2, 1, 3).find(tokens) == [9, 9]


def test_what_most_places_go_on_with_wins() -> None:
    lookup = NgramProposer(1, 1, 3)
    for places, drafted, agreement in (
        ([7], 7, Agreement.ONE),
        ([7, 7, 7], 7, Agreement.ALL),
        ([7, 7, 9], 7, Agreement.MOST),
        ([7, 9], 9, Agreement.NONE),
    ):
        # The same two tokens each time, behind another one.
        text = [token for i, place in enumerate(places) for token in (20 + i, 1, 2, place)]
        draft = lookup.match(np.array([*text, 50, 1, 2]))
        assert (list(draft.tokens), draft.match, draft.agreement) == ([drafted], 2, agreement)
