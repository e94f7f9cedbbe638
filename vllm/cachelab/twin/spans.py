"""The missed parts of a prompt, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.admission_stats import EXTERNAL
from vllm.v1.messages import (
    ABOVE_LAST_BOUNDARY,
    BYPASSED,
    CORRUPT,
    DRAFTER,
    EVICTED,
    EVICTED_FROM_DISK,
    FIRST_SEEN,
    RESTORE_DECLINED,
    RESTORE_FAILED,
    STATE_EVICTED,
    STATE_NOT_RETAINED,
    WINDOW_EVICTED,
    WINDOW_NOT_RETAINED,
    PrefillStats,
)

if TYPE_CHECKING:
    from vllm.cachelab.twin.remedies import SuggestedChange

# In the order in which they lie in a prompt, behind the hit.
_ORDER = (
    BYPASSED,
    DRAFTER,
    EXTERNAL,
    CORRUPT,
    RESTORE_FAILED,
    RESTORE_DECLINED,
    EVICTED_FROM_DISK,
    WINDOW_EVICTED,
    WINDOW_NOT_RETAINED,
    STATE_EVICTED,
    STATE_NOT_RETAINED,
    EVICTED,
    FIRST_SEEN,
    ABOVE_LAST_BOUNDARY,
)


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
    order = [*_ORDER, *(reason for reason in stats.miss_tokens if reason not in _ORDER)]
    for reason in order:
        count = stats.miss_tokens.get(reason, 0)
        if count:
            made.append(Span(at, at + count, reason))
            at += count
    return made
