"""One request's place in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from vllm.v1.structured_output.mask_bits import is_allowed

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher

    from vllm.v1.structured_output.json_rules import JsonRules

# How llguidance says that no token is allowed where an answer may not end either.
_NO_TOKEN_FITS = "NoExtensionBias"


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar at its beginning: for copies, never advanced itself.

    Attributes:
        matcher: What the library made of it.
        rules: What JSON in it may not go on to; None: there is none.
    """

    matcher: LLMatcher
    rules: JsonRules | None = None


class Grammar:
    """Follows an answer through its grammar.

    Where a grammar leaves one text to go on with (the names of properties, a call's head), its
    tokens are found once and kept: to ask the library again at each of them would be to write all
    of that text in tokens again, most of what masks cost.

    The matcher hears of tokens as late as may be: of forced ones when others follow, and of one
    that the last mask allowed when the next mask is made, which is beside the model and not
    between two steps.

    Owns: its matcher and rules, copies of the compiled ones.

    Args:
        compiled: At its beginning; it is copied.
        end_ids: Tokens that end an answer, where the grammar allows an end.
    """

    def __init__(self, compiled: CompiledGrammar, end_ids: frozenset[int]) -> None:
        self._matcher = compiled.matcher.deep_copy()
        self._rules = None if compiled.rules is None else compiled.rules.copy()
        self._end_ids = end_ids
        self._has_ended = self._has_failed = False
        # The only tokens that can follow what the matcher knows, and how many the answer has.
        self._forced: list[int] = []
        self._num_taken = 0
        # What follows these, and the matcher has not heard of.
        self._untold: list[int] = []
        # Bits of masks, and the row of the next token's; None: it was not made yet.
        self._mask: tuple[np.ndarray, int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it says what may follow; not so once the answer has ended, or the grammar."""
        return not (self._has_ended or self._has_failed)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._end_ids

    @property
    def may_end(self) -> bool:
        """Whether the answer may end before its first token; asked before there is one."""
        return bool(self._matcher.is_accepting())

    @property
    def matcher(self) -> LLMatcher:
        """What makes the mask of the next token where ``find_forced`` knows none."""
        return self._matcher

    def find_forced(self) -> int | None:
        """Return the only token that may follow; None: there is none, or several.

        Mutates: what it found is kept; the matcher hears of what it must know for that.
        """
        if self._num_taken == len(self._forced):
            self._tell()
            self._forced = self._matcher.compute_ff_tokens()
        return self._forced[self._num_taken] if self._forced else None

    def note_mask(self, bits: np.ndarray, row: int) -> None:
        """Remember what may follow.

        Args:
            bits: int32 ``[N, ceil(V / 32)]``, not written to any more before the next token.
            row: The next token's.
        """
        self._mask = bits, row

    def finish_mask(self, bits: np.ndarray, row: int) -> None:
        """Take what rules bar out of a mask, unless the matcher failed at it.

        Asked while the matcher is in the processor's cache.

        Mutates: ``bits``, int32 ``[N, ceil(V / 32)]``.
        """
        self._has_failed = self._matcher.is_error()
        if self._rules is not None and not self._has_failed:
            self._rules.restrict(bits, row, self._matcher, self._end_ids)

    def forget_mask(self) -> None:
        """Ask the matcher of the next token: its mask says more than the grammar."""
        self._mask = None

    def fork(self) -> Self:
        """Return another that stands where this one does, and goes its own way."""
        # The library takes back tokens that a grammar names by id one byte short: so copies.
        made = type(self)(CompiledGrammar(self._matcher, self._rules), self._end_ids)
        made._has_ended, made._has_failed = self._has_ended, self._has_failed
        made._forced, made._num_taken = self._forced, self._num_taken
        made._untold = self._untold.copy()
        return made

    def accept_tokens(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Advance; False if the grammar refuses a token, or became too complex to go on.

        Args:
            request_id: Part of the interface that schedulers call; not needed here.
            token_ids: Of the answer, in order.
        """
        del request_id
        if len(token_ids) == 1:  # as in most steps, for every request
            return self._has_ended or self._accept(token_ids[0])
        return all(self._has_ended or self._accept(token_id) for token_id in token_ids)

    def _accept(self, token_id: int) -> bool:
        mask, self._mask = self._mask, None
        if self._num_taken < len(self._forced):
            if token_id == self._forced[self._num_taken]:
                self._num_taken += 1
                return True
        elif mask is not None and token_id not in self._end_ids and is_allowed(*mask, token_id):
            self._untold.append(token_id)
            return True
        if not self._tell():
            return False
        self._has_ended = token_id in self._end_ids and self._matcher.is_accepting()
        self._has_failed = not (self._has_ended or self._consume([token_id]))
        return not self._has_failed

    def _tell(self) -> bool:
        """Tell the matcher what it has not heard of; False if it cannot go on."""
        taken = self._forced[: self._num_taken]
        if self._untold:
            taken += self._untold
            self._untold = []
        self._forced, self._num_taken = [], 0
        self._has_failed |= bool(taken) and not self._consume(taken)
        return not self._has_failed

    def _consume(self, token_ids: list[int]) -> bool:
        """Tell tokens to the matcher; False if it refuses one."""
        if self._rules is not None:
            self._rules.feed(token_ids)
        return bool(self._matcher.consume_tokens(token_ids))

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Return the first of these tokens that the grammar allows one after another."""
        if self._has_ended:
            return list(token_ids)
        stop = next((i for i, t in enumerate(token_ids) if t in self._end_ids), len(token_ids))
        inside = list(token_ids[:stop])
        if not inside:
            return []
        fork = self.fork()
        return inside[: fork.matcher.validate_tokens(inside)] if fork._tell() else []

    @property
    def rules_itself_out(self) -> bool:
        """Whether it has no text to go on with: a fault of whoever wrote it."""
        return self._matcher.is_error() and self._matcher.get_error().startswith(_NO_TOKEN_FITS)

    @property
    def error(self) -> str:
        """Why the grammar cannot go on; empty when it can."""
        return shorten(self._matcher.get_error()) if self._matcher.is_error() else ""


def shorten(message: str) -> str:
    """Return what a user can use of llguidance's message: dumps of its state follow it."""
    if message.startswith(_NO_TOKEN_FITS):
        return (
            "no text goes on to match it: its rules rule each other out, or refer to one another "
            "without end"
        )
    return " ".join(message.split("\n<state>")[0].split())[:500]
