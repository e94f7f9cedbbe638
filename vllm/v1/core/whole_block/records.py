"""Where an admitted request's tokens come from, where nothing is known of evictions."""

from vllm.v1.messages import ABOVE_LAST_BOUNDARY, BYPASSED, FIRST_SEEN, PrefillStats


def whole_block_prefill_stats(
    *, num_tokens: int, num_cached_tokens: int, granularity: int, is_bypassed: bool
) -> PrefillStats:
    """Give every token of an admitted request one source: ``hits + misses = tokens``.

    Without a memory of what was evicted, every missing prefix counts as first seen.

        token     0        cached            last boundary   n
                  |-- hit --|-- first seen --|-- above it ---|

    Args:
        num_tokens: Tokens the request was admitted with, n.
        num_cached_tokens: Of those, tokens that need no computing.
        granularity: Tokens on whose multiples a hit ends.
        is_bypassed: Whether the cache was not asked.
    """
    if is_bypassed:
        misses = {BYPASSED: num_tokens - num_cached_tokens}
    else:
        # An identical request would hit up to here: its last token is always computed.
        boundary = max(num_tokens - 1, 0) // granularity * granularity
        boundary = max(boundary, num_cached_tokens)
        misses = {
            FIRST_SEEN: boundary - num_cached_tokens,
            ABOVE_LAST_BOUNDARY: num_tokens - boundary,
        }
    return PrefillStats(
        num_prompt_tokens=num_tokens,
        num_cached_tokens=num_cached_tokens,
        dense_match_tokens=num_cached_tokens,
        miss_tokens={reason: count for reason, count in misses.items() if count},
    )
