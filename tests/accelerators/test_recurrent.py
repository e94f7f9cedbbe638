"""Recurrent operators against the reference: one request, and states in pages."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accelerators.comparing import assert_near
from tests.accelerators.test_elementwise import random
from vllm.v1.attention.ops import recurrent as reference
from vllm.v1.attention.ops.triton.recurrent import StateTables, run_states
from vllm.v1.attention.ops.triton.registry import get_triton_op
from vllm.v1.kv_cache_specs.layouts import StateLayout, StateShape

pytestmark = pytest.mark.slow

few = settings(max_examples=6)


@few
@given(st.integers(1, 40), st.integers(1, 70), st.integers(2, 5))
def test_short_convolution(num_rows: int, num_channels: int, width: int) -> None:
    args = random(1, num_rows, num_channels), random(2, width - 1, num_channels)
    weight = random(3, num_channels, width)
    expected = reference.short_convolution(*args, weight)
    assert_near(get_triton_op("short_convolution")(*args, weight), expected)


@few
@given(
    st.integers(1, 12),
    st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
    st.integers(1, 20),
    st.integers(1, 24),
    st.booleans(),
)
def test_gated_delta_scan(
    num_rows: int, heads: tuple[int, int], key_dim: int, value_dim: int, is_by_channel: bool
) -> None:
    key_heads, num_heads = heads
    shape = (num_rows, num_heads, key_dim)[: 2 + is_by_channel]
    args = (
        random(1, num_rows, key_heads, key_dim),
        random(2, num_rows, key_heads, key_dim),
        random(3, num_rows, num_heads, value_dim),
        -random(4, *shape).abs(),
        random(5, num_rows, num_heads).sigmoid(),
    )
    state, own = (random(6, num_heads, key_dim, value_dim) for _ in range(2))
    expected = reference.gated_delta_scan(*args, state)
    assert_near(get_triton_op("gated_delta_scan")(*args, own), expected)
    assert_near(own, state)


@few
@given(
    st.integers(0, 30),
    st.integers(1, 5),
    st.integers(1, 30),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_decays_norms_and_gates(rows: int, heads: int, width: int, dtype: torch.dtype) -> None:
    x, gate = random(1, rows, heads, width, dtype=dtype), random(2, rows, heads, width, dtype=dtype)
    # Far out on both sides, where an exponential overflows or is lost beside one.
    wide = 40 * x
    by_channel = wide, random(3, heads, width), random(4, heads, 1)
    for args in (by_channel, (wide[:, :, 0], random(3, heads), random(4, heads))):
        assert_near(get_triton_op("decay_logs")(*args), reference.decay_logs(*args))
        bounded = reference.bounded_decay_logs(*args, 5.0)
        assert_near(get_triton_op("bounded_decay_logs")(*args, 5.0), bounded)
    for activation in ("silu", "sigmoid"):
        norm = (x, gate, random(5, width), 1e-6, activation)
        assert_near(get_triton_op("gated_rms_norm")(*norm), reference.gated_rms_norm(*norm))
    assert_near(get_triton_op("gate_heads")(x, gate), reference.gate_heads(x, gate))


def test_decays_far_below_zero_are_not_lost() -> None:
    inputs = torch.linspace(-90, -5, 40).view(20, 2)
    bias, a_log = torch.zeros(2), torch.zeros(2)
    for name, bound in (("decay_logs", ()), ("bounded_decay_logs", (5.0,))):
        expected = getattr(reference, name)(inputs, bias, a_log, *bound)
        found = get_triton_op(name)(inputs, bias, a_log, *bound)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


class Runs:
    """Requests of a step over NaN pages, and what one request after the other computes.

    Args:
        requests: (rows, whether it has a state before, ends of stored states).
        is_by_channel: Whether decays are.
    """

    def __init__(
        self, requests: list[tuple[int, bool, list[int]]], *, is_by_channel: bool, page_values: int
    ) -> None:
        # Two layers; the second one's parts begin inside blocks.
        self.shape = StateShape(2, 3, 5, 6, 2 * 5 + 3 * 6, 3)
        self.layout = StateLayout(self.shape, page_values)
        num_pieces, self.number = self.layout.num_blocks, 1
        num_rows = sum(count for count, _, _ in requests)
        self.channels = random(1, num_rows, self.shape.num_channels)
        self.weight = random(2, self.shape.num_channels, 4)
        decay_shape = (num_rows, 3, 5)[: 2 + is_by_channel]
        self.decays, self.betas = -random(3, *decay_shape).abs(), random(4, num_rows, 3).sigmoid()
        self.pages = torch.full((200, 1, page_values + 3), torch.nan)[:, :, :page_values]
        free = iter((np.random.default_rng(5).permutation(199) + 1).tolist())
        ids: list[int] = []
        columns: list[list[int]] = [[] for _ in range(7)]
        row_requests: list[int] = []
        self.expected: list[torch.Tensor] = []
        self.stored: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
        row = 0
        for index, (count, has_source, ends) in enumerate(requests):
            state = random(10 + index, 3, 5, 6) if has_source else torch.zeros(3, 5, 6)
            left = random(20 + index, 3, self.shape.num_channels) * has_source
            own = [next(free) for _ in range(num_pieces)]
            if has_source:
                self._write(own, state, left)
            firsts = (row, count, len(ids) if has_source else -1, len(columns[5]), len(ends))
            for column, value in zip(columns, firsts, strict=False):
                column.append(value)
            ids += own
            for number, end in enumerate(ends):
                # The first state may take the place of the one that it was made of.
                blocks = own if number == 0 else [next(free) for _ in range(num_pieces)]
                columns[5].append(end)
                columns[6].append(len(ids))
                ids += blocks
                self.stored.append((blocks, *self._run(row, end, state, left)[1:]))
            self.expected.append(self._run(row, count, state, left)[0])
            row_requests += [index] * count
            row += count
        tensors = [torch.tensor(c, dtype=torch.int32) for c in (row_requests, *columns, ids)]
        self.tables = StateTables(*tensors)

    def _run(
        self, row: int, count: int, state: torch.Tensor, left: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, state = slice(row, row + count), state.clone()
        mixed = reference.short_convolution(self.channels[rows], left, self.weight)
        queries, keys, values = torch.split(mixed, [5, 5, 18], 1)
        outputs = reference.gated_delta_scan(
            queries.view(-1, 1, 5),
            keys.view(-1, 1, 5),
            values.view(-1, 3, 6),
            self.decays[rows],
            self.betas[rows],
            state,
        )
        return outputs, state, torch.cat([left, self.channels[rows]])[count:]

    def _places(self, blocks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns flat addresses [H, K * V] and [W - 1, C] of the second layer's parts."""
        layout, stride = self.layout, self.pages.stride(0)
        table = torch.tensor(blocks)
        head = torch.arange(3) + 3 * self.number
        heads = table[head // layout.heads_per_block] * stride
        heads = heads + head % layout.heads_per_block * 30
        channel = torch.arange(28) + 28 * self.number
        piece = layout.num_head_blocks + channel // layout.channels_per_block
        channels = table[piece] * stride + channel % layout.channels_per_block
        columns = channels + torch.arange(3)[:, None] * layout.channels_per_block
        return heads[:, None] + torch.arange(30), columns

    def _flat(self) -> torch.Tensor:
        return self.pages.as_strided((199 * self.pages.stride(0) + self.pages.shape[2],), (1,))

    def _write(self, blocks: list[int], state: torch.Tensor, left: torch.Tensor) -> None:
        heads, columns = self._places(blocks)
        self._flat()[heads], self._flat()[columns] = state.flatten(1), left

    def check(self) -> None:
        """Runs the kernels and compares outputs and every stored state."""
        before = int((~self.pages.isnan()).sum())
        found = run_states(
            self.channels,
            self.weight,
            self.decays,
            self.betas,
            self.pages,
            self.layout,
            self.number,
            1,
            self.tables,
        )
        assert_near(found, torch.cat(self.expected))
        for blocks, state, left in self.stored:
            heads, columns = self._places(blocks)
            assert_near(self._flat()[heads], state.flatten(1))
            assert_near(self._flat()[columns], left)
        assert before <= int((~self.pages.isnan()).sum()) <= before + len(self.stored) * (90 + 84)


@settings(max_examples=6)
@given(st.data(), st.booleans(), st.sampled_from([30, 64, 100]))
def test_states_in_pages(data: st.DataObject, is_by_channel: bool, page_values: int) -> None:
    requests = []
    for _ in range(data.draw(st.integers(1, 3))):
        count = data.draw(st.integers(1, 12))
        ends = data.draw(st.sets(st.integers(1, count), min_size=1, max_size=3))
        requests.append((count, data.draw(st.booleans()), sorted(ends)))
    Runs(requests, is_by_channel=is_by_channel, page_values=page_values).check()


def test_a_state_stored_over_the_one_it_was_made_of() -> None:
    # Stores after one and after two tokens both take columns of the old state.
    Runs([(2, True, [1, 2]), (5, True, [1])], is_by_channel=False, page_values=64).check()


def test_outputs_do_not_depend_on_chunks() -> None:
    whole, state = random(1, 9, 2, 8), random(6, 2, 8, 8)
    args = (whole, random(2, 9, 2, 8), random(3, 9, 2, 8), -random(4, 9, 2).abs(), random(5, 9, 2))
    other = state.clone()
    scan = get_triton_op("gated_delta_scan")
    expected = scan(*args, state)
    parts = [scan(*(arg[part] for arg in args), other) for part in (slice(4), slice(4, 9))]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(other, state)
