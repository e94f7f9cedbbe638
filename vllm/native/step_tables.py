"""One step's block tables as the flat arrays that the native kernels read."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from vllm.native.structs import Step
from vllm.v1.attention.metadata import CacheLayout, RequestSlice
from vllm.v1.attention.previous_tokens import find_previous
from vllm.v1.attention.step_tables import PreviousTokens

_INT64_BYTES = 8


@dataclass(frozen=True, slots=True)
class NativeTables:
    """What a step's requests read and write. R requests, G KV groups, all int64.

    Attributes:
        num_requests: R.
        num_groups: G.
        numbers: End to end, in the order of ``vn_step``: first flat rows, first positions, tokens,
            first stored window positions, first wanted positions and first positions whose output
            is read ``[R]``; then ``[G, R]`` the first position to write, and where a request's
            table begins in ``block_ids``, its length and its first block.
        block_ids: All tables, end to end.
        drafts: By request ``[R]``, how many of its last tokens are guesses; None: none are.
        ends: By token ``[T]``, behind which position it sees nothing; None: its own.
        previous: The tokens before each of the step's; None: nobody reads them.
    """

    num_requests: int
    num_groups: int
    numbers: "array[int]"
    block_ids: np.ndarray
    drafts: "array[int] | None" = None
    ends: np.ndarray | None = None
    previous: PreviousTokens | None = None

    @property
    def num_drafts(self) -> int:
        """Guesses among all tokens."""
        return 0 if self.drafts is None else sum(self.drafts)

    def to_struct(self, token_ids: int, positions: int, num_tokens: int, kept: int = 0) -> Step:
        """Returns the struct over these arrays and others, given by address.

        The arrays must outlive it.

        Args:
            token_ids: Of the tokens.
            positions: Of the tokens.
            num_tokens: How many there are.
            kept: Where a model with recurrent layers keeps what drafts would do to its states; 0:
                nowhere.
        """
        per_request = self.num_requests * _INT64_BYTES
        sizes = [per_request] * 6 + [per_request * self.num_groups] * 3
        # One address is asked for and the others are counted from it.
        addresses = accumulate(sizes, initial=self.numbers.buffer_info()[0])
        return Step(
            num_tokens,
            self.num_requests,
            self.num_groups,
            token_ids,
            positions,
            *addresses,
            self.block_ids.ctypes.data,
            num_drafts=self.drafts.buffer_info()[0] if kept and self.drafts else None,
            total_drafts=self.num_drafts if kept else 0,
            drafts=kept or None,
            sees_to=None if self.ends is None else self.ends.ctypes.data,
        )


def build_native_tables(slices: Sequence[RequestSlice], layout: CacheLayout) -> NativeTables:
    """Lays the tables of a step's requests end to end.

    Args:
        slices: The requests in flat-batch order; those without tokens are ignored.
        layout: The groups; their order is that of the tables.
    """
    kept = [item for item in slices if item.num_tokens]
    num_groups = len(layout.groups)
    table_of = [layout.find_table(group) for group in range(num_groups)]
    tables = [item.tables[table] for table in table_of for item in kept]
    counts = [item.num_tokens for item in kept]
    lengths = [len(table.block_ids) for table in tables]
    numbers = [
        *accumulate(counts[:-1], initial=0),
        *(item.start for item in kept),
        *counts,
        *(item.read_from for item in kept),
        *(item.wanted_from for item in kept),
        *(item.output_from for item in kept),
        *(item.write_from[table] if item.write_from else 0 for table in table_of for item in kept),
        *accumulate(lengths[:-1], initial=0),
        *lengths,
        *(table.base for table in tables),
    ]
    if not kept:
        numbers = []
    drafts = [item.num_drafts for item in kept]
    return NativeTables(
        num_requests=len(kept),
        num_groups=num_groups,
        numbers=array("q", numbers),
        block_ids=(
            np.concatenate([table.block_ids for table in tables]).astype(np.int64, copy=False)
            if tables
            else np.zeros(0, dtype=np.int64)
        ),
        drafts=array("q", drafts) if any(drafts) else None,
        ends=_find_ends(kept) if any(item.pictures for item in kept) else None,
        previous=find_previous(kept, torch.device("cpu")),
    )


def _find_ends(slices: Sequence[RequestSlice]) -> np.ndarray:
    ends = np.concatenate([item.find_ends() for item in slices])
    return ends.astype(np.int64, copy=False)


def build_settled_tables(
    slices: Sequence[RequestSlice], num_accepted: Sequence[int], layout: CacheLayout
) -> NativeTables:
    """Lays out what a step's accepted drafts read and leave, for ``vn_decoder_settle``.

    Args:
        slices: The step's requests.
        num_accepted: Of each, how many of its drafts stand.
        layout: The groups.

    Returns:
        The tables of requests of which some stand. First flat rows count among the step's drafts,
        positions and tokens from a request's first draft.
    """
    kept, first_rows, row = [], [], 0
    for item, accepted in zip(slices, num_accepted, strict=True):
        if not item.num_tokens or not item.num_drafts:
            continue
        if accepted:
            start = item.start + item.num_tokens - item.num_drafts
            own = replace(item, start=start, num_tokens=accepted, read_from=0, num_drafts=0)
            kept.append(own)
            first_rows.append(row)
        row += item.num_drafts
    tables = build_native_tables(kept, layout)
    tables.numbers[: len(kept)] = array("q", first_rows)
    return tables
