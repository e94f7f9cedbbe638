"""How kernels are launched, and the tile sizes that depend on where they run.

Every launch goes through ``launch``, so that a recorder can watch it (a captured graph's stand-in)
or compile the kernel for a card that this machine does not have.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton
import triton.language as tl

# Asked once, as triton asks: when kernels are decorated.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)

INTERPRETED = tl.constexpr(IS_INTERPRETED)

# Takes the kernel, its grid, positional arguments and keywords, and does whatever replaces or
# surrounds the launch.
Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]

# Values of one program's tile. The interpreter pays for every program, a GPU for every register.
_TILE_VALUES = 1 << 16 if IS_INTERPRETED else 1 << 12


# Sums that four warps keep, 64 of each thread; of more, some would go to memory.
_SUMS_OF_FOUR_WARPS = 1 << 13


def run_kernel(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Launch a kernel; the default ``Launcher``."""
    if not IS_INTERPRETED:
        kernel[grid](*args, **options)
        return
    # Lanes that a mask hides may overflow or divide by zero; numpy would warn of each.
    with np.errstate(all="ignore"):
        kernel[grid](*args, **options)


class _Current:
    """Who launches now. Owns: the launcher of this process."""

    launcher: Launcher = staticmethod(run_kernel)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run ``kernel`` once for every index of ``grid``; an empty grid runs nothing.

    Products and sums are fused unless a kernel says otherwise: what Triton does by itself changes
    with its version.
    """
    if all(grid):
        _Current.launcher(kernel, grid, args, {"enable_fp_fusion": True, **options})


@contextmanager
def launching_by(launcher: Launcher) -> Iterator[None]:
    """Have ``launcher`` do the launches inside."""
    before = _Current.launcher
    _Current.launcher = staticmethod(launcher)
    try:
        yield
    finally:
        _Current.launcher = before


def power_of_two(size: int) -> int:
    """Return the least power of two that is at least ``size`` (and 1)."""
    return 1 << max(0, size - 1).bit_length()


def rows_per_program(width: int) -> int:
    """Return how many rows of ``width`` values one program takes: it depends on the width alone.

    A row's result must not depend on its neighbours, so neither may the shape it is reduced in.
    """
    return max(1, _TILE_VALUES // power_of_two(width))


def warps_of(values: int) -> int:
    """Return the warps of a program that keeps so many sums in registers."""
    return 4 if values <= _SUMS_OF_FOUR_WARPS else 8


def divide_up(size: int, part: int) -> int:
    """Return how many parts cover ``size``."""
    return -(-size // part)


@triton.jit
def multiply(left, right):
    """Returns the fp32 product of two tiles, whose fp32 values are not rounded before.

    The interpreter's takes no bfloat16, and what it makes of a row depends on the row's place in
    the tile, which a GPU's does not: there, sums are too exact for that to be seen.
    """
    if INTERPRETED:
        return tl.dot(left.to(tl.float64), right.to(tl.float64)).to(tl.float32)
    else:
        return tl.dot(left, right, input_precision="ieee")
