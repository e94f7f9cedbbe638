"""Which rows of the cache a step of a request reads and writes, as workers are told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowTable:
    """The live blocks of one request in one window group, replacing what the worker held.

    Attributes:
        group_id: Index of the KV cache group.
        base: Index (token position // block size) of the first block.
        block_ids: Ids of blocks base, base + 1, ...; 0 marks rows that are not stored.
    """

    group_id: int
    base: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class RowBounds:
    """What a step writes and reads that computes tokens again whose rows partly exist.

    Attributes:
        write_from: By KV cache group, the position from which rows are written.
        read_from: The first position whose window rows are stored; attention sees none before.
    """

    write_from: tuple[int, ...]
    read_from: int = 0
