"""Calls that come twice: behind one that repeats an earlier one, to the letter, none follows.

A small model that may call as often as it likes makes the same call up to its limit. The grammar
marks calls by captures, and says what stands between two and what closes them all:

    [find(n=1), now(), find(n=1)]
                       ---------  is there already: of ", " and "]" only the second may follow

A token may end a call and go on behind it: what would go on to a further call is barred, too.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np

from vllm.v1.structured_output.mask_bits import forbid_tokens, keep_only
from vllm.v1.structured_output.special_texts import SpecialTexts

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

REPEATABLE = "repeatable_"
"""What the names of captures begin with; the number of their rule follows."""
# What a call ends with; a line break is spelled so where bytes are letters.
_MARKS = re.compile(r"[!-/:-@\[-`{-~\n\u010a]")
_DIGITS = b"0123456789"
# A token's bytes behind which it may go on past a call.
_LONGEST_REST = 24


@dataclass(frozen=True, slots=True)
class RepeatRule:
    """How calls that must not come twice are written.

    Attributes:
        separator: Between two; special tokens as their text.
        closing: Behind all of them; empty: the answer ends there.
        number_behind: The digits behind the first such text number a call, and are not compared;
            empty: calls have no numbers.
    """

    separator: str = ""
    closing: str = ""
    number_behind: str = ""


class CallTokens:
    """A vocabulary, as far as what stands around calls goes.

    Args:
        tokenizer: Of the library.
        specials: The vocabulary's special tokens.
        read_ids: Returns the vocabulary's tokens by their text.
        vocab_size: V of its logits.
    """

    def __init__(
        self,
        tokenizer: "LLTokenizer",
        specials: SpecialTexts,
        read_ids: Callable[[], Mapping[str, int]],
        vocab_size: int,
    ) -> None:
        self._tokenizer, self._specials = tokenizer, specials
        self._read_ids, self._vocab_size = read_ids, vocab_size
        self._by_mark: dict[int, list[tuple[bytes, int]]] = {}

    def read(self) -> None:
        """Read the vocabulary now, where that holds up nobody: it takes up to a second."""
        _ = self._joining

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, its special ones as such."""
        token_ids: list[int] = []
        for part in self._specials.split(text):
            token_ids += self._tokenizer.greedy_tokenize(part) if isinstance(part, str) else [part]
        return token_ids

    def spell(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of tokens."""
        return self._tokenizer.decode_bytes(list(token_ids))

    def find_longer(self, beginning: bytes) -> list[tuple[bytes, int]]:
        """Return the tokens that begin with some bytes and go on behind them, with their bytes."""
        mark = beginning[-1]
        if mark not in self._by_mark:
            self._by_mark[mark] = [item for item in self._joining if mark in item[0][:-1]]
        return [
            (content, token_id)
            for content, token_id in self._by_mark[mark]
            if len(content) > len(beginning) and content.startswith(beginning)
        ]

    @cached_property
    def _joining(self) -> list[tuple[bytes, int]]:
        """Tokens that hold a mark and more: only these may end a call and go on."""
        return [
            (self.spell([token_id]), token_id)
            for text, token_id in self._read_ids().items()
            if len(text) > 1 and _MARKS.search(text) and token_id < self._vocab_size
        ]


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule in tokens and bytes."""

    separator: bytes
    closing: bytes
    closing_ids: tuple[int, ...]
    number_behind: bytes

    @classmethod
    def of(cls, rule: RepeatRule, tokens: CallTokens) -> Self:
        closing_ids = tokens.tokenize(rule.closing)
        return cls(
            tokens.spell(tokens.tokenize(rule.separator)),
            tokens.spell(closing_ids),
            tuple(closing_ids),
            rule.number_behind.encode(),
        )

    def compared(self, call: bytes) -> bytes:
        """What of a call is compared."""
        if not self.number_behind:
            return call
        head, mark, rest = call.partition(self.number_behind)
        return head + mark + rest.lstrip(_DIGITS)


class RepeatedCalls:
    """Follows an answer's calls.

    Owns: the answer's text, and where its last call ends.

    Args:
        tokens: The vocabulary's.
        rules: By the numbers of their captures.
    """

    def __init__(self, tokens: CallTokens, rules: Sequence[RepeatRule]) -> None:
        self._tokens = tokens
        tokens.read()
        self._rules = [_Rule.of(rule, tokens) for rule in rules]
        self._said = bytearray()
        # Of the calls that the grammar has told of: how many, and where the last one ends.
        self._num_calls = self._end = 0
        self._has_repeated = False

    def copy(self) -> Self:
        """Return another that stands where this one does."""
        made = copy.copy(self)
        made._said = self._said.copy()
        return made

    def feed(self, content: bytes) -> None:
        """Take in what was written next."""
        self._said += content

    def restrict(
        self, bits: np.ndarray, row: int, matcher: "LLMatcher", end_ids: Iterable[int]
    ) -> None:
        """Take a further call out of a mask, behind a repeated one.

        Args:
            bits: int32 ``[R, ceil(V / 32)]``.
            row: The mask's.
            matcher: Made it.
            end_ids: Tokens that end an answer.

        Mutates: ``bits``.
        """
        found = [item for item in matcher.get_captures() if item[0].startswith(REPEATABLE)]
        if not found:
            return
        name = found[-1][0]
        rule = self._rules[int(name.removeprefix(REPEATABLE))]
        calls = [content for other, content in found if other == name]
        if len(found) > self._num_calls and self._said.rfind(calls[-1], self._end) < 0:
            # The library tells of a call when nothing but its end may follow.
            calls.pop()
        else:
            self._note(rule, calls, len(found))
        if self._has_repeated:
            self._close(rule, bits, row, matcher, end_ids)
        else:
            self._bar_going_on(rule, calls, bits, row)

    def _note(self, rule: _Rule, calls: Sequence[bytes], num_calls: int) -> None:
        """Find where the last call ends, and whether it was there before."""
        last = calls[-1]
        again = rule.separator + last
        if num_calls > self._num_calls:
            self._num_calls = num_calls
            self._end = self._said.rfind(last, self._end) + len(last)
            known = {rule.compared(call) for call in calls[:-1]}
            self._has_repeated = rule.compared(last) in known
        elif self._said.startswith(again, self._end):
            # Of equal captures in a row the library keeps one.
            self._end += len(again)
            self._has_repeated = True

    def _close(
        self,
        rule: _Rule,
        bits: np.ndarray,
        row: int,
        matcher: "LLMatcher",
        end_ids: Iterable[int],
    ) -> None:
        """Let nothing follow but the end, or what closes the calls."""
        behind = bytes(self._said[self._end :])
        if matcher.is_accepting():
            keep_only(bits, row, end_ids)
            return
        at = 0
        for token_id in rule.closing_ids:
            if behind == rule.closing[:at]:
                keep_only(bits, row, [token_id])
                return
            at += len(self._tokens.spell([token_id]))

    def _bar_going_on(
        self, rule: _Rule, calls: Iterable[bytes], bits: np.ndarray, row: int
    ) -> None:
        """Let no token end a call that is there already, and go on to a further one."""
        begun = bytes(self._said[self._end :])
        if not begun.startswith(rule.separator):
            return
        begun = begun[len(rule.separator) :]
        barred: list[int] = []
        for call in set(calls):
            rest = call[len(begun) :]
            if 0 < len(rest) <= _LONGEST_REST and call.startswith(begun):
                barred += [
                    token_id
                    for content, token_id in self._tokens.find_longer(rest)
                    if not rule.closing.startswith(content[len(rest) :])
                ]
        if barred:
            before = bits[row].copy()
            forbid_tokens(bits, range(row, row + 1), barred)
            if not bits[row].any():
                bits[row] = before
