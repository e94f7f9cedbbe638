"""The boundaries of prompts and steps, and the blocks they need.

Pure functions over ints and frozen geometry: no pool, no request, no clock.
"""

from collections.abc import Iterable, Sequence

from vllm.v1.core.geometry import CacheGeometry, GroupGeometry

# Places that a prompt leaves a heavy checkpoint at because they are marked.
MAX_MARKS = 4
# Each saves at least this part of the tokens that it weighs.
_LEAST_SHARE = 1 / 8


def replay_boundaries(
    geometry: CacheGeometry,
    num_prompt_tokens: int,
    *,
    keeps_lean: bool = True,
    keeps_coarse: bool = True,
) -> tuple[int, ...]:
    """Return the boundaries where a resend of the prompt, or a longer sibling, resumes.

    The largest boundary <= n - 1 (a resend computes at least its last token), n itself where it is
    a boundary (a longer sibling resumes there), the lean boundaries of both, and the coarse one,
    where a prompt whose end is written differently resumes. Ascending.
    """
    unit, n = geometry.unit, num_prompt_tokens
    wanted = {geometry.floor_unit(n - 1)}
    if n % unit == 0:
        wanted.add(n)
    if keeps_lean:
        wanted |= {geometry.floor_lean(p) for p in tuple(wanted)}
    if keeps_coarse:
        wanted.add(n // geometry.coarse * geometry.coarse)
    return tuple(sorted(p for p in wanted if p > 0))


def multiples(step: int, start: int, end: int) -> Sequence[int]:
    """Return the multiples of ``step`` in ``(start, end]``; none of 0."""
    return range((start // step + 1) * step, end + 1, step) if step else ()


def worthy_marks(
    unit: int, num_prompt_tokens: int, marks: Sequence[int], checkpoint_tokens: float
) -> tuple[int, ...]:
    """Return the units below marked places at which a heavy checkpoint is worth its memory.

    It must save the computing of so many tokens, compared with the one before it, and so must the
    one behind it.

    Args:
        unit: Tokens of a unit.
        num_prompt_tokens: Of the prompt, whose end leaves a checkpoint too.
        marks: Offsets in it, the most likely to be shared first.
        checkpoint_tokens: Tokens of dense rows that weigh as much as a checkpoint.

    Returns:
        Ascending, ``MAX_MARKS`` at most.
    """
    least = max(unit, checkpoint_tokens * _LEAST_SHARE)
    chosen = [0, (num_prompt_tokens - 1) // unit * unit]
    for mark in marks[:MAX_MARKS]:
        place = mark // unit * unit
        if all(abs(place - other) >= least for other in chosen) and place < num_prompt_tokens:
            chosen.append(place)
    return tuple(sorted(chosen[2:]))


def with_lean(geometry: CacheGeometry, position: int) -> tuple[int, ...]:
    """Return a boundary and its lean one, ascending, without 0."""
    lean = geometry.floor_lean(position)
    if 0 < lean < position:
        return (lean, position)
    return (position,) if position > 0 else ()


def trailing_boundaries(geometry: CacheGeometry, position: int) -> tuple[int, ...]:
    """Return the boundaries where a request that stops at ``position`` would be resumed.

    The last full unit and its lean boundary. A running request carries them along: when it
    finishes or is preempted they are its terminal checkpoint. Ascending, without 0.
    """
    return with_lean(geometry, geometry.floor_unit(position))


def step_boundaries(
    geometry: CacheGeometry, start: int, end: int, kept: Iterable[int], grid: Iterable[int] = ()
) -> tuple[int, ...]:
    """Return the boundaries in ``(start, end]`` whose checkpoints the step must leave behind.

    Args:
        geometry: The model's groups.
        start: Tokens computed before the step.
        end: Tokens computed after it, drafts not counted.
        kept: The boundaries the request wants kept: replay boundaries and junctions.
        grid: Boundaries in ``(start, end]`` that are kept whatever a request wants.

    Returns:
        Ascending; none for a model without windows, whose dense rows are all that resuming needs.
    """
    if not geometry.windows:
        return ()
    wanted = {p for p in kept if start < p <= end}
    wanted.update(p for p in trailing_boundaries(geometry, end) if start < p)
    wanted.update(grid)
    return tuple(sorted(wanted))


def needed_window_blocks(
    group: GroupGeometry, end: int, alloc_end: int, boundaries: Sequence[int]
) -> list[int]:
    """Return the block indices a window group must hold when a step ends.

    Private prefill window: rows ``[first_needed(end), alloc_end)`` for the next step, and the rows
    of each boundary's checkpoint. Nothing else of the chunk takes a block.

    Args:
        group: The window group.
        end: Tokens computed when the step ends, drafts not counted.
        alloc_end: ``end`` plus drafts and lookahead, for which slots must exist.
        boundaries: Boundaries inside the step, ascending.

    Returns:
        Ascending indices without duplicates. Cost: the blocks returned.
    """
    spans = [group.block_range(group.first_needed(p), p) for p in boundaries]
    spans.append(group.block_range(group.first_needed(end), alloc_end))
    indices: list[int] = []
    for span in spans:
        # Boundaries ascend, and so do the spans' ends; only the starts can overlap.
        low = indices[-1] + 1 if indices else 0
        if not indices or span.start >= indices[0]:
            indices.extend(range(max(span.start, low), span.stop))
        else:
            indices = sorted({*indices, *span})
    return indices
