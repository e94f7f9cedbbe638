"""Checkpoints in memory that nothing else needs now."""

from collections.abc import Container, Sequence
from functools import lru_cache
from typing import NamedTuple

from vllm.v1.core.policy.geometry import CacheGeometry

# The part of a pool that spare checkpoints leave to requests that come.
_RESERVED_SHARE = 1 / 16
# The part of the room that one step's grid may take.
_GRID_SHARE = 1 / 8
# Coarse boundaries from one place of the finest grid to the next: each costs some microseconds.
_FINEST_GRID = 2


class Spares(NamedTuple):
    """Boundaries of spare checkpoints, ascending: near the prompt's end, and to fill memory."""

    ends: tuple[int, ...] = ()
    fillers: tuple[int, ...] = ()


NO_SPARES = Spares()


def spare_boundaries(
    geometry: CacheGeometry,
    start: int,
    end: int,
    num_tokens: int,
    taken: Container[int],
    num_blocks: int,
    num_older: int,
    pool_size: int,
    marks: Sequence[int] = (),
) -> Spares:
    """Return the boundaries inside a prefill step at which to leave checkpoints for nobody yet.

    The window rows there are computed anyway, and the memory is the first to go. Prompts part near
    their ends more often than far from them, so distances from the end grow fourfold; what room
    there is beyond that goes to a grid, no more than a part of it to one step, or the first prompts
    would leave nothing to the later ones.

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
        marks: Offsets in the prompt where parts of it end, the most likely to be shared first.

    Returns:
        Lean boundaries in ``(start, end]``.
    """
    room = num_blocks - int(pool_size * _RESERVED_SHARE)
    cost = sum(lean_checkpoint_blocks(geometry))
    if not cost:
        return NO_SPARES
    ends: list[int] = []
    for mark in marks:
        place = geometry.floor_lean(mark)
        if (len(ends) + 1) * cost > room + num_older:
            break
        if start < place <= end and place not in taken and place not in ends:
            ends.append(place)
    distance = max(geometry.lean, geometry.coarse // 2)
    while distance < num_tokens and (len(ends) + 1) * cost <= room + num_older:
        place = geometry.floor_lean(num_tokens - distance)
        if start < place <= end and place not in taken and place not in ends:
            ends.append(place)
        distance *= 4
    for_grid = int(room * _GRID_SHARE)
    if for_grid < cost:
        return Spares(tuple(sorted(ends)))
    step = _FINEST_GRID * geometry.coarse
    while step <= end and (end // step - start // step) * cost > for_grid:
        step *= 2
    grid = range((start // step + 1) * step, end + 1, step)
    fillers = tuple(place for place in grid if place not in taken and place not in ends)
    return Spares(tuple(sorted(ends)), fillers)


@lru_cache(maxsize=16)
def lean_checkpoint_blocks(geometry: CacheGeometry) -> tuple[int, ...]:
    """Return per window group the blocks of a lean checkpoint, far into a prompt."""
    keep = max((group.keep for group in geometry.windows), default=0)
    position = (keep // geometry.coarse + 2) * geometry.coarse
    return tuple(len(group.rows_below(position)) for group in geometry.windows)
