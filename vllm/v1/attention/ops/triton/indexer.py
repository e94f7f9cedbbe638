"""DeepSeek-V4's compressor and lightning indexer: entries, their scores, the best of them."""

import torch
import triton
import triton.language as tl

from vllm.v1.attention.ops.triton.launch import (
    IS_INTERPRETED,
    divide_up,
    launch,
    multiply,
    power_of_two,
    rows_per_program,
)

_KEYS = 256 if IS_INTERPRETED else 64
_BLOCK = 4096 if IS_INTERPRETED else 1024
_SELECT_ROWS = 64 if IS_INTERPRETED else 1


@triton.jit
def _compress_kernel(
    current,
    previous,
    no_previous,
    out,
    RATIO: tl.constexpr,
    BLOCK_RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_PREVIOUS: tl.constexpr,
    MAY_LACK: tl.constexpr,
):
    window = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, BLOCK_RATIO)
    mask = (row < RATIO)[:, None] & (column < WIDTH)[None, :]
    if HAS_PREVIOUS:
        # | old c | own c | old s | own s |
        source = (window * RATIO + row)[:, None] * (4 * WIDTH) + column[None, :]
        values = tl.load(current + source + WIDTH, mask=mask, other=0.0)
        scores = tl.load(current + source + 3 * WIDTH, mask=mask, other=float("-inf"))
        old_mask = mask
        if MAY_LACK:
            lacks = tl.load(no_previous + window + 0 * row)
            old_mask = mask & (lacks == 0)[:, None]
        old_values = tl.load(previous + source, mask=old_mask, other=0.0)
        old_scores = tl.load(previous + source + 2 * WIDTH, mask=old_mask, other=float("-inf"))
        peak = tl.maximum(tl.max(scores, axis=0), tl.max(old_scores, axis=0))
        peak = tl.where(column < WIDTH, peak, 0.0)
        weights = tl.exp(scores - peak[None, :])
        old_weights = tl.exp(old_scores - peak[None, :])
        total = tl.sum(weights, axis=0) + tl.sum(old_weights, axis=0)
        mixed = tl.sum(weights * values, axis=0) + tl.sum(old_weights * old_values, axis=0)
    else:
        source = (window * RATIO + row)[:, None] * (2 * WIDTH) + column[None, :]
        values = tl.load(current + source, mask=mask, other=0.0)
        scores = tl.load(current + source + WIDTH, mask=mask, other=float("-inf"))
        peak = tl.where(column < WIDTH, tl.max(scores, axis=0), 0.0)
        weights = tl.exp(scores - peak[None, :])
        total = tl.sum(weights, axis=0)
        mixed = tl.sum(weights * values, axis=0)
    mixed = mixed / tl.where(column < WIDTH, total, 1.0)
    tl.store(out + window * WIDTH + column, mixed, mask=column < WIDTH)


def compress_windows(
    current: torch.Tensor, previous: torch.Tensor | None, no_previous: torch.Tensor | None
) -> torch.Tensor:
    """See ``reference.compress_windows``."""
    num_windows, ratio, row_width = current.shape
    width = row_width // (2 if previous is None else 4)
    current = current.contiguous()
    out = torch.empty((num_windows, width), dtype=torch.float32, device=current.device)
    block = min(power_of_two(width), rows_per_program(power_of_two(ratio)))
    launch(
        _compress_kernel,
        (num_windows, divide_up(width, block)),
        current,
        current if previous is None else previous.contiguous(),
        current if no_previous is None else no_previous.contiguous().view(torch.uint8),
        out,
        RATIO=ratio,
        BLOCK_RATIO=power_of_two(ratio),
        WIDTH=width,
        BLOCK=block,
        HAS_PREVIOUS=previous is not None,
        MAY_LACK=no_previous is not None,
    )
    return out


@triton.jit(do_not_specialize=["num_queries"])
def _score_kernel(
    queries,
    keys,
    head_weights,
    out,
    num_queries,
    num_keys,
    k_batch,
    k_row,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    batch = query // num_queries
    at = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    head = tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_WIDTH)
    is_column = column < WIDTH
    q_at = (query * HEADS + head)[:, None] * WIDTH + column[None, :]
    q = tl.load(queries + q_at, mask=(head < HEADS)[:, None] & is_column[None, :], other=0.0)
    k_at = batch * k_batch + at.to(tl.int64)[:, None] * k_row + column[None, :]
    k = tl.load(keys + k_at, mask=(at < num_keys)[:, None] & is_column[None, :], other=0.0)
    products = multiply(q, tl.trans(k))
    weights = tl.load(head_weights + query * HEADS + head, mask=head < HEADS, other=0.0)
    products = tl.maximum(products, 0.0) * weights.to(tl.float32)[:, None]
    tl.store(out + query * num_keys + at, tl.sum(products, axis=0), mask=at < num_keys)


def index_scores(
    queries: torch.Tensor, keys: torch.Tensor, head_weights: torch.Tensor
) -> torch.Tensor:
    """See ``reference.index_scores``."""
    num_batches, num_queries, heads, width = queries.shape
    num_keys = keys.shape[1]
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    out = torch.empty(
        (num_batches, num_queries, num_keys), dtype=torch.float32, device=queries.device
    )
    launch(
        _score_kernel,
        (num_batches * num_queries, divide_up(num_keys, _KEYS)),
        queries.contiguous(),
        keys,
        head_weights.contiguous(),
        out,
        max(1, num_queries),
        num_keys,
        keys.stride(0),
        keys.stride(1),
        HEADS=heads,
        BLOCK_HEADS=max(16, power_of_two(heads)),
        WIDTH=width,
        BLOCK_WIDTH=max(16, power_of_two(width)),
        KEYS=_KEYS,
    )
    return out


@triton.jit
def order_of(values):
    """Maps fp32 to int32 in the same order, both zeros alike."""
    # Adding zero makes minus zero plus zero.
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _load_order(scores, row, first, num_rows, num_values, BLOCK: tl.constexpr):
    """Returns a block of each row's values as int64 in their order, and which of them exist."""
    at = first + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (at < num_values)[None, :]
    source = row.to(tl.int64)[:, None] * num_values + at[None, :]
    values = tl.load(scores + source, mask=inside, other=0.0)
    return order_of(values).to(tl.int64), inside, source


@triton.jit(do_not_specialize=["num_rows"])
def _select_kernel(
    scores, out, num_rows, num_values, num_selected, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """The threshold is found bit by bit, from the sign down: 32 passes over a row in the cache."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # The highest threshold that at least num_selected values reach; in the order of int32.
    threshold = tl.full((ROWS,), -2147483648, tl.int64)
    bit = tl.full((ROWS,), 2147483648, tl.int64)
    for _step in range(32):
        candidate = threshold + bit
        reached = tl.zeros((ROWS,), tl.int32)
        for first in range(0, num_values, BLOCK):
            order, inside, _source = _load_order(scores, row, first, num_rows, num_values, BLOCK)
            is_reached = (order >= candidate[:, None]) & inside
            reached += tl.sum(is_reached.to(tl.int32), axis=1)
        threshold = tl.where(reached >= num_selected, candidate, threshold)
        bit = bit // 2
    above = tl.zeros((ROWS,), tl.int32)
    for first in range(0, num_values, BLOCK):
        order, inside, _source = _load_order(scores, row, first, num_rows, num_values, BLOCK)
        above += tl.sum(((order > threshold[:, None]) & inside).to(tl.int32), axis=1)
    # Of the values on the threshold, the earliest ones fill up.
    missing = num_selected - above
    for first in range(0, num_values, BLOCK):
        order, inside, source = _load_order(scores, row, first, num_rows, num_values, BLOCK)
        is_equal = ((order == threshold[:, None]) & inside).to(tl.int32)
        is_early = (is_equal == 1) & (tl.cumsum(is_equal, 1) <= missing[:, None])
        is_chosen = (order > threshold[:, None]) | is_early
        tl.store(out + source, is_chosen.to(tl.int8), mask=inside)
        missing -= tl.sum(is_equal, axis=1)


def select_entries(scores: torch.Tensor, num_selected: int) -> torch.Tensor:
    """See ``reference.select_entries``."""
    num_values = scores.shape[-1]
    flat = scores.contiguous()
    out = torch.empty(scores.shape, dtype=torch.int8, device=scores.device)
    num_rows = flat.numel() // max(1, num_values)
    launch(
        _select_kernel,
        (divide_up(num_rows, _SELECT_ROWS),),
        flat,
        out,
        num_rows,
        num_values,
        num_selected,
        BLOCK=min(_BLOCK, power_of_two(num_values)),
        ROWS=_SELECT_ROWS,
    )
    return out.view(torch.bool)


def list_entries(chosen: torch.Tensor, num_selected: int) -> torch.Tensor:
    """See ``reference.list_entries``: the host need not know how many there are."""
    places = chosen.cumsum(-1) - 1
    # Entries that were not chosen share a place behind the others.
    places = places.masked_fill(~chosen, num_selected)
    shape = (*chosen.shape[:-1], num_selected + 1)
    listed = torch.zeros(shape, dtype=torch.int64, device=chosen.device)
    numbers = torch.arange(chosen.shape[-1], device=chosen.device).expand(chosen.shape)
    return listed.scatter_(-1, places, numbers)[..., :num_selected]
