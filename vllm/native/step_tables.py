"""One step's block tables as the flat arrays that the native kernels read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm.native.structs import Step
from vllm.v1.attention.metadata import CacheLayout, RequestSlice


@dataclass(frozen=True, slots=True)
class NativeTables:
    """What a step's requests read and write. R requests, G KV groups, all int64.

    Attributes:
        row_starts, starts, counts, read_from: [R], see ``RequestSlice``.
        write_from, offsets, lengths, bases: [G, R]: a request's table in a group begins at
            ``offsets`` of ``block_ids``, has ``lengths`` ids, and first lists block ``bases``.
        block_ids: All tables, end to end.
    """

    row_starts: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    read_from: np.ndarray
    write_from: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    bases: np.ndarray
    block_ids: np.ndarray

    def to_struct(self, token_ids: int, positions: int, num_tokens: int) -> Step:
        """Returns the struct over these arrays and two more, given by address.

        The arrays must outlive it.
        """
        return Step(
            num_tokens,
            len(self.starts),
            len(self.lengths),
            token_ids,
            positions,
            *(
                array.ctypes.data
                for array in (
                    self.row_starts,
                    self.starts,
                    self.counts,
                    self.read_from,
                    self.write_from,
                    self.offsets,
                    self.lengths,
                    self.bases,
                    self.block_ids,
                )
            ),
        )


def build_native_tables(slices: Sequence[RequestSlice], layout: CacheLayout) -> NativeTables:
    """Lays the tables of a step's requests end to end.

    Args:
        slices: The requests in flat-batch order; those without tokens are ignored.
        layout: The groups; their order is that of the tables.
    """
    kept = [item for item in slices if item.num_tokens]
    num_groups = len(layout.groups)
    numbers = np.array(
        [(item.start, item.num_tokens, item.read_from) for item in kept], dtype=np.int64
    ).reshape(-1, 3)
    starts, counts, read_from = numbers.T.copy()
    tables = [item.tables[group] for group in range(num_groups) for item in kept]
    lengths = np.array([len(table.block_ids) for table in tables], dtype=np.int64)
    write_from = np.array(
        [
            item.write_from[group] if item.write_from else 0
            for group in range(num_groups)
            for item in kept
        ],
        dtype=np.int64,
    )
    return NativeTables(
        row_starts=np.cumsum(counts) - counts,
        starts=starts,
        counts=counts,
        read_from=read_from,
        write_from=write_from,
        offsets=np.cumsum(lengths) - lengths,
        lengths=lengths.reshape(num_groups, -1),
        bases=np.array([table.base for table in tables], dtype=np.int64),
        block_ids=(
            np.concatenate([table.block_ids for table in tables]).astype(np.int64, copy=False)
            if tables
            else np.zeros(0, dtype=np.int64)
        ),
    )
