"""Where an answer's reasoning ends and its grammar begins."""

from collections.abc import Sequence

from vllm.sampling_params import ReasoningSpan


class ReasoningTracker:
    """Follows an answer through its reasoning.

    Owns: the last tokens of it, in which the end may have begun.

    Args:
        span: Where it ends.
    """

    def __init__(self, span: ReasoningSpan) -> None:
        self._span = span
        self._recent: list[int] = []
        self._has_begun = not span.start_token_ids

    @property
    def opening_id(self) -> int | None:
        """The token by which an answer without any yet would begin to reason."""
        return None if self._has_begun else self._span.start_token_ids[0]

    @property
    def call_ids(self) -> frozenset[int]:
        """Tokens that each open a call, and so must not stand in the reasoning."""
        return frozenset(row[0] for row in self._span.call_token_ids if len(row) == 1)

    def find_end(self, token_ids: Sequence[int]) -> int | None:
        """Return how many of the next tokens belong to the reasoning, its end included.

        Returns:
            None when it does not end in them.
        """
        if not token_ids:
            return None
        if not self._has_begun and token_ids[0] != self._span.start_token_ids[0]:
            return 0  # the answer began without reasoning
        ends = self._span.end_token_ids
        tokens = [*self._recent, *token_ids]
        for stop in range(max(len(ends), len(self._recent) + 1), len(tokens) + 1):
            if tokens[stop - len(ends) : stop] == ends:
                return stop - len(self._recent)
        return None

    def find_answer(self, token_ids: Sequence[int]) -> int | None:
        """Return where the answer begins in all of its tokens: behind the reasoning, or at a call.

        Returns:
            None when the reasoning goes on.
        """
        end = self.find_end(token_ids)
        if end is not None:
            return end
        tokens = list(token_ids)
        rows = self._span.call_token_ids
        calls = [i for row in rows for i in range(len(tokens)) if tokens[i : i + len(row)] == row]
        return min(calls, default=None)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take in tokens in which the reasoning does not end."""
        self._has_begun = True
        num_kept = len(self._span.end_token_ids) - 1
        recent = [*self._recent, *token_ids]
        self._recent = recent[len(recent) - num_kept :] if num_kept < len(recent) else recent
