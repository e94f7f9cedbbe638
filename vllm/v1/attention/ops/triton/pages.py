"""Rows into and out of paged caches, and whole blocks from one place to another."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from vllm.utils.uploads import upload
from vllm.v1.attention.ops.triton.launch import divide_up, launch, power_of_two, rows_per_program

_MAX_COLUMNS = 1024


# Tables are parts of larger ones, which begin anywhere: a program for each way they happen to begin
# at multiples of 16 bytes would be compiled in the middle of serving.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["blocks", "rows"])
def _move_rows_kernel(
    cache,
    blocks,
    rows,
    values,
    num_rows,
    block_stride,
    row_stride,
    value_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    IS_WRITE: tl.constexpr,
):
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = index < num_rows
    block = tl.load(blocks + index, mask=is_row, other=0).to(tl.int64)
    row = tl.load(rows + index, mask=is_row, other=0).to(tl.int64)
    # Rows of the null block are zeros, and stay as they are.
    mask = (is_row & (block > 0))[:, None] & (column < WIDTH)[None, :]
    page = (block * block_stride + row * row_stride)[:, None] + column[None, :]
    flat = index.to(tl.int64)[:, None] * value_stride + column[None, :]
    if IS_WRITE:
        kept = tl.load(values + flat, mask=mask, other=0.0)
        tl.store(cache + page, kept.to(cache.dtype.element_ty), mask=mask)
    else:
        read = tl.load(cache + page, mask=mask, other=0.0)
        is_value = is_row[:, None] & (column < WIDTH)[None, :]
        tl.store(values + flat, read.to(values.dtype.element_ty), mask=is_value)


def _move_rows(
    cache: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    values: torch.Tensor,
    *,
    is_write: bool,
) -> None:
    width = cache.shape[2]
    block = min(_MAX_COLUMNS, power_of_two(width))
    per_program = rows_per_program(block)
    launch(
        _move_rows_kernel,
        (divide_up(len(values), per_program), divide_up(width, block)),
        cache,
        blocks,
        rows,
        values,
        len(values),
        cache.stride(0),
        cache.stride(1),
        values.stride(0),
        WIDTH=width,
        BLOCK=block,
        ROWS=per_program,
        IS_WRITE=is_write,
    )


def write_rows(
    cache: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, values: torch.Tensor
) -> None:
    """See ``reference.write_rows``; rows that go to block 0 are not kept."""
    kept = values if values.stride(-1) == 1 else values.contiguous()
    _move_rows(cache, blocks.contiguous(), rows.contiguous(), kept, is_write=True)


def read_rows(
    cache: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See ``reference.read_rows``; rows of block 0 are zeros."""
    values = torch.empty((blocks.numel(), cache.shape[2]), dtype=dtype, device=cache.device)
    _move_rows(cache, blocks.contiguous(), rows.contiguous(), values, is_write=False)
    return values.view(*blocks.shape, cache.shape[2])


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots"])
def _write_slots_kernel(
    cache,
    slots,
    values,
    num_rows,
    block_stride,
    row_stride,
    value_stride,
    PAGE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + index, mask=index < num_rows, other=-1).to(tl.int64)
    mask = (slot >= 0)[:, None] & (column < WIDTH)[None, :]
    page = (slot // PAGE_ROWS) * block_stride + (slot % PAGE_ROWS) * row_stride
    flat = index.to(tl.int64)[:, None] * value_stride + column[None, :]
    kept = tl.load(values + flat, mask=mask, other=0.0)
    tl.store(cache + page[:, None] + column[None, :], kept.to(cache.dtype.element_ty), mask=mask)


def write_slots(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Stores rows by slot mapping.

    Args:
        cache: [num_blocks, rows_per_block, width].
        slots: int32 [N]: block * rows_per_block + row, distinct; negative: the row is not kept.
        values: [N, width].

    Mutates:
        cache.
    """
    num_rows, width = values.shape
    assert values.stride(1) == 1, "a row's values stand side by side"
    block = min(_MAX_COLUMNS, power_of_two(width))
    per_program = rows_per_program(block)
    launch(
        _write_slots_kernel,
        (divide_up(num_rows, per_program), divide_up(width, block)),
        cache,
        slots,
        values,
        num_rows,
        cache.stride(0),
        cache.stride(1),
        values.stride(0),
        PAGE_ROWS=cache.shape[1],
        WIDTH=width,
        BLOCK=block,
        ROWS=per_program,
    )


@triton.jit(do_not_specialize_on_alignment=["ids_from", "ids_to"])
def _copy_blocks_kernel(
    source, target, ids_from, ids_to, source_stride, target_stride, size, BLOCK: tl.constexpr
):
    pair = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(ids_from + pair).to(tl.int64) * source_stride
    second = tl.load(ids_to + pair).to(tl.int64) * target_stride
    values = tl.load(source + first + column, mask=column < size, other=0)
    tl.store(target + second + column, values, mask=column < size)


def _copy_by_ids(
    source: torch.Tensor, target: torch.Tensor, ids_from: torch.Tensor, ids_to: torch.Tensor
) -> None:
    words = min(source.shape[1], target.shape[1])
    block = min(power_of_two(words), rows_per_program(1))
    launch(
        _copy_blocks_kernel,
        (len(ids_from), divide_up(words, block)),
        source,
        target,
        ids_from,
        ids_to,
        source.stride(0),
        target.stride(0),
        words,
        BLOCK=block,
    )


def copy_blocks(pools: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """See ``block_ops.copy_blocks``: two launches a pool, through a scratch of the pairs' rows."""
    if not pairs:
        return
    assert min(map(min, pairs)) > 0, f"block copies {pairs} touch the null block 0"
    assert len({dst for _, dst in pairs}) == len(pairs), f"block copies {pairs} write one twice"
    host = np.array([*zip(*pairs, strict=True), range(len(pairs))], dtype=np.int32)
    for pool in pools:
        sources, targets, order = upload(host, pool.device)
        # Pools are a multiple of eight bytes wide, so that a thread moves eight at a time.
        words = pool.view(torch.int64) if pool.shape[1] % 8 == 0 else pool
        # Pairs may form chains and cycles: every source is read before anything is written.
        scratch = torch.empty((len(pairs), words.shape[1]), dtype=words.dtype, device=pool.device)
        _copy_by_ids(words, scratch, sources, order)
        _copy_by_ids(scratch, words, order, targets)
