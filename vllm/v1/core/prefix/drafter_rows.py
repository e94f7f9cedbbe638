"""What a prefix hit does about the one row of a drafter that depends on the token after it.

A drafter such as MTP makes its row of position t from the token at t + 1. A prefix of P tokens says
nothing of token P, so after a hit at P the row P - 1 fits only if the request goes on as the one
that left the checkpoint did. What the model answers never depends on it, only what is drafted.

    position   ... P-3   P-2   P-1 | P
    made with  ... P-2   P-1    P  |        the last row is stale if token P is another one
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm.v1.core.geometry import CacheGeometry, GroupGeometry
from vllm.v1.core.values.hit import PrefixHit


def has_stale_row(geometry: CacheGeometry, hit: PrefixHit, token_ids: Sequence[int]) -> bool:
    """Whether a hit ends in a drafter's row that another next token made, or an unknown one."""
    if hit.checkpoint is None or not any(g.has_drafter_rows for g in geometry.windows):
        return False
    return hit.checkpoint.next_token != token_ids[hit.position]


def drop_stale(
    geometry: CacheGeometry,
    hit: PrefixHit,
    token_ids: Sequence[int],
    find: Callable[[int], PrefixHit],
) -> PrefixHit:
    """Return the deepest hit whose drafter rows all fit.

    Args:
        geometry: The model's groups.
        hit: The deepest hit.
        token_ids: The request's tokens.
        find: Looks up the deepest hit of at most so many tokens.
    """
    found = hit
    while has_stale_row(geometry, found, token_ids):
        found = find(found.position - 1)
    if found is hit:
        return hit
    return replace(found, dense_match=hit.dense_match, given_up=hit.position)


def can_rebuild(group: GroupGeometry, position: int) -> bool:
    """Whether a checkpoint at ``position`` holds all rows that its last row's query reads."""
    if not group.has_drafter_rows:
        return False
    size = group.block_size
    return group.first_needed(position) // size <= group.first_read(position - 1) // size


def stale_groups(
    geometry: CacheGeometry, hit: PrefixHit, token_ids: Sequence[int]
) -> tuple[int, ...]:
    """Return which window groups have a stale row, and all that is needed to make it anew."""
    if not has_stale_row(geometry, hit, token_ids):
        return ()
    groups = enumerate(geometry.windows)
    return tuple(i for i, group in groups if can_rebuild(group, hit.position))
