"""Checkpoints in memory that nothing else needs now."""

from collections.abc import Container

from vllm.v1.core.retention import COARSE_TOKENS, CacheGeometry

# The part of a pool that spare checkpoints leave to requests that come.
_RESERVED_SHARE = 1 / 16
# The part of the room that one step's grid may take.
_GRID_SHARE = 1 / 8


def spare_boundaries(
    geometry: CacheGeometry,
    start: int,
    end: int,
    num_tokens: int,
    taken: Container[int],
    num_blocks: int,
    num_older: int,
    pool_size: int,
) -> tuple[int, ...]:
    """Return the boundaries inside a prefill step at which to leave checkpoints for nobody yet.

    The window rows there are computed anyway, and the memory is the first to go. Prompts part near
    their ends more often than far from them, so distances from the end double; what room there is
    beyond that goes to a grid, no more than a part of it to one step, or the first prompts would
    leave nothing to the later ones.

        prompt     |-----------------------------------------------|
        ends             .                       .           .   . .
        grid         .   .   .   .   .   .   .   .   .   .   .   .

    Args:
        geometry: The model's groups.
        start: Tokens computed before the step.
        end: Tokens computed after it.
        num_tokens: Tokens of the prompt.
        taken: Boundaries of the step that have a checkpoint anyway.
        num_blocks: Blocks that cache nothing, the step's own taken off.
        num_older: Blocks of spare checkpoints that are there, which may give way.
        pool_size: Blocks of the pool.

    Returns:
        Lean boundaries in ``(start, end]``, ascending.
    """
    room = num_blocks - int(pool_size * _RESERVED_SHARE)
    cost = lean_checkpoint_blocks(geometry)
    if not cost:
        return ()
    chosen: list[int] = []
    distance = geometry.coarse
    while distance < num_tokens and (len(chosen) + 1) * cost <= room + num_older:
        place = geometry.floor_lean(num_tokens - distance)
        if start < place <= end and place not in taken and place not in chosen:
            chosen.append(place)
        distance *= 4
    for_grid = int(room * _GRID_SHARE)
    if for_grid < cost:
        return tuple(sorted(chosen))
    step = geometry.coarse
    while step <= end and (end // step - start // step) * cost > for_grid:
        step *= 2
    grid = range((start // step + 1) * step, end + 1, step)
    chosen += [place for place in grid if place not in taken and place not in chosen]
    return tuple(sorted(chosen))


def lean_checkpoint_blocks(geometry: CacheGeometry) -> int:
    """Return the blocks of a checkpoint at a multiple of ``COARSE_TOKENS``, far into a prompt."""
    keep = max((group.keep for group in geometry.windows), default=0)
    position = (keep // geometry.coarse + 2) * geometry.coarse
    assert position % COARSE_TOKENS == 0
    return sum(
        len(group.block_range(group.first_needed(position), position)) for group in geometry.windows
    )
