"""The missed parts of a prompt, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.messages import MISS_REASONS, PrefillStats

if TYPE_CHECKING:
    from vllm.cachelab.twin.remedies import SuggestedChange


@dataclass(slots=True)
class Span:
    """Tokens that missed for one reason.

    Attributes:
        begin: First token.
        end: One past the last.
        reason: Why.
        lost: When what was there left, and what the server did then; None: nothing was.
        remedy: The cheapest that a replay confirms; None: there is none.
    """

    begin: int
    end: int
    reason: str
    lost: dict[str, Any] | None = None
    remedy: SuggestedChange | None = None


def spans_of(stats: PrefillStats) -> list[Span]:
    """Return the missed spans of an admission, in the prompt's order; they and the hit are all."""
    made, at = [], stats.num_cached_tokens
    for reason in MISS_REASONS:
        if count := stats.miss_tokens.get(reason, 0):
            made.append(Span(at, at + count, reason))
            at += count
    return made
