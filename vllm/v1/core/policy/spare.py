"""Checkpoints in memory that nothing else needs now."""

from collections.abc import Container

from vllm.v1.core.retention import COARSE_TOKENS, CacheGeometry

# The part of a pool that spare checkpoints leave to requests that come.
_RESERVED_SHARE = 1 / 16


def spare_boundaries(
    geometry: CacheGeometry,
    start: int,
    end: int,
    taken: Container[int],
    num_blocks: int,
    pool_size: int,
) -> tuple[int, ...]:
    """Return the boundaries inside a prefill step at which to leave checkpoints for nobody yet.

    The window rows there are computed anyway. They are spread evenly, as finely as there is room
    for, and cost nothing: they are the first to go.

    Args:
        geometry: The model's groups.
        start: Tokens computed before the step.
        end: Tokens computed after it.
        taken: Boundaries of the step that have a checkpoint anyway.
        num_blocks: Blocks that cache nothing, the step's own taken off.
        pool_size: Blocks of the pool.
    """
    room = num_blocks - int(pool_size * _RESERVED_SHARE)
    step = geometry.coarse
    cost = lean_checkpoint_blocks(geometry)
    if room < cost or not cost:
        return ()
    while step < end - start or start // step < end // step:
        places = range((start // step + 1) * step, end + 1, step)
        if not places:
            return ()
        if len(places) * cost <= room:
            return tuple(p for p in places if p not in taken)
        step *= 2
    return ()


def lean_checkpoint_blocks(geometry: CacheGeometry) -> int:
    """Return the blocks of a checkpoint at a multiple of ``COARSE_TOKENS``, far into a prompt."""
    keep = max((group.keep for group in geometry.windows), default=0)
    position = (keep // geometry.coarse + 2) * geometry.coarse
    assert position % COARSE_TOKENS == 0
    return sum(
        len(group.block_range(group.first_needed(position), position)) for group in geometry.windows
    )
