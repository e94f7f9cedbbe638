"""Where an admitted request's tokens come from: one reason for every token that missed."""

from collections.abc import Sequence

from vllm.utils.hashing import BlockHash
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.prefix.prefix_index import PrefixIndex
from vllm.v1.core.values.hit import PrefixHit
from vllm.v1.messages import (
    ABOVE_LAST_BOUNDARY,
    DRAFTER,
    EVICTED,
    FIRST_SEEN,
    STATE_EVICTED,
    STATE_NOT_RETAINED,
    WINDOW_EVICTED,
    WINDOW_NOT_RETAINED,
    WINDOW_PARTIAL,
    WINDOW_REBUILT,
)


def explain_misses(
    index: PrefixIndex,
    geometry: CacheGeometry,
    block_hashes: Sequence[BlockHash],
    num_tokens: int,
    hit: PrefixHit,
) -> dict[str, int]:
    """Give every missed token of a prompt one reason.

    Args:
        index: Where keys, checkpoints and the memory of evicted ones are.
        geometry: The model's groups.
        block_hashes: Chained hashes of the prompt.
        num_tokens: Tokens of the prompt.
        hit: What the lookup found.

    Returns:
        Reason to tokens, zero entries left out; with ``hit.start`` they sum to ``num_tokens``.
    """
    reasons: dict[str, int] = {}
    last = geometry.floor_unit(num_tokens - 1)
    if num_tokens > last:
        reasons[ABOVE_LAST_BOUNDARY] = num_tokens - last
    resumable = max(hit.position, hit.given_up)
    if resumable > hit.position:
        reasons[DRAFTER] = resumable - hit.position
    if hit.rebuild is not None:
        reasons[WINDOW_REBUILT] = hit.position - hit.start
    if hit.passed is not None and hit.passed.position > resumable:
        reasons[WINDOW_PARTIAL] = hit.passed.position - resumable
        resumable = hit.passed.position
    window_missed = min(hit.dense_match, last) - resumable
    if window_missed > 0:
        first_unit = resumable // geometry.unit
        units = block_hashes[first_unit : hit.dense_match // geometry.unit]
        lost = any(h in index.checkpoint_ghosts for h in units)
        if geometry.is_recurrent:
            reasons[STATE_EVICTED if lost else STATE_NOT_RETAINED] = window_missed
        else:
            reasons[WINDOW_EVICTED if lost else WINDOW_NOT_RETAINED] = window_missed
    dense_missed = last - max(hit.dense_match, hit.position)
    if dense_missed > 0:
        evicted = 0
        for i in range(hit.dense_match // geometry.unit, last // geometry.unit):
            if block_hashes[i] not in index.ghosts and not index.holds_any(block_hashes[i]):
                break
            evicted += geometry.unit
        if evicted:
            reasons[EVICTED] = evicted
        if dense_missed > evicted:
            reasons[FIRST_SEEN] = dense_missed - evicted
    return reasons
