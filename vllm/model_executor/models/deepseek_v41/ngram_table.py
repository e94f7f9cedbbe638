"""An Engram table: left in its file, its rows read by many threads at once, and kept while asked.

    row of the table    codes [width], and a power of two for each group of them; or floats
    kept rows           row r stands in place r mod N, until another row of that place is read

A page of the file holds 16 rows of which one is wanted: so kept rows take a sixteenth of the memory
that the system's page cache would give the same ones. What is read never changes, so where a row
comes from cannot be seen in a result.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
import torch

MOST_KEPT_ROWS = 1 << 16
"""Rows of a table that stay in memory: 17 MB of the release's."""
_LEAST_PIECE = 64
_MOST_PIECES = 16
# What a byte stands for, as FP8 and as a scale.
_BYTES = torch.arange(256, dtype=torch.uint8)
_FP8_VALUES = _BYTES.view(torch.float8_e4m3fn).float().numpy()
_POWERS = _BYTES.view(torch.float8_e8m0fnu).float().numpy()


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Rows that are being read.

    Attributes:
        codes: uint8 [N, row bytes] of distinct rows, filled when ``reads`` are done.
        reads: What fills them.
        rows: int64 [N]: which they are.
        places: int64 [T * R]: of every row that was asked for, its place among them.
    """

    codes: np.ndarray
    reads: Sequence[Future[None]]
    rows: np.ndarray
    places: np.ndarray


class NgramTable:
    """Rows of a table by number.

    Args:
        name: Published name, without ".weight".
        num_rows: Rows.
        width: Values of a row.
        num_scales: Powers of two of a row of FP8; 0: rows are floats.
        dtype: Type of the floats that stand for the table until it is read from.
        readers: Reads pieces side by side.

    Owns: the rows that are kept.
    """

    def __init__(
        self,
        name: str,
        num_rows: int,
        width: int,
        num_scales: int,
        dtype: torch.dtype,
        readers: Executor,
    ) -> None:
        self._name, self._width, self._readers = name, width, readers
        stored = torch.float8_e4m3fn if num_scales else dtype
        self._weight = torch.empty(num_rows, width, dtype=stored, device="meta")
        self._scale: torch.Tensor | None = None
        if num_scales:
            shape = (num_rows, num_scales)
            self._scale = torch.empty(shape, dtype=torch.float8_e8m0fnu, device="meta")
        self._num_kept = min(MOST_KEPT_ROWS, num_rows)
        self._kept_rows = np.full(self._num_kept, -1, dtype=np.int64)
        self._kept = np.zeros((0, 0), dtype=np.uint8)

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Returns tensor name -> a tensor of the shape on no device: it stays in its file."""
        slots = {f"{self._name}.weight": self._weight}
        return slots if self._scale is None else {**slots, f"{self._name}.scale": self._scale}

    def take(self, name: str, values: torch.Tensor) -> bool:
        """Takes a tensor as it lies in its file, if it is the table's; returns whether it is."""
        if name == f"{self._name}.weight":
            self._weight = values
        elif name == f"{self._name}.scale":
            self._scale = values
        else:
            return False
        return True

    def begin(self, rows: torch.Tensor) -> PendingRows:
        """Begins to read rows, int64 of any shape; ``finish`` waits for them.

        Others may not be begun before they are finished.
        """
        asked, places = np.unique(rows.numpy().reshape(-1), return_inverse=True)
        sources = [_as_bytes(self._weight)]
        if self._scale is not None:
            sources.append(_as_bytes(self._scale))
        row_bytes = sum(source.shape[1] for source in sources)
        if self._kept.shape[1] != row_bytes:
            self._kept = np.zeros((self._num_kept, row_bytes), dtype=np.uint8)
        codes = np.empty((len(asked), row_bytes), dtype=np.uint8)
        slots = asked % self._num_kept
        is_kept = self._kept_rows[slots] == asked
        codes[is_kept] = self._kept[slots[is_kept]]
        missing = np.flatnonzero(~is_kept)

        def read(part: np.ndarray) -> None:
            first = 0
            for source in sources:
                end = first + source.shape[1]
                codes[part, first:end] = source[asked[part]]
                first = end

        num_pieces = min(_MOST_PIECES, -(-len(missing) // _LEAST_PIECE))
        pieces = np.array_split(missing, num_pieces) if num_pieces else []
        return PendingRows(
            codes, [self._readers.submit(read, piece) for piece in pieces], asked, places
        )

    def finish(self, pending: PendingRows) -> torch.Tensor:
        """Returns the rows that were begun, fp32 [T * R, width].

        Any thread may call it: torch, which would start threads for each of them, does not compute.
        """
        for part in pending.reads:
            part.result()
        # Of rows of one place the last one stays, in both arrays.
        slots = pending.rows % self._num_kept
        self._kept_rows[slots] = pending.rows
        self._kept[slots] = pending.codes
        return torch.from_numpy(self._decode(pending.codes)[pending.places])

    def _decode(self, codes: np.ndarray) -> np.ndarray:
        dtype = self._weight.dtype
        values: np.ndarray
        if self._scale is not None:
            values = _FP8_VALUES[codes[:, : self._width]]
            powers = _POWERS[codes[:, self._width :]]
            groups = values.reshape(*powers.shape, -1)
            groups *= powers[:, :, np.newaxis]
        elif dtype is torch.bfloat16:
            # A bfloat16 is the upper half of a float32.
            values = (codes.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            stored = np.float16 if dtype is torch.float16 else np.float32
            values = codes.view(stored).astype(np.float32)
        return values


def _as_bytes(values: torch.Tensor) -> np.ndarray:
    """Returns the rows as bytes, without a copy."""
    raw: np.ndarray = values.view(torch.uint8).numpy()
    return raw
