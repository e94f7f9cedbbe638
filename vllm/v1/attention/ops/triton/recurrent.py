"""Recurrent layers: short convolutions and the gated delta rule over states that lie in pages.

    tokens of a request     0 1 2 ... | end 0 | ... | end 1 | drafts
    state in registers      read once   stored        stored  (not stored)

A state is read where a request's step begins and stored wherever its tables say, in one pass over
the tokens, one after the other: its bits do not depend on chunks or on the batch. Of a state, one
program has some heads and some columns of their matrices, which no other program touches, so a
state may be stored over the one that it was made of.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm.v1.attention.ops.triton.elementwise import sigmoid_of
from vllm.v1.attention.ops.triton.launch import (
    IS_INTERPRETED,
    divide_up,
    launch,
    power_of_two,
    rows_per_program,
)
from vllm.v1.kv_cache_specs.layouts import StateLayout

_L2_EPS = 1e-6
# Columns of a state that one program has: its rows are summed in registers, whole.
_STATE_COLUMNS = 256 if IS_INTERPRETED else 32
_CHANNELS = 4096 if IS_INTERPRETED else 128
_CONVOLVED_ROWS = 64 if IS_INTERPRETED else 16
_SILU, _SIGMOID = 0, 1
# Parts of a step's one buffer, which begin anywhere in it: one program serves them all.
_TABLES = ["row_requests", "starts", "counts", "sources", "store_firsts", "store_counts"]
_TABLES += ["store_ends", "store_tables", "block_ids"]


@dataclass(frozen=True, slots=True)
class StateTables:
    """Which states the requests of a step begin with and leave; all int32.

    Attributes:
        row_requests: [T]: request of each row; negative: none.
        starts: [R]: first row of each request.
        counts: [R]: its rows; none where it is not positive.
        sources: [R]: where the blocks of its first state begin in ``block_ids``; negative: it
            begins with zeros.
        store_firsts, store_counts: [R]: which of the stores are its own.
        store_ends: [S]: rows of the request that a stored state stands behind; ascending.
        store_tables: [S]: where its blocks begin in ``block_ids``.
        block_ids: Blocks of all states.
    """

    row_requests: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    sources: torch.Tensor
    store_firsts: torch.Tensor
    store_counts: torch.Tensor
    store_ends: torch.Tensor
    store_tables: torch.Tensor
    block_ids: torch.Tensor


# -- convolution ------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_TABLES)
def _convolve_kernel(
    rows,
    pages,
    weight,
    out,
    row_requests,
    starts,
    sources,
    block_ids,
    num_rows,
    row_stride,
    block_stride,
    first_channel,
    first_block,
    channels_per_block,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < CHANNELS
    request = tl.load(row_requests + row, mask=row < num_rows, other=-1)
    is_row = request >= 0
    start = tl.load(starts + request, mask=is_row, other=0)
    source = tl.load(sources + request, mask=is_row, other=-1)
    stored_channel = first_channel + channel
    piece = first_block + stored_channel // channels_per_block
    slot = stored_channel % channels_per_block
    mixed = tl.zeros((ROWS, BLOCK), tl.float32)
    for tap in tl.static_range(WIDTH):
        # Of the request's rows, this one; those before the step stand in its state.
        index = row - start + (tap - (WIDTH - 1))
        is_own = is_row & (index >= 0)
        is_stored = is_row & (index < 0) & (source >= 0)
        own_at = (start + index).to(tl.int64)[:, None] * row_stride + channel[None, :]
        value = tl.load(rows + own_at, mask=is_own[:, None] & is_channel[None, :], other=0.0)
        stored_mask = is_stored[:, None] & is_channel[None, :]
        block = tl.load(block_ids + source[:, None] + piece[None, :], mask=stored_mask, other=0)
        column = (WIDTH - 1 + index)[:, None] * channels_per_block + slot[None, :]
        stored_at = block.to(tl.int64) * block_stride + column
        value += tl.load(pages + stored_at, mask=stored_mask, other=0.0)
        factor = tl.load(weight + channel * WIDTH + tap, mask=is_channel, other=0.0)
        mixed += value * factor[None, :]
    mixed = mixed * sigmoid_of(mixed)
    target = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(out + target, mixed, mask=(row < num_rows)[:, None] & is_channel[None, :])


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def _store_columns_kernel(
    rows,
    pages,
    starts,
    sources,
    store_firsts,
    store_counts,
    store_ends,
    store_tables,
    block_ids,
    row_stride,
    block_stride,
    first_channel,
    first_block,
    channels_per_block,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores the last inputs behind each state, the last state first.

    The first state may lie where the one it is made of lies. A column's values come from later
    columns of that, so in ascending order none is overwritten before it is read; a channel has one
    thread.
    """
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < CHANNELS
    start = tl.load(starts + request)
    source = tl.load(sources + request)
    first = tl.load(store_firsts + request)
    count = tl.load(store_counts + request)
    stored_channel = first_channel + channel
    piece = first_block + stored_channel // channels_per_block
    slot = stored_channel % channels_per_block
    from_mask = is_channel & (source + 0 * channel >= 0)
    from_block = tl.load(block_ids + source + piece, mask=from_mask, other=0).to(tl.int64)
    for back in range(count):
        store = first + count - 1 - back
        end = tl.load(store_ends + store)
        table = tl.load(store_tables + store)
        block = tl.load(block_ids + table + piece, mask=is_channel, other=0).to(tl.int64)
        for column in range(COLUMNS):
            # One index a channel, as masks need it.
            index = end - COLUMNS + column + 0 * channel
            own_at = (start + index).to(tl.int64) * row_stride + channel
            value = tl.load(rows + own_at, mask=is_channel & (index >= 0), other=0.0)
            stored_at = from_block * block_stride + (COLUMNS + index) * channels_per_block + slot
            value += tl.load(pages + stored_at, mask=from_mask & (index < 0), other=0.0)
            target = block * block_stride + column * channels_per_block + slot
            tl.store(pages + target, value, mask=is_channel)


# -- the delta rule ---------------------------------------------------------------------------


@triton.jit
def _scan_rows(
    state,
    queries,
    keys,
    values,
    decays,
    betas,
    out,
    first_row,
    end_row,
    query_stride,
    key_stride,
    value_stride,
    query_scale,
    head,
    column,
    key,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HAS_CHANNEL_DECAYS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Takes a state through some rows and stores their outputs; returns it."""
    is_head = head < HEADS
    key_mask = is_head[:, None] & (key < KEY_DIM)[None, :]
    value_mask = is_head[:, None] & (column < VALUE_DIM)[None, :]
    key_at = (head * KEY_HEADS // HEADS)[:, None] * KEY_DIM + key[None, :]
    value_at = head[:, None] * VALUE_DIM + column[None, :]
    for row in range(first_row, end_row):
        k = tl.load(keys + row * key_stride + key_at, mask=key_mask, other=0.0)
        q = tl.load(queries + row * query_stride + key_at, mask=key_mask, other=0.0)
        k = k * tl.rsqrt(tl.sum(k * k, axis=1) + EPS)[:, None]
        q = q * tl.rsqrt(tl.sum(q * q, axis=1) + EPS)[:, None] * query_scale
        v = tl.load(values + row * value_stride + value_at, mask=value_mask, other=0.0)
        beta = tl.load(betas + row * HEADS + head, mask=is_head, other=0.0)
        if HAS_CHANNEL_DECAYS:
            decay_at = (row * HEADS + head)[:, None] * KEY_DIM + key[None, :]
            decay = tl.load(decays + decay_at, mask=key_mask, other=0.0)
            state = state * tl.exp(decay)[:, :, None]
        else:
            decay = tl.load(decays + row * HEADS + head, mask=is_head, other=0.0)
            state = state * tl.exp(decay)[:, None, None]
        read = tl.sum(k[:, :, None] * state, axis=1)
        change = (v - read) * beta[:, None]
        state = state + k[:, :, None] * change[:, None, :]
        found = tl.sum(q[:, :, None] * state, axis=1)
        tl.store(out + row * (HEADS * VALUE_DIM) + value_at, found, mask=value_mask)
    return state


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def _scan_kernel(
    queries,
    keys,
    values,
    decays,
    betas,
    pages,
    out,
    starts,
    counts,
    sources,
    store_firsts,
    store_counts,
    store_ends,
    store_tables,
    block_ids,
    query_stride,
    key_stride,
    value_stride,
    block_stride,
    first_head,
    heads_per_block,
    query_scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    HAS_CHANNEL_DECAYS: tl.constexpr,
    EPS: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.program_id(2) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    key = tl.arange(0, BLOCK_KEYS)
    is_head = head < HEADS
    key_mask = is_head[:, None] & (key < KEY_DIM)[None, :]
    value_mask = is_head[:, None] & (column < VALUE_DIM)[None, :]
    mask = key_mask[:, :, None] & value_mask[:, None, :]
    start = tl.load(starts + request).to(tl.int64)
    count = tl.load(counts + request)
    source = tl.load(sources + request)
    first = tl.load(store_firsts + request)
    num_stores = tl.load(store_counts + request)

    piece = (first_head + head) // heads_per_block
    inner = ((first_head + head) % heads_per_block) * (KEY_DIM * VALUE_DIM)
    inner = inner[:, None, None] + key[None, :, None] * VALUE_DIM + column[None, None, :]
    has_source = is_head & (source + 0 * head >= 0)
    block = tl.load(block_ids + source + piece, mask=has_source, other=0).to(tl.int64)
    state = tl.load(
        pages + block[:, None, None] * block_stride + inner,
        mask=mask & has_source[:, None, None],
        other=0.0,
    )
    # All is read before anything may be stored in the same place.
    tl.debug_barrier()

    done = 0
    for number in range(num_stores):
        end = tl.load(store_ends + first + number)
        state = _scan_rows(
            state,
            queries,
            keys,
            values,
            decays,
            betas,
            out,
            start + done,
            start + end,
            query_stride,
            key_stride,
            value_stride,
            query_scale,
            head,
            column,
            key,
            HEADS,
            KEY_HEADS,
            KEY_DIM,
            VALUE_DIM,
            HAS_CHANNEL_DECAYS,
            EPS,
        )
        table = tl.load(store_tables + first + number)
        own = tl.load(block_ids + table + piece, mask=is_head, other=0).to(tl.int64)
        tl.store(pages + own[:, None, None] * block_stride + inner, state, mask=mask)
        done = end
    # Behind the last stored state: drafts, which only give outputs.
    _scan_rows(
        state,
        queries,
        keys,
        values,
        decays,
        betas,
        out,
        start + done,
        start + count,
        query_stride,
        key_stride,
        value_stride,
        query_scale,
        head,
        column,
        key,
        HEADS,
        KEY_HEADS,
        KEY_DIM,
        VALUE_DIM,
        HAS_CHANNEL_DECAYS,
        EPS,
    )


@dataclass(frozen=True, slots=True)
class _Pages:
    """Where one layer's heads lie in pages [num_blocks, ..., values]."""

    values: torch.Tensor
    first_head: int
    heads_per_block: int


def _scan(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    heads: tuple[int, int, int, int],
    decays: torch.Tensor,
    betas: torch.Tensor,
    pages: _Pages,
    tables: StateTables,
    out: torch.Tensor,
) -> None:
    """Launches the scan of queries, keys and values, rows of any stride, of (G, H, K, V) heads."""
    num_key_heads, num_heads, key_dim, value_dim = heads
    block_heads = power_of_two(num_heads) if IS_INTERPRETED else 1
    columns = min(_STATE_COLUMNS, power_of_two(value_dim))
    queries, keys, values = parts
    launch(
        _scan_kernel,
        (len(tables.starts), divide_up(num_heads, block_heads), divide_up(value_dim, columns)),
        queries,
        keys,
        values,
        decays,
        betas,
        pages.values,
        out,
        tables.starts,
        tables.counts,
        tables.sources,
        tables.store_firsts,
        tables.store_counts,
        tables.store_ends,
        tables.store_tables,
        tables.block_ids,
        queries.stride(0),
        keys.stride(0),
        values.stride(0),
        pages.values.stride(0),
        pages.first_head,
        pages.heads_per_block,
        key_dim**-0.5,
        HEADS=num_heads,
        KEY_HEADS=num_key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_KEYS=power_of_two(key_dim),
        BLOCK_VALUES=columns,
        HAS_CHANNEL_DECAYS=decays.dim() == 3,
        EPS=_L2_EPS,
    )


def run_states(
    channels: torch.Tensor,
    weight: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor,
    pages: torch.Tensor,
    layout: StateLayout,
    number: int,
    num_key_heads: int,
    tables: StateTables,
) -> torch.Tensor:
    """Takes the states of a step's requests through their rows.

    Args:
        channels: fp32 [T, C]: inputs of the convolution.
        weight: fp32 [C, W]: of it, the oldest row's first.
        decays: fp32 [T, H] or [T, H, K]: logarithms.
        betas: fp32 [T, H].
        pages: fp32 [num_blocks, 1, values]: the states' cache.
        layout: Where the parts of a state lie.
        number: Which of the recurrent layers.
        num_key_heads: G.
        tables: The step's.

    Returns:
        fp32 [T, H, V]; zeros for rows of no request.

    Mutates:
        pages.
    """
    shape = layout.shape
    num_rows = len(channels)
    heads, key_dim, value_dim = shape.num_heads, shape.key_dim, shape.value_dim
    width, key_values = weight.shape[1], num_key_heads * key_dim
    assert channels.stride(1) == 1, "a row's values stand side by side"
    assert pages.stride(2) == 1, "a page's values stand side by side"
    where = (
        pages.stride(0),
        number * shape.num_channels,
        layout.num_head_blocks,
        layout.channels_per_block,
    )
    block = min(_CHANNELS, power_of_two(shape.num_channels))
    mixed = torch.empty((num_rows, shape.num_channels), dtype=torch.float32, device=channels.device)
    launch(
        _convolve_kernel,
        (divide_up(num_rows, _CONVOLVED_ROWS), divide_up(shape.num_channels, block)),
        channels,
        pages,
        weight.contiguous(),
        mixed,
        tables.row_requests,
        tables.starts,
        tables.sources,
        tables.block_ids,
        num_rows,
        channels.stride(0),
        *where,
        CHANNELS=shape.num_channels,
        WIDTH=width,
        ROWS=_CONVOLVED_ROWS,
        BLOCK=block,
    )
    launch(
        _store_columns_kernel,
        (len(tables.starts), divide_up(shape.num_channels, block)),
        channels,
        pages,
        tables.starts,
        tables.sources,
        tables.store_firsts,
        tables.store_counts,
        tables.store_ends,
        tables.store_tables,
        tables.block_ids,
        channels.stride(0),
        *where,
        CHANNELS=shape.num_channels,
        COLUMNS=width - 1,
        BLOCK=block,
    )
    out = torch.zeros((num_rows, heads, value_dim), dtype=torch.float32, device=channels.device)
    rest = shape.num_channels - 2 * key_values
    queries, keys, values = torch.split(mixed, [key_values, key_values, rest], 1)
    _scan(
        (queries, keys, values),
        (num_key_heads, heads, key_dim, value_dim),
        decays.contiguous(),
        betas.contiguous(),
        _Pages(pages, number * heads, layout.heads_per_block),
        tables,
        out,
    )
    return out


def gated_delta_scan(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """See ``recurrent.gated_delta_scan``: one request, whose state is one block of its own."""
    num_rows, num_heads, value_dim = values.shape
    key_heads, key_dim = keys.shape[1:]
    kept = state if state.is_contiguous() else state.contiguous()
    zero = torch.zeros(1, dtype=torch.int32, device=state.device)
    one, rows = torch.ones_like(zero), torch.full_like(zero, num_rows)
    tables = StateTables(zero, zero, rows, zero, zero, one, rows, zero, zero)
    out = torch.empty((num_rows, num_heads, value_dim), dtype=torch.float32, device=state.device)
    parts = (queries.flatten(1), keys.flatten(1), values.flatten(1))
    _scan(
        parts,
        (key_heads, num_heads, key_dim, value_dim),
        decays.contiguous(),
        betas.contiguous(),
        _Pages(kept.view(1, -1), 0, num_heads),
        tables,
        out,
    )
    if kept is not state:
        state.copy_(kept)
    return out


def short_convolution(rows: torch.Tensor, left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See ``recurrent.short_convolution``: the rows before are one block of a page."""
    num_rows, num_channels = rows.shape
    block = min(_CHANNELS, power_of_two(num_channels))
    row_requests = torch.zeros(num_rows, dtype=torch.int32, device=rows.device)
    zero = row_requests.new_zeros(1)
    out = torch.empty((num_rows, num_channels), dtype=torch.float32, device=rows.device)
    inputs = rows if rows.stride(1) == 1 else rows.contiguous()
    launch(
        _convolve_kernel,
        (divide_up(num_rows, _CONVOLVED_ROWS), divide_up(num_channels, block)),
        inputs,
        left.contiguous(),
        weight.contiguous(),
        out,
        row_requests,
        zero,
        zero,
        zero,
        num_rows,
        inputs.stride(0),
        0,
        0,
        0,
        num_channels,
        CHANNELS=num_channels,
        WIDTH=weight.shape[1],
        ROWS=_CONVOLVED_ROWS,
        BLOCK=block,
    )
    return out


# -- what stands around it --------------------------------------------------------------------


@triton.jit
def _decay_kernel(
    inputs,
    bias,
    a_log,
    out,
    size,
    per_row,
    per_log,
    bound,
    IS_BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    own = index % per_row
    x = tl.load(inputs + index, mask=mask, other=0.0).to(tl.float32)
    x = x + tl.load(bias + own, mask=mask, other=0.0)
    rate = tl.exp(tl.load(a_log + own // per_log, mask=mask, other=0.0))
    if IS_BOUNDED:
        tl.store(out + index, -bound * sigmoid_of(rate * x), mask=mask)
    else:
        # log(1 + exp(x)) without overflow, and without what rounding 1 + small takes away.
        small = tl.exp(-tl.abs(x))
        whole = 1.0 + small
        lost = small / tl.where(whole == 1.0, 1.0, whole - 1.0)
        near = tl.where(whole == 1.0, small, tl.log(whole) * lost)
        tl.store(out + index, -(tl.maximum(x, 0.0) + near) * rate, mask=mask)


def decay_logs(inputs: torch.Tensor, bias: torch.Tensor, a_log: torch.Tensor) -> torch.Tensor:
    """See ``recurrent.decay_logs``."""
    return _find_decays(inputs, bias, a_log, None)


def bounded_decay_logs(
    inputs: torch.Tensor, bias: torch.Tensor, a_log: torch.Tensor, bound: float
) -> torch.Tensor:
    """See ``recurrent.bounded_decay_logs``."""
    return _find_decays(inputs, bias, a_log, bound)


def _find_decays(
    inputs: torch.Tensor, bias: torch.Tensor, a_log: torch.Tensor, bound: float | None
) -> torch.Tensor:
    kept = inputs.contiguous()
    out = torch.empty(inputs.shape, dtype=torch.float32, device=inputs.device)
    block = rows_per_program(1)
    launch(
        _decay_kernel,
        (divide_up(out.numel(), block),),
        kept,
        bias.contiguous(),
        a_log.contiguous(),
        out,
        out.numel(),
        bias.numel(),
        bias.numel() // a_log.numel(),
        0.0 if bound is None else float(bound),
        IS_BOUNDED=bound is not None,
        BLOCK=block,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x,
    gates,
    weight,
    out,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)[:, None]
    values = values * tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    gate = tl.load(gates + at, mask=mask, other=0.0).to(tl.float32)
    factor = sigmoid_of(gate)
    if ACTIVATION == 0:
        factor = factor * gate
    tl.store(out + at, (values * factor).to(out.dtype.element_ty), mask=mask)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str
) -> torch.Tensor:
    """See ``recurrent.gated_rms_norm``."""
    width = x.shape[-1]
    kept = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, rows = out.numel() // width, rows_per_program(width)
    launch(
        _gated_norm_kernel,
        (divide_up(num_rows, rows),),
        kept,
        gate.contiguous(),
        weight.contiguous(),
        out,
        num_rows,
        eps,
        WIDTH=width,
        BLOCK=power_of_two(width),
        ROWS=rows,
        ACTIVATION=_SILU if activation == "silu" else _SIGMOID,
    )
    return out


@triton.jit
def _gate_heads_kernel(attended, gates, out, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    gate = tl.load(gates + index, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(attended + index, mask=mask, other=0.0).to(tl.float32)
    # The gate counts in the type that it has, as where it is a tensor of its own.
    factor = sigmoid_of(gate).to(gates.dtype.element_ty).to(tl.float32)
    tl.store(out + index, (value * factor).to(out.dtype.element_ty), mask=mask)


def gate_heads(attended: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """See ``recurrent.gate_heads``."""
    out = torch.empty(attended.shape, dtype=attended.dtype, device=attended.device)
    block = rows_per_program(1)
    launch(
        _gate_heads_kernel,
        (divide_up(out.numel(), block),),
        attended.contiguous(),
        gates.contiguous(),
        out,
        out.numel(),
        BLOCK=block,
    )
    return out
