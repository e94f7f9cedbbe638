"""One object's entry in the index: 128 bytes that check themselves.

     0  u64  xxh3_64 of what never changes, bytes 8 to 103; 0: the cell is empty
     8  16   key: the beginning of the prefix hash at the object's end
    24  u8   kind
    25  u8   extents in use
    28  u32  position: the prefix's tokens
    32  u64  length: bytes of the object with its seal
    40  u64  sequence: of its write; no two objects of a folder share one
    48  8 x (u32 first slot, u16 slots)
    96  i32  next token, -1: not known
   104  u64  last use, in the same count as sequences
   112  u32  hits
   116  u8   superseded

Four cells stand in a sector of 512 bytes, which disks write whole; where one does not, the
checksum shows it. What tells of uses is written again in place: a torn write there costs no object.
Deleting writes eight zeros.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

CELL_BYTES = 128
PAGE_CELLS = 32
PAGE_BYTES = CELL_BYTES * PAGE_CELLS
MAX_EXTENTS = 8
MAX_EXTENT_SLOTS = 0xFFFF
EMPTY_HEAD = bytes(8)
_FIXED = slice(8, 104)
KEY_OFFSET, KIND_OFFSET, POSITION_OFFSET = 8, 24, 28
USES_OFFSET = 104
# One cell, or what tells of its uses: a tenth of the time that numpy takes field by field.
WHOLE_CELL = struct.Struct(f"<Q16sBB2xIQQ{MAX_EXTENTS * 'IH'}i4xQIB11x")
USES = struct.Struct("<QIB11x")
POSITION = struct.Struct("<I")

CELL = np.dtype(
    {
        "names": [
            "checksum",
            "key",
            "kind",
            "num_extents",
            "position",
            "length",
            "sequence",
            "last_use",
            "next_token",
            "hits",
            "superseded",
            "extents",
        ],
        "formats": [
            "<u8",
            ("<u8", (2,)),
            "u1",
            "u1",
            "<u4",
            "<u8",
            "<u8",
            "<u8",
            "<i4",
            "<u4",
            "u1",
            (np.dtype([("slot", "<u4"), ("count", "<u2")]), (MAX_EXTENTS,)),
        ],
        "offsets": [0, 8, 24, 25, 28, 32, 40, 104, 96, 112, 116, 48],
        "itemsize": CELL_BYTES,
    }
)

Cells = NDArray[Any]


class ObjectKind(IntEnum):
    """What an object is.

    ROWS: dense rows of a group of tokens. STATE: what else a boundary needs.
    """

    ROWS = 1
    STATE = 2


def checksum(cell: bytes | memoryview, seed: int) -> int:
    """Return the checksum of a cell; never that of an empty one."""
    return xxhash.xxh3_64_intdigest(bytes(cell[_FIXED]), seed=seed) or 1


def find_damaged(cells: Cells, seed: int) -> list[int]:
    """Return the indices of cells that are neither empty nor whole."""
    # One call a cell and no copy: a start reads all of them.
    used = np.flatnonzero(cells["checksum"])
    digest, view = xxhash.xxh3_64_intdigest, memoryview(cells.view(np.uint8).data)
    first, size = _FIXED.start, CELL_BYTES
    width = _FIXED.stop - first
    found = [digest(view[low : low + width], seed) or 1 for low in (used * size + first).tolist()]
    wrong = np.array(found, np.uint64) != cells["checksum"][used]
    return [int(index) for index in used[wrong]]


def as_words(cells: Cells) -> NDArray[np.uint64]:
    """Return a view of cells as words ``[cells, 16]``, which numpy copies five times faster."""
    return cells.view(np.uint64).reshape(-1, CELL_BYTES // 8)


def pick(cells: Cells, indices: NDArray[np.int64]) -> Cells:
    """Return copies of some cells."""
    return np.ascontiguousarray(as_words(cells)[indices]).view(CELL).reshape(-1)


class OpenCell(NamedTuple):
    """What a cell says, in plain numbers."""

    key: bytes
    kind: int
    position: int
    length: int
    sequence: int
    extents: tuple[tuple[int, int], ...]
    next_token: int
    last_use: int
    hits: int
    superseded: int


def open_cell(raw: memoryview, index: int) -> OpenCell:
    """Return what a cell among all cells' bytes says."""
    _, key, kind, num_extents, position, length, sequence, *runs, token, use, hits, superseded = (
        WHOLE_CELL.unpack_from(raw, index * CELL_BYTES)
    )
    # A cell that no writer wrote may claim more than there are.
    runs = runs[: 2 * num_extents]
    extents = tuple(zip(runs[::2], runs[1::2], strict=True))
    return OpenCell(key, kind, position, length, sequence, extents, token, use, hits, superseded)


def close_cell(cell: OpenCell, seed: int) -> bytes:
    """Return the bytes of a cell of at most 8 extents, with its checksum."""
    runs = [number for extent in cell.extents for number in extent]
    runs += [0] * (2 * MAX_EXTENTS - len(runs))
    data = WHOLE_CELL.pack(
        0,
        cell.key,
        cell.kind,
        len(cell.extents),
        cell.position,
        cell.length,
        cell.sequence,
        *runs,
        cell.next_token,
        cell.last_use,
        cell.hits,
        cell.superseded,
    )
    return checksum(data, seed).to_bytes(8, "little") + data[8:]
