"""Computing a lost window state again from dense rows that are still there.

A layer's window row depends on window rows of the layer below up to W - 1 positions back, and on
dense rows, which are read as they are stored. So a run that begins at s without any window row is
right from s on in the first layer, and W - 1 positions later per layer:

    tokens    s ............................................ b
    layer 0   |xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx|
    layer 1   |...... xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx|      x: exact
    layer 2   |.............. xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx|      .: wrong, and never read at b
    layer 3   |...................... xxxxxxxxxxxxxxxxxxxxxxx|
    needed at b                          |<- W-1 (or state) ->|

With every layer's window rows exact where b needs them, a request goes on at b as if they had never
been lost. No dense row below b is written.
"""

from typing import NamedTuple


class Rebuild(NamedTuple):
    """Window rows that a request computes again: of tokens ``[start, end)``."""

    start: int
    end: int


def find_rebuild(span: int | None, unit: int, resumable: int, boundary: int) -> Rebuild | None:
    """Return what to compute again to resume with the dense rows below a boundary, if it pays.

    It pays where fewer tokens are computed than from the deepest checkpoint on. Starts at a
    multiple of the unit, as everything else does.

    Args:
        span: ``CacheGeometry.rebuild_tokens`` of the model.
        unit: Tokens under one prefix hash.
        resumable: The deepest checkpoint; 0: none.
        boundary: Up to where all dense rows are there, in tokens.
    """
    if span is None:
        return None
    start = (boundary - span) // unit * unit
    return Rebuild(start, boundary) if start > resumable else None
