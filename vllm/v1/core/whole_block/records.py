"""Where an admitted request's tokens come from, where nothing is known of evictions."""

from vllm.v1.messages import ABOVE_LAST_BOUNDARY, BYPASSED, FIRST_SEEN, PrefillStats


def whole_block_prefill_stats(
    *, num_tokens: int, num_cached_tokens: int, granularity: int, num_found_tokens: int = 0
) -> PrefillStats:
    """Give every token of an admitted request one source: ``hits + misses = tokens``.

    Without a memory of what was evicted, every missing prefix counts as first seen.

        token     0        cached            last boundary   n
                  |-- hit --|-- first seen --|-- above it ---|

    Args:
        num_tokens: Tokens the request was admitted with, n.
        num_cached_tokens: Of those, tokens that need no computing.
        granularity: Tokens on whose multiples a hit ends.
        num_found_tokens: Tokens that the cache has; what it has beyond the hit is passed over.
    """
    found = max(num_found_tokens, num_cached_tokens)
    # An identical request would hit up to here: its last token is always computed.
    boundary = max(num_tokens - 1, 0) // granularity * granularity
    boundary = max(boundary, found)
    misses = {
        BYPASSED: found - num_cached_tokens,
        FIRST_SEEN: boundary - found,
        ABOVE_LAST_BOUNDARY: num_tokens - boundary,
    }
    return PrefillStats(
        num_prompt_tokens=num_tokens,
        num_cached_tokens=num_cached_tokens,
        dense_match_tokens=num_cached_tokens,
        miss_tokens={reason: count for reason, count in misses.items() if count},
    )
