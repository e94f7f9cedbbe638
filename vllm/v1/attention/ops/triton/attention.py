"""Attention over keys that were gathered before: grouped queries, and DeepSeek-V4's shared key."""

import torch
import triton
import triton.language as tl

from vllm.v1.attention.ops.triton.elementwise import tanh_of
from vllm.v1.attention.ops.triton.launch import (
    IS_INTERPRETED,
    divide_up,
    launch,
    multiply,
    power_of_two,
    warps_of,
)
from vllm.v1.attention.step_batch import MAX_DECODE_QUERIES

_QUERIES = 128 if IS_INTERPRETED else 64
_KEYS = 128 if IS_INTERPRETED else 64
# Values of a tile of queries, whose sums stay in registers, and of keys, which lie in shared memory
# beside as many values: the smallest cards have 99 KiB of it.
_QUERY_VALUES = 1 << 20 if IS_INTERPRETED else 1 << 14
_KEY_VALUES = 1 << 20 if IS_INTERPRETED else 1 << 13
# What tl.dot takes at least.
_LEAST = 16


def _choose_tile(num_rows: int, block_width: int) -> tuple[int, int]:
    """Returns rows and keys of a tile."""
    most = max(_LEAST, min(_QUERIES, _QUERY_VALUES // block_width))
    rows = min(most, max(_LEAST, power_of_two(num_rows)))
    return rows, max(_LEAST, min(_KEYS, _KEY_VALUES // block_width))


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def _attend_keys_kernel(
    queries,
    keys,
    values,
    mask,
    out,
    log_sums,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    m_batch,
    m_head,
    m_row,
    num_queries,
    num_keys,
    scale,
    soft_cap,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    is_column = column < WIDTH
    is_row = row < num_queries
    source = batch * q_batch + head * q_head + row[:, None] * q_row + column[None, :]
    q = tl.load(queries + source, mask=is_row[:, None] & is_column[None, :], other=0.0)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, BLOCK_WIDTH), tl.float32)
    for key in range(0, num_keys, KEYS):
        at = key + tl.arange(0, KEYS)
        is_key = at < num_keys
        key_mask = is_key[:, None] & is_column[None, :]
        k_at = batch * k_batch + head * k_head + at.to(tl.int64)[:, None] * k_row
        k = tl.load(keys + k_at + column[None, :], mask=key_mask, other=0.0)
        scores = multiply(q, tl.trans(k)) * scale
        if HAS_CAP:
            scores = tanh_of(scores / soft_cap) * soft_cap
        is_visible = is_row[:, None] & is_key[None, :]
        if HAS_MASK:
            m_at = batch * m_batch + head * m_head + row[:, None] * m_row + at[None, :]
            scores += tl.load(mask + m_at, mask=is_visible, other=0.0)
        if IS_CAUSAL:
            is_visible = is_visible & (at[None, :] <= row[:, None])
        scores = tl.where(is_visible, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, axis=1))
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp(scores - anchor[:, None])
        fade = tl.exp(peak - anchor)
        total = total * fade + tl.sum(weights, axis=1)
        v_at = batch * v_batch + head * v_head + at.to(tl.int64)[:, None] * v_row
        v = tl.load(values + v_at + column[None, :], mask=key_mask, other=0.0)
        mixed = mixed * fade[:, None]
        mixed += multiply(weights.to(v.dtype), v)
        peak = highest
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    log_sum = tl.where(total > 0.0, anchor + tl.log(tl.where(total > 0.0, total, 1.0)), peak)
    mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    target = (batch * HEADS + head) * num_queries + row
    tl.store(
        out + target[:, None] * WIDTH + column[None, :],
        mixed.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )
    tl.store(log_sums + target, log_sum, mask=is_row)


def attend_keys(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``decoder.attend_keys``; a query that sees no key gets zeros and -inf."""
    num_batches, heads, num_queries, width = queries.shape
    if queries.stride(3) != 1:
        queries = queries.contiguous()
    keys, values = (
        part.expand(-1, heads, -1, -1) if part.stride(3) == 1 else part.contiguous()
        for part in (keys, values)
    )
    keys, values = keys.expand(-1, heads, -1, -1), values.expand(-1, heads, -1, -1)
    num_keys = keys.shape[2]
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    log_sums = torch.empty(queries.shape[:3], dtype=torch.float32, device=queries.device)
    spread = log_sums
    mask_strides: tuple[int, ...] = (0, 0, 0)
    if mask is not None:
        spread = mask if mask.stride(-1) == 1 or mask.shape[-1] == 1 else mask.contiguous()
        spread = spread.expand(num_batches, heads, num_queries, num_keys)
        if spread.stride(3) != 1:
            spread = spread.contiguous()
        mask_strides = spread.stride()[:3]
    block_width = max(_LEAST, power_of_two(width))
    rows, keys_per_step = _choose_tile(num_queries, block_width)
    launch(
        _attend_keys_kernel,
        (num_batches, heads, divide_up(num_queries, rows)),
        queries,
        keys,
        values,
        spread,
        out,
        log_sums,
        *queries.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        *mask_strides,
        num_queries,
        num_keys,
        scale,
        soft_cap or 1.0,
        HEADS=heads,
        WIDTH=width,
        BLOCK_WIDTH=block_width,
        ROWS=rows,
        KEYS=keys_per_step,
        HAS_CAP=soft_cap != 0,
        HAS_MASK=mask is not None,
        IS_CAUSAL=is_causal,
        num_warps=warps_of(rows * block_width),
    )
    return out, log_sums


@triton.jit(do_not_specialize=["num_rows", "num_keys", "num_masked"])
def _attend_shared_kernel(
    queries,
    keys,
    mask,
    sinks,
    out,
    num_rows,
    num_keys,
    num_masked,
    q_batch,
    q_row,
    k_batch,
    k_row,
    m_batch,
    m_query,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    # Rows are queries times heads; of the axes of a grid the first alone takes more than 65,535.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch = tl.program_id(1).to(tl.int64)
    query = row // HEADS
    head = row % HEADS
    column = tl.arange(0, BLOCK_WIDTH)
    is_column = column < WIDTH
    is_row = row < num_rows
    row_mask = is_row[:, None] & is_column[None, :]
    source = batch * q_batch + row.to(tl.int64)[:, None] * q_row + column[None, :]
    q = tl.load(queries + source, mask=row_mask, other=0.0)
    # Key 0 is the sink: its value is zero.
    peak = tl.load(sinks + head, mask=is_row, other=0.0)
    total = tl.full((ROWS,), 1.0, tl.float32)
    mixed = tl.zeros((ROWS, BLOCK_WIDTH), tl.float32)
    for key in range(1, num_keys, KEYS):
        at = key + tl.arange(0, KEYS)
        is_key = at < num_keys
        k_at = batch * k_batch + at.to(tl.int64)[:, None] * k_row + column[None, :]
        k = tl.load(keys + k_at, mask=is_key[:, None] & is_column[None, :], other=0.0)
        scores = multiply(q, tl.trans(k))
        if HAS_MASK:
            masked = at - (num_keys - num_masked)
            seen = is_row[:, None] & (is_key & (masked >= 0))[None, :]
            m_at = batch * m_batch + query.to(tl.int64)[:, None] * m_query + masked[None, :]
            scores += tl.load(mask + m_at, mask=seen, other=0.0)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp(scores - highest[:, None])
        fade = tl.exp(peak - highest)
        total = total * fade + tl.sum(weights, axis=1)
        mixed = mixed * fade[:, None]
        mixed += multiply(weights.to(k.dtype), k)
        peak = highest
    mixed = mixed / total[:, None]
    target = (batch * num_rows + row.to(tl.int64))[:, None] * WIDTH + column[None, :]
    tl.store(out + target, mixed.to(out.dtype.element_ty), mask=row_mask)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor
) -> torch.Tensor:
    """See ``reference.attend``."""
    num_batches, num_queries, heads, width = queries.shape
    queries = queries.contiguous()
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    out = torch.empty_like(queries)
    num_rows = num_queries * heads
    block_width = max(_LEAST, power_of_two(width))
    # The same for any number of drafts, so that a query's bits do not depend on it.
    most_rows = max(num_rows, MAX_DECODE_QUERIES * heads)
    rows, keys_per_step = _choose_tile(most_rows, block_width)
    spread = sinks
    mask_strides = (0, 0)
    if mask is not None:
        spread = mask if mask.stride(-1) == 1 else mask.contiguous()
        spread = spread.expand(num_batches, num_queries, 1, -1)
        mask_strides = (spread.stride(0), spread.stride(1))
    launch(
        _attend_shared_kernel,
        (divide_up(num_rows, rows), num_batches),
        queries,
        keys,
        spread,
        sinks,
        out,
        num_rows,
        keys.shape[1],
        0 if mask is None else mask.shape[-1],
        queries.stride(0),
        width,
        keys.stride(0),
        keys.stride(1),
        *mask_strides,
        HEADS=heads,
        WIDTH=width,
        BLOCK_WIDTH=block_width,
        ROWS=rows,
        KEYS=keys_per_step,
        HAS_MASK=mask is not None,
        num_warps=warps_of(rows * block_width),
    )
    return out
