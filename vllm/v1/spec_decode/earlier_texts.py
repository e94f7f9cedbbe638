"""What followed a prefix when it was computed before is likely to follow it again.

A prompt that is sent once more, or changed near its end, is mostly answered in the same words. A
request that found at least half of its prompt in the cache goes on from an earlier text, if one of
the same owner begins alike. Its drafts may come from there, too:

    earlier text    | prefix ............ | what followed it |
    request         | prefix ............ | its own tokens   |
    looked up in              | the prefix's end, what followed it | prefix, its own tokens |
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm.v1.worker.request_state import RequestState

# So many texts are known beside those of the step, the latest, of so many tokens in all.
_MOST_TEXTS, _MOST_TOKENS = 64, 2**18
# So much of an earlier text is looked at, from where the prefix ends.
_MOST_FOLLOWING = 2**13


class Earlier(NamedTuple):
    """An earlier text from the end of the prefix on that a request shares with it.

    Attributes:
        tokens: int64 ``[P + F]``: the prefix's last tokens, and what followed it.
        start: P.
        shared: Tokens of the whole prefix.
    """

    tokens: np.ndarray
    start: int
    shared: int


@dataclass(slots=True)
class _Text:
    """A request's text.

    Attributes:
        owner: Whose it is.
        tokens: int64 ``[L]``, a view of what the worker knows.
        has_looked: Whether an earlier text was looked for.
        earlier: What was found.
    """

    owner: str
    tokens: np.ndarray
    has_looked: bool = False
    earlier: Earlier | None = None


class EarlierTexts:
    """The texts of a step's requests, and the latest others.

    A text stays while its request runs: what was found for it is a part of what is looked up in.

    Args:
        num_before: Tokens of a prefix that are compared with a text's last ones.

    Owns: which texts are known. Their tokens stay alive with them.
    """

    def __init__(self, num_before: int) -> None:
        self._num_before = num_before
        self._texts: dict[str, _Text] = {}

    def note(self, requests: Iterable[RequestState]) -> None:
        """Take note of the tokens that requests have by now."""
        names, num_before = set(), len(self._texts)
        for state in requests:
            if state.text_owner is None:
                continue
            names.add(state.req_id)
            tokens = state.get_tokens(0, state.num_tokens)
            text = self._texts.get(state.req_id)
            if text is None:
                self._texts[state.req_id] = _Text(state.text_owner, tokens)
            else:
                text.tokens = tokens
        if len(self._texts) > num_before:
            self._drop_oldest(names)

    def find(self, state: RequestState) -> Earlier | None:
        """Return what a request goes on from: the same from its first look on."""
        text = self._texts.get(state.req_id)
        if text is None:
            return None
        if not text.has_looked:
            text.has_looked = True
            if 0 < state.num_prompt_tokens <= 2 * state.num_cached_tokens:
                text.earlier = self._find(text, state.num_cached_tokens)
        return text.earlier

    def _find(self, text: _Text, least: int) -> Earlier | None:
        """Return the text that shares most with another, and at least so many tokens.

        Of several that share as many it is the latest. Texts behind which nothing came say nothing.
        """
        best: _Text | None = None
        most = least - 1
        for other in reversed(self._texts.values()):
            if other is text or other.owner != text.owner:
                continue
            shared = _count_shared(text.tokens, other.tokens, least)
            if most < shared < len(other.tokens):
                best, most = other, shared
        if best is None:
            return None
        first = max(0, most - self._num_before)
        # A copy: the other text may still change, and must not stay alive with this one.
        tokens = best.tokens[first : most + _MOST_FOLLOWING].copy()
        return Earlier(tokens, most - first, most)

    def _drop_oldest(self, kept: set[str]) -> None:
        """Drop the oldest texts beyond the limits, of which those that are kept are no part."""
        others = [name for name in self._texts if name not in kept]
        num_tokens = 0
        for num_texts, name in enumerate(reversed(others), start=1):
            num_tokens += len(self._texts[name].tokens)
            if num_texts > _MOST_TEXTS or (num_tokens > _MOST_TOKENS and num_texts > 1):
                del self._texts[name]


def _count_shared(tokens: np.ndarray, others: np.ndarray, least: int) -> int:
    """Return with how many equal tokens two texts begin; 0 for fewer than ``least``."""
    length = min(len(tokens), len(others))
    # Most texts differ there already, and need not be read whole.
    last = slice(max(0, least - 32), least)
    if length < least or not np.array_equal(tokens[last], others[last]):
        return 0
    differs = tokens[:length] != others[:length]
    at = int(differs.argmax())
    shared = at if differs[at] else length
    return shared if shared >= least else 0
