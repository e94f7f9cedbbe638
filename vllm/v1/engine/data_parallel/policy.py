"""Which engine core gets a request: pure functions of numbers.

The core with the longest cached prefix, unless it is overloaded or another one costs less:

    cost = 2 * (tokens to compute there + tokens it must evict for them)
           + prompt tokens that it has yet to compute for others
           + 32 * requests it has

What is computed twice is lost for everybody, what waits only for those behind it: therefore the 2.
Evicted tokens count like computed ones, for somebody is likely to come back for them. So a first
core that caches a common system prompt does not draw every conversation while others stand empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# What is computed again is lost throughput, what waits is only late.
_WORK_WEIGHT = 2
# A running request slows a step about as much as so many prompt tokens.
_TOKENS_PER_REQUEST = 32
# Requests by which a core may lead before it counts as overloaded, however few the others have.
_MIN_LEAD = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of a core when a request comes.

    Attributes:
        rank: Which one.
        cached_tokens: Of the prompt, tokens that need not be computed there.
        num_requests: Requests it has, running and waiting.
        backlog_tokens: Prompt tokens that it has yet to compute for them.
        unused_tokens: Tokens that fit in memory which caches nothing yet.
        placed_tokens: Prompt tokens computed there so far, to break ties.
    """

    rank: int
    cached_tokens: int = 0
    num_requests: int = 0
    backlog_tokens: int = 0
    unused_tokens: int = 0
    placed_tokens: int = 0


def is_overloaded(candidate: Candidate, least: int, max_num_seqs: int) -> bool:
    """Whether a core has too many requests, compared with the one that has the fewest.

    Args:
        candidate: The core.
        least: Requests of the core with the fewest.
        max_num_seqs: Requests that a core runs at a time: more wait, and elsewhere they need not.
    """
    lead = candidate.num_requests - least
    return lead >= max(_MIN_LEAD, least) or candidate.num_requests >= max_num_seqs > least


def cost(candidate: Candidate, num_prompt_tokens: int) -> int:
    """Return what a prompt costs on a core, in tokens; see the module."""
    work = num_prompt_tokens - candidate.cached_tokens
    evicted = max(0, work - candidate.unused_tokens)
    return (
        _WORK_WEIGHT * (work + evicted)
        + candidate.backlog_tokens
        + _TOKENS_PER_REQUEST * candidate.num_requests
    )


def choose_core(candidates: Sequence[Candidate], num_prompt_tokens: int, max_num_seqs: int) -> int:
    """Return the rank that gets a request.

    Of equal costs the longer prefix wins, then the core that has computed less so far.

    Args:
        candidates: The living cores, at least one.
        num_prompt_tokens: Of the prompt.
        max_num_seqs: Requests that a core runs at a time.
    """
    least = min(candidate.num_requests for candidate in candidates)
    able = [c for c in candidates if not is_overloaded(c, least, max_num_seqs)]
    best = min(
        able,
        key=lambda c: (cost(c, num_prompt_tokens), -c.cached_tokens, c.placed_tokens, c.rank),
    )
    return best.rank
