"""MTP-aware masks: which rows of a group a boundary keeps, and in which blocks they lie.

A boundary P keeps what is read when a request goes on there: the query at P reads the rows of its
window below P. A drafter's row at P - 1 was made with the token that followed then. Where another
one follows now, a query at P - 1 makes it anew in a private copy of its block, and the window of
that query begins one row lower. So the group with MTP's layer keeps one row more:

    row                P-129  P-128  P-127  P-126   ...   P-2    P-1  |   P
    query at P - 1              <-------- 127 rows --------->  (made  |
                                                               anew)  |
    query at P                         <--------- 127 rows --------->   (made)
    kept                 .      +      #      #      #     #      #        # always, + with MTP's
    a block of 32               [ P-128 .. P-97 ]

With windows of 128 and blocks of 32, 64 or 128 row P - 128 begins a block that is kept for P - 127
anyway, so it costs nothing. It takes a block of its own where a window ends where a block does.

Compressor states keep the rows of the entry that is still open; the next entry begins where it
ends, and MTP's layer has none. Dense groups keep every row.

Pure functions over ints and frozen geometry. The core applies the rule a boundary at a time
(``GroupGeometry.first_needed``); ``AscendHybridKVCacheCoordinator.arrange`` gives it the number of
rows, and compares what it keeps with these masks.
"""

from collections.abc import Iterable

from vllm.v1.core.geometry import GroupGeometry


def num_extra_rows(*, is_window: bool, serves_drafter: bool) -> int:
    """Return the rows that a boundary keeps of a group below those that the query there reads.

    Args:
        is_window: Whether the group keeps only a tail: of rows, or of a compressor's state.
        serves_drafter: Whether MTP's layer is in the group.
    """
    return int(is_window and serves_drafter)


def kept_rows(group: GroupGeometry, boundary: int) -> range:
    """Return the rows of a group that are kept for requests that go on at a boundary.

        window of 4, boundary 8      row   0 1 2 3 4 5 6 7 | 8
                                           . . . . . # # # |        read at 8: 5, 6, 7
                     with MTP's            . . . . + # # # |        read at 7: 4, 5, 6

    Args:
        group: The group; how many rows the core was told to keep is not looked at.
        boundary: Tokens of the prefix.
    """
    extra = num_extra_rows(is_window=group.is_window, serves_drafter=group.has_drafter_rows)
    return range(max(0, group.first_read(boundary) - extra), boundary)


def kept_block_mask(
    group: GroupGeometry, boundaries: Iterable[int], num_blocks: int
) -> tuple[bool, ...]:
    """Keep a block iff a request that goes on at one of the boundaries reads a row in it.

        blocks of 2, window of 4, boundaries 8 and 16     row     0   4   8  12  16
                                                          mask     . . # # . . # #
                     with MTP's: row 4 is in a block that is kept anyway, and so is row 12
        window of 5                                       mask     . . # # . . # #
                     with MTP's                           mask     . # # # . # # #

    Costs O(blocks kept).

    Args:
        group: The group.
        boundaries: Tokens of the prefixes at which requests go on.
        num_blocks: Blocks that the mask is about, from the first one on.
    """
    kept = {
        index
        for boundary in boundaries
        if (rows := kept_rows(group, boundary))
        for index in group.block_range(rows.start, rows.stop)
    }
    return tuple(index in kept for index in range(num_blocks))
