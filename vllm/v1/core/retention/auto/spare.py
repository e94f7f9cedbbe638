"""Checkpoints in memory that nothing else needs now."""

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from vllm.v1.core.geometry import CacheGeometry

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
    cost = sum(geometry.lean_blocks)
    if not cost:
        return NO_SPARES
    ends: list[int] = []
    num_most = (room + num_older) // cost
    for position in (*marks, *_positions_below(geometry, num_tokens)):
        if len(ends) >= num_most:
            break
        place = geometry.floor_lean(position)
        if start < place <= end and place not in taken and place not in ends:
            ends.append(place)
    grid = _grid(_FINEST_GRID * geometry.coarse, start, end, int(room * _GRID_SHARE) // cost)
    fillers = tuple(place for place in grid if place not in taken and place not in ends)
    return Spares(tuple(sorted(ends)), fillers)


def _positions_below(geometry: CacheGeometry, num_tokens: int) -> Iterator[int]:
    """Iterate over positions whose distances from a prompt's end grow fourfold."""
    distance = max(geometry.lean, geometry.coarse // 2)
    while distance < num_tokens:
        yield num_tokens - distance
        distance *= 4


def _grid(step: int, start: int, end: int, num_most: int) -> range:
    """Return the multiples in ``(start, end]`` of ``step``, doubled until they are few enough."""
    if num_most <= 0:
        return range(0)
    while step <= end and end // step - start // step > num_most:
        step *= 2
    return range((start // step + 1) * step, end + 1, step)
