"""What a request's own tokens say about its next one: penalties, bad words, the thinking budget.

A request that asks for any of these has one ``TokenHistory``. It follows the request's known tokens
and answers for the rows of a step, where row k stands behind the first k drafts:

    known tokens | draft 0 | draft 1 |
         row 0 --^ row 1 --^ row 2 --^
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm.sampling_params import ReasoningSpan, SamplingParams


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """The tokens that penalties concern in one row, each once.

    Attributes:
        ids: int64 ``[U]``.
        counts: int64 ``[U]``: how often each stands in the answer; 0: in the prompt only.
    """

    ids: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, slots=True)
class RowHistory:
    """What the tokens before one row ask of it.

    Attributes:
        seen: For penalties; None: the request has none.
        banned_ids: Tokens that would complete a bad word.
        forced_id: The only token possible: the reasoning ends by force.
    """

    seen: SeenTokens | None
    banned_ids: list[int]
    forced_id: int | None


class TokenHistory:
    """Follows one request's tokens.

    Owns: counts, and how far the reasoning got.

    Args:
        params: Of the request.
        num_prompt_tokens: Length of its prompt.
    """

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._penalises_prompt = params.repetition_penalty != 1.0
        self._counts = _TokenCounts() if has_penalties(params) else None
        words = [tuple(ids) for ids in params.bad_words_token_ids or () if len(ids) > 1]
        self._words = words
        self._longest_word = max(map(len, words), default=0)
        self._budget: _ThinkingBudget | None = None
        if params.thinking_token_budget is not None and params.reasoning is not None:
            self._budget = _ThinkingBudget(params.thinking_token_budget, params.reasoning)
        self._num_seen = 0

    def make_rows(self, tokens: np.ndarray, drafts: Sequence[int]) -> list[RowHistory]:
        """Return what each row of a step is to do.

        Args:
            tokens: int64 ``[L]``: all known tokens.
            drafts: Draft tokens behind them.

        Returns:
            One more than there are drafts.
        """
        self._follow(tokens)
        answer = tokens[self._num_prompt_tokens :]
        tail = answer[max(0, len(answer) - self._longest_word) :].tolist() if self._words else []
        rows = []
        for depth in range(len(drafts) + 1):
            if depth:
                self._push(drafts[depth - 1])
                tail.append(drafts[depth - 1])
            rows.append(
                RowHistory(
                    seen=None if self._counts is None else self._counts.snapshot(),
                    banned_ids=self._find_banned(tail),
                    forced_id=None if self._budget is None else self._budget.forced_id,
                )
            )
        for draft in reversed(drafts):
            self._pop(draft)
        return rows

    def _follow(self, tokens: np.ndarray) -> None:
        """Take in the tokens that are new; all of them again if some were dropped."""
        if self._num_seen > len(tokens):
            self._num_seen = 0
            if self._counts is not None:
                self._counts = _TokenCounts()
            if self._budget is not None:
                self._budget = self._budget.restarted()
        first = self._num_prompt_tokens
        if self._num_seen < first:
            if self._counts is not None and self._penalises_prompt:
                self._counts.add_prompt(tokens[:first])
            self._num_seen = first
        for token_id in tokens[self._num_seen :].tolist():
            self._push(token_id)
        self._num_seen = len(tokens)

    def _push(self, token_id: int) -> None:
        if self._counts is not None:
            self._counts.push(token_id)
        if self._budget is not None:
            self._budget.push(token_id)

    def _pop(self, token_id: int) -> None:
        if self._counts is not None:
            self._counts.pop(token_id)
        if self._budget is not None:
            self._budget.pop()

    def _find_banned(self, tail: list[int]) -> list[int]:
        """Return the last tokens of the bad words whose others stand at the end of the answer."""
        return [
            word[-1]
            for word in self._words
            if len(tail) >= len(word) - 1 and tuple(tail[1 - len(word) :]) == word[:-1]
        ]


def has_penalties(params: SamplingParams) -> bool:
    """Whether any of the three penalties is asked for."""
    return (
        params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
    )


def make_history(params: SamplingParams, num_prompt_tokens: int) -> TokenHistory | None:
    """Return the history that a request needs; None: its tokens ask nothing of the next one."""
    return TokenHistory(params, num_prompt_tokens) if params.follows_answer else None


class _TokenCounts:
    """Distinct tokens in order of their first appearance, with their counts in the answer."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.empty(256, dtype=np.int64)
        self._counts = np.zeros(256, dtype=np.int64)
        self._size = 0
        self._num_prompt_ids = 0

    def add_prompt(self, token_ids: np.ndarray) -> None:
        """Take in a prompt: its tokens count nothing, but they have been seen."""
        distinct = np.unique(token_ids)
        self._size = self._num_prompt_ids = len(distinct)
        self._reserve(self._size)
        self._ids[: self._size] = distinct
        self._index = {token_id: i for i, token_id in enumerate(distinct.tolist())}

    def push(self, token_id: int) -> None:
        """Count one token more of the answer."""
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = self._size
            self._size += 1
            self._reserve(self._size)
            self._ids[index] = token_id
            self._counts[index] = 0
        self._counts[index] += 1

    def pop(self, token_id: int) -> None:
        """Take the last push back."""
        index = self._index[token_id]
        self._counts[index] -= 1
        # What was seen first in the answer was appended last: it goes from the end.
        if self._counts[index] == 0 and index >= self._num_prompt_ids:
            del self._index[token_id]
            self._size -= 1

    def snapshot(self) -> SeenTokens:
        """Return a copy of what has been seen."""
        return SeenTokens(self._ids[: self._size].copy(), self._counts[: self._size].copy())

    def _reserve(self, size: int) -> None:
        if size > len(self._ids):
            spare = np.zeros(2 * size - len(self._ids), dtype=np.int64)
            self._ids = np.concatenate([self._ids, spare])
            self._counts = np.concatenate([self._counts, spare])


class _ThinkingBudget:
    """How much of its reasoning an answer may still write.

    Owns: the tokens up to the end of the reasoning, and the number of those behind it.

    Args:
        budget: Tokens of reasoning.
        span: Where it ends. An answer that does not begin with its start tokens does not reason.
    """

    def __init__(self, budget: int, span: ReasoningSpan) -> None:
        self._span = span
        self._budget = budget
        self._tokens: list[int] = []
        self._has_ended = False
        self._num_behind = 0

    def restarted(self) -> "_ThinkingBudget":
        """Return the budget of an answer without tokens."""
        return _ThinkingBudget(self._budget, self._span)

    def push(self, token_id: int) -> None:
        """Count a token."""
        if self._has_ended:
            self._num_behind += 1
            return
        self._tokens.append(token_id)
        ends = (self._span.end_token_ids, *self._span.call_token_ids)
        self._has_ended = any(self._tokens[-len(end) :] == end for end in ends)

    def pop(self) -> None:
        """Take the last push back."""
        if self._num_behind:
            self._num_behind -= 1
            return
        self._has_ended = False
        self._tokens.pop()

    @property
    def forced_id(self) -> int | None:
        """The token that must come next; None: any may."""
        opener = self._span.start_token_ids
        num_opening = min(len(opener), len(self._tokens))
        if self._has_ended or self._tokens[:num_opening] != opener[:num_opening]:
            return None
        # Beyond the budget, so many tokens of the forced end stand already. More than it has follow
        # a draft that is not it, and whatever stands behind that one is dropped.
        over = len(self._tokens) - len(opener) - self._budget
        return self._span.forced[over] if 0 <= over < len(self._span.forced) else None
