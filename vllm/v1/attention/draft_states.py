"""What a step's drafts would do to recurrent states, until it is known which of them stand.

    step     inputs of every recurrent layer at the drafts' rows    kept, at addresses that stay
    settle   state behind the last certain token -> behind those    stored, all requests at once
             that stand

Drafts are kept in the order of the requests that have some: the step's tables say where each row
goes, and those of settling, one upload, say how many rows of each request stand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.layout import GroupLayout
from vllm.v1.attention.ops.triton.pages import write_slots
from vllm.v1.attention.ops.triton.recurrent import StateTables, run_states
from vllm.v1.attention.recurrent_tables import NUM_BY_REQUEST, count_stores, find_states
from vllm.v1.attention.step_batch import ragged_arange
from vllm.v1.attention.step_tables import RequestSlice
from vllm.v1.attention.table_buffer import TableBuffer, TableColumns
from vllm.v1.kv_cache_specs.layouts import StateShape

# Values: rows that begin at multiples of it are read by the program that a step's own are read by.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class StateInputs:
    """What the rows of a step do to the states of one layer.

    Attributes:
        channels: fp32 [T, C]: inputs of its convolution.
        weight: fp32 [C, W]: of that.
        logs: fp32 [T, H] or [T, H, K]: of decays.
        rates: fp32 [T, H]: of writing.
        num_key_heads: Of the layer.
    """

    channels: torch.Tensor
    weight: torch.Tensor
    logs: torch.Tensor
    rates: torch.Tensor
    num_key_heads: int


@dataclass(frozen=True, slots=True)
class _Layer:
    """What settling needs of a layer beside the rows; the same in every step."""

    weight: torch.Tensor
    num_key_heads: int
    decay_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class SettledShape:
    """What fixes how the tables lie by which drafts are settled.

    Attributes:
        num_requests: With drafts, with those of padding.
        num_drafts: Most of a request.
    """

    num_requests: int
    num_drafts: int

    @property
    def num_rows(self) -> int:
        """Drafts of all."""
        return self.num_requests * self.num_drafts


def list_drafted(
    slices: Sequence[RequestSlice], num_accepted: Sequence[int]
) -> list[tuple[RequestSlice, int]]:
    """Return the requests of a step that have drafts, and how many of each stand."""
    return [
        (item, count)
        for item, count in zip(slices, num_accepted, strict=True)
        if item.num_tokens and item.num_drafts
    ]


def count_kept_bytes(shape: StateShape, num_decays: int, num_drafts: int) -> int:
    """Return what so many drafts take until they are settled."""
    width = _find_width(_list_sizes(shape, num_decays))
    return shape.num_layers * num_drafts * width * torch.float32.itemsize


def _list_sizes(shape: StateShape, num_decays: int) -> list[int]:
    """Returns how many values of a draft one layer keeps: channels, logarithms, rates."""
    return [shape.num_channels, num_decays, shape.num_heads]


def _find_width(sizes: Sequence[int]) -> int:
    return cdiv(sum(sizes), _ALIGNMENT) * _ALIGNMENT


class DraftStates:
    """Keeps the drafts of a step; stores the states behind those that stand.

    Args:
        group: The KV group of the states.
        group_id: Its number.
        pages: Its pages.
        num_decays: Logarithms of decays that a row has in one layer.

    Owns: what is kept, by layer: [drafts, channels | logarithms | rates].
    """

    def __init__(
        self, group: GroupLayout, group_id: int, pages: torch.Tensor, num_decays: int
    ) -> None:
        assert group.state is not None, "a group without states has no drafts to keep"
        self._group, self._group_id, self._pages = group, group_id, pages
        self._state = group.state
        self._sizes = _list_sizes(self._state.shape, num_decays)
        self._kept = self._make(0)
        self._layers: dict[int, _Layer] = {}
        self._is_fixed = False
        self._buffer = TableBuffer(pages.device)

    @property
    def kept(self) -> torch.Tensor:
        """What is kept: fp32 [L, drafts, values]."""
        return self._kept

    def reserve(self, num_drafts: int) -> None:
        """Make room for so many; what was kept before is lost."""
        if num_drafts > self._kept.shape[1]:
            assert not self._is_fixed, f"graphs keep {self._kept.shape[1]} drafts"
            self._kept = self._make(num_drafts)

    def fix(self) -> None:
        """Have the addresses stay: graphs write there."""
        self._is_fixed = True

    def _make(self, num_drafts: int) -> torch.Tensor:
        shape = (self._state.shape.num_layers, num_drafts, _find_width(self._sizes))
        return torch.zeros(shape, dtype=torch.float32, device=self._pages.device)

    def _split(self, kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns channels, logarithms and rates of some rows."""
        return torch.split(kept[:, : sum(self._sizes)], self._sizes, -1)

    def keep(self, number: int, slots: torch.Tensor, inputs: StateInputs) -> None:
        """Keep a layer's drafts.

        Args:
            number: Which of the recurrent layers.
            slots: int32 [T]: where each row is kept; negative: it is no draft.
            inputs: Of all rows.
        """
        parts = self._split(self._kept[number])
        for part, values in zip(parts, (inputs.channels, inputs.logs, inputs.rates), strict=True):
            write_slots(part.unsqueeze(1), slots, values.flatten(1))
        # Not the rows: those of all layers would be held at once.
        decay_shape = tuple(inputs.logs.shape[1:])
        self._layers[number] = _Layer(inputs.weight, inputs.num_key_heads, decay_shape)

    def settle(self, slices: Sequence[RequestSlice], num_accepted: Sequence[int]) -> None:
        """Store the states behind the drafts that stand; a ``SettlesDrafts``.

        Raises:
            InvariantError: A state has no blocks (I5).
        """
        drafted = list_drafted(slices, num_accepted)
        if any(count for _, count in drafted):
            self.run(self.lay_out(drafted, self._buffer))

    def lay_out(
        self,
        drafted: Sequence[tuple[RequestSlice, int]],
        buffer: TableBuffer,
        shape: SettledShape | None = None,
    ) -> StateTables:
        """Upload the tables by which drafts are run again, as far as they stand.

        Args:
            drafted: Requests with drafts in order, and how many of each stand.
            buffer: Where the tables go.
            shape: What they are filled up to; None: nothing.

        Raises:
            InvariantError: A state has no blocks (I5).
        """
        counts = np.array([count for _, count in drafted], dtype=np.int64)
        totals = np.array([item.num_drafts for item, _ in drafted], dtype=np.int64)
        firsts = np.cumsum(totals) - totals
        stands = counts > 0
        firsts, counts = firsts[stands], counts[stands]
        own = [
            replace(
                item,
                start=item.start + item.num_tokens - item.num_drafts,
                num_tokens=count,
                num_drafts=0,
            )
            for item, count in drafted
            if count
        ]
        found, ids = find_states(own, self._group, self._group_id, 0)
        row_requests = np.full(int(totals.sum()), -1, dtype=np.int64)
        rows = ragged_arange(firsts, counts)
        row_requests[rows] = np.repeat(np.arange(len(own)), counts)
        num_rows, num_requests, num_stores = len(row_requests), len(own), len(found[-1])
        if shape is not None:
            num_rows, num_requests = shape.num_rows, shape.num_requests
            num_stores = num_requests * count_stores(shape.num_drafts, self._group.block_size)
        columns = TableColumns()
        columns.add(row_requests, num_rows)
        for values in (firsts, counts, *found[:NUM_BY_REQUEST]):
            columns.add(values, num_requests)
        for values in found[NUM_BY_REQUEST:]:
            columns.add(values, num_stores)
        columns.add_ids(ids)
        if shape is not None:
            num_states = num_requests + num_stores
            buffer.reserve(columns.count_values(num_states * self._state.num_blocks))
        views, block_ids = buffer.upload(columns)
        places, starts, lengths, sources, store_firsts, store_counts, ends, tables = views
        return StateTables(
            places, starts, lengths, sources, store_firsts, store_counts, ends, tables, block_ids
        )

    def run(self, tables: StateTables) -> None:
        """Run drafts again by tables that are laid out."""
        num_rows = len(tables.row_requests)
        for number, layer in self._layers.items():
            channels, logs, rates = self._split(self._kept[number, :num_rows])
            run_states(
                channels,
                layer.weight,
                logs.reshape(num_rows, *layer.decay_shape),
                rates,
                self._pages,
                self._state,
                number,
                layer.num_key_heads,
                tables,
            )
