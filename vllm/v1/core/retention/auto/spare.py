"""Checkpoints in memory that nothing else needs now."""

from collections.abc import Iterator, Sequence

from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.auto.yields import spare_kind
from vllm.v1.core.retention.policy import PrefillStep, Spare

# The part of a pool that spare checkpoints leave to requests that come.
_RESERVED_SHARE = 1 / 16
# The part of the room that one step's grid may take.
_GRID_SHARE = 1 / 8
# Coarse boundaries from one place of the finest grid to the next: each costs some microseconds.
_FINEST_GRID = 2


def spare_boundaries(geometry: CacheGeometry, step: PrefillStep) -> Sequence[Spare]:
    """Return the boundaries inside a prefill step at which to leave checkpoints for nobody yet.

    The window rows there are computed anyway, and the memory is the first to go. Prompts part near
    their ends more often than far from them, so distances from the end grow fourfold; what room
    there is beyond that goes to a grid, no more than a part of it to one step, or the first prompts
    would leave nothing to the later ones.

        prompt     |-----------------------------------------------|
        ends             .                       .           .   . .
        grid         .   .   .   .   .   .   .   .   .   .   .   .

    Returns:
        Lean boundaries of the step, those near the prompt's end before those of the grid.
    """
    room = step.num_blocks - int(step.pool_size * _RESERVED_SHARE)
    full_cost, partial_cost = sum(geometry.lean_blocks), sum(geometry.partial_blocks)
    if not full_cost:
        return ()
    ends: list[int] = []
    left = room + step.num_spare_blocks
    num_tokens = step.num_prompt_tokens
    for position in (*step.marks, *_positions_below(geometry, num_tokens)):
        place = geometry.floor_lean(position)
        if step.start < place <= step.end and place not in step.taken and place not in ends:
            left -= full_cost if place >= step.full_from else partial_cost
            if left < 0:
                break
            ends.append(place)
    is_partial = step.start < step.full_from and partial_cost > 0
    most = int(room * _GRID_SHARE) // (partial_cost if is_partial else full_cost)
    grid = _grid(_FINEST_GRID * geometry.coarse, step.start, step.end, most)
    fillers = (place for place in grid if place not in step.taken and place not in ends)
    return (
        *(Spare(place, spare_kind(num_tokens - place)) for place in sorted(ends)),
        *(Spare(place, None) for place in fillers),
    )


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
