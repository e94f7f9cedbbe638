"""One request's place in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Grammar:
    """Follows an answer through its grammar.

    Owns: its matcher, a copy of the compiled one.

    Args:
        compiled: The compiled grammar, at its beginning; it is copied.
        end_ids: Tokens that end an answer, where the grammar allows an end.
    """

    def __init__(self, compiled: LLMatcher, end_ids: frozenset[int]) -> None:
        self._matcher = compiled.deep_copy()
        self._end_ids = end_ids
        self._has_ended = False

    @property
    def matcher(self) -> LLMatcher | None:
        """What makes the masks; None: the answer has ended, and anything may follow."""
        return None if self._has_ended or self._matcher.is_error() else self._matcher

    def accept_tokens(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Advance; False if the grammar refuses a token, or became too complex to go on."""
        for token_id in token_ids:
            if self._has_ended:
                return True
            if token_id in self._end_ids and self._matcher.is_accepting():
                self._has_ended = True
            elif not self._matcher.consume_token(token_id):
                return False
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Return the first of these tokens that the grammar allows one after another."""
        if self._has_ended:
            return list(token_ids)
        stop = next((i for i, t in enumerate(token_ids) if t in self._end_ids), len(token_ids))
        inside = list(token_ids[:stop])
        # On a copy: the library takes back tokens that a grammar names by id one byte short.
        return inside[: self._matcher.deep_copy().validate_tokens(inside)] if inside else []

    @property
    def error(self) -> str:
        """Why the grammar cannot go on; empty when it can."""
        return shorten(self._matcher.get_error()) if self._matcher.is_error() else ""


def shorten(message: str) -> str:
    """Return what a user can use of llguidance's message: dumps of its state follow it."""
    return " ".join(message.split("\n<state>")[0].split())[:500]
