"""Products with weights as they are stored, decoded in registers; grouped by expert, or one matrix.

    program (block of rows of one expert, block of outputs), a loop over the inputs

A row's sums have one order whatever stands beside it: blocks, the loop's step and the parts that a
sum is split into are fixed.
"""

import torch
import triton
import triton.language as tl

from vllm.v1.attention.ops.stored import PLAIN, StoredStack
from vllm.v1.attention.ops.triton.launch import (
    IS_INTERPRETED,
    divide_up,
    launch,
    multiply,
    power_of_two,
)
from vllm.v1.attention.ops.triton.routing import (
    Routing,
    Splits,
    choose_rows_per_block,
    choose_splits,
    route,
)
from vllm.v1.attention.ops.triton.small_floats import e2m1_value, e4m3_value, power_of

_OUTPUTS = 256 if IS_INTERPRETED else 64
_INPUTS = 256 if IS_INTERPRETED else 64
_JOINED_OUTPUTS = 1 << 16 if IS_INTERPRETED else 512


@triton.jit
def load_weights(
    codes,
    scales,
    output,
    column,
    mask,
    in_size,
    scale_columns,
    KIND: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    HAS_BYTE_SCALES: tl.constexpr,
):
    """Returns a tile of decoded weights: fp32, or as they are where they are plain."""
    if KIND == 0:
        return tl.load(
            codes + output.to(tl.int64)[:, None] * in_size + column[None, :], mask=mask, other=0.0
        )
    else:
        if KIND == 2:
            at = output.to(tl.int64)[:, None] * (in_size // 2) + (column // 2)[None, :]
            byte = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
            values = e2m1_value((byte >> ((column % 2) * 4)[None, :]) & 15)
        else:
            at = output.to(tl.int64)[:, None] * in_size + column[None, :]
            byte = tl.load(codes + at, mask=mask, other=0)
            if KIND == 1:
                values = e4m3_value(byte)
            else:
                values = byte.to(tl.float32)
        scale_at = (output // SCALE_ROWS)[:, None] * scale_columns
        scale_at = scale_at + (column // SCALE_COLUMNS)[None, :]
        if HAS_BYTE_SCALES:
            scale = power_of(tl.load(scales + scale_at, mask=mask, other=127))
        else:
            scale = tl.load(scales + scale_at, mask=mask, other=0.0)
        return values * scale


@triton.jit
def _sum_products(
    x,
    codes,
    scales,
    row,
    is_row,
    output,
    is_output,
    first_column,
    end_column,
    x_stride,
    in_size,
    scale_columns,
    KIND: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    HAS_BYTE_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Returns fp32 sums [rows, outputs] over some of the inputs."""
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(first_column, end_column, INPUTS):
        column = first + tl.arange(0, INPUTS)
        is_column = column < in_size
        source = row.to(tl.int64)[:, None] * x_stride + column[None, :]
        values = tl.load(x + source, mask=is_row[:, None] & is_column[None, :], other=0.0)
        weights = load_weights(
            codes,
            scales,
            output,
            column,
            is_output[:, None] & is_column[None, :],
            in_size,
            scale_columns,
            KIND,
            SCALE_ROWS,
            SCALE_COLUMNS,
            HAS_BYTE_SCALES,
        )
        sums += multiply(values, tl.trans(weights.to(values.dtype)))
    return sums


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_product_kernel(
    x,
    codes,
    scales,
    bias,
    out,
    pairs,
    experts,
    num_pairs,
    num_experts,
    num_chosen,
    x_stride,
    out_stride,
    out_size,
    in_size,
    matrix_stride,
    scale_stride,
    scale_columns,
    split_inputs,
    KIND: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    HAS_BYTE_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ROUTED: tl.constexpr,
    IS_GATHER: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TURNS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    block = tl.program_id(0)
    expert = 0
    if IS_ROUTED:
        expert = tl.load(experts + block)
    if expert < num_experts:
        pair = block * ROWS + tl.arange(0, ROWS)
        if IS_ROUTED:
            pair = tl.load(pairs + pair)
        is_row = pair < num_pairs
        row = pair
        if IS_GATHER:
            row = pair // num_chosen
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = output < out_size
        own_codes, own_scales = codes, scales
        if IS_ROUTED:
            own_codes += tl.cast(expert, tl.int64) * matrix_stride
            own_scales += tl.cast(expert, tl.int64) * scale_stride
        split = 0
        if IS_SPLIT:
            split = tl.program_id(2)
        sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for turn in range(0, TURNS):
            first = (split + turn) * split_inputs
            end = tl.minimum(first + split_inputs, in_size)
            sums += _sum_products(
                x,
                own_codes,
                own_scales,
                row,
                is_row,
                output,
                is_output,
                first,
                end,
                x_stride,
                in_size,
                scale_columns,
                KIND,
                SCALE_ROWS,
                SCALE_COLUMNS,
                HAS_BYTE_SCALES,
                ROWS,
                OUTPUTS,
                INPUTS,
            )
        if HAS_BIAS:
            added = tl.load(bias + expert * out_size + output, mask=is_output, other=0.0)
            sums += added.to(tl.float32)[None, :]
        target = pair.to(tl.int64)[:, None] * out_stride + output[None, :]
        if IS_SPLIT:
            target += tl.program_id(2).to(tl.int64) * num_pairs * out_stride
        tl.store(
            out + target,
            sums.to(out.dtype.element_ty),
            mask=is_row[:, None] & is_output[None, :],
        )


@triton.jit
def _join_splits_kernel(
    sums, out, num_splits, split_stride, out_stride, out_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = output < out_size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(0, num_splits):
        at = split * split_stride + row * out_size + output
        total += tl.load(sums + at, mask=is_output, other=0.0)
    tl.store(out + row * out_stride + output, total.to(out.dtype.element_ty), mask=is_output)


def join_splits(sums: torch.Tensor, out: torch.Tensor) -> None:
    """Adds the sums [splits, T, out] of a product's parts in order.

    Mutates:
        out: [T, out], a row's values side by side.
    """
    num_splits, num_rows, out_size = sums.shape
    block = min(_JOINED_OUTPUTS, power_of_two(out_size))
    launch(
        _join_splits_kernel,
        (num_rows, divide_up(out_size, block)),
        sums,
        out,
        num_splits,
        sums.stride(0),
        out.stride(0),
        out_size,
        BLOCK=block,
    )


def grouped_product(
    x: torch.Tensor,
    stack: StoredStack,
    routing: Routing,
    bias: torch.Tensor | None = None,
    *,
    is_gather: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Maps each pair's row by its expert's matrix.

    Args:
        x: [T, in] with ``is_gather``: rows by token; else [num_pairs, in].
        stack: The experts' matrices.
        routing: The pairs.
        bias: [E, out], or None.
        is_gather: Whether x has rows by token.
        out: [num_pairs, out], which becomes the result; a row's values stand side by side.

    Returns:
        [num_pairs, out] by pair, of x's type unless ``out`` is given.
    """
    if out is None:
        out = x.new_empty((routing.num_pairs, stack.out_size))
    _launch_product(x, stack, out, routing.rows_per_block, routing, bias, is_gather=is_gather)
    return out


def stack_linear(
    x: torch.Tensor,
    stack: StoredStack,
    *,
    is_invariant: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Maps [T, in] by the one matrix of a stack to [T, out]; see ``grouped_product``."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows = len(x)
    if out is None:
        out = x.new_empty((num_rows, stack.out_size))
    rows = choose_rows_per_block(num_rows, 1, is_invariant=is_invariant)
    num_blocks = divide_up(stack.out_size, _choose_outputs(stack))
    num_steps = divide_up(stack.in_size, _choose_inputs(stack))
    splits = choose_splits(num_rows, num_blocks, num_steps, is_invariant=is_invariant)
    if splits.are_programs:
        shape = (splits.count, num_rows, stack.out_size)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
        _launch_product(x, stack, sums, rows, splits=splits)
        join_splits(sums, out)
    else:
        _launch_product(x, stack, out, rows, splits=splits)
    return out


def _choose_outputs(stack: StoredStack) -> int:
    return min(_OUTPUTS, max(16, power_of_two(stack.out_size)))


def _choose_inputs(stack: StoredStack) -> int:
    return min(_INPUTS, max(16, power_of_two(stack.in_size)))


def _launch_product(
    x: torch.Tensor,
    stack: StoredStack,
    out: torch.Tensor,
    rows: int,
    routing: Routing | None = None,
    bias: torch.Tensor | None = None,
    *,
    is_gather: bool = False,
    splits: Splits | None = None,
) -> None:
    """Launches a product of blocks of ``rows`` rows; without a routing all are of one matrix."""
    assert x.stride(-1) == 1, "a row's values stand side by side"
    outputs, inputs = _choose_outputs(stack), _choose_inputs(stack)
    splits = splits or Splits(1, divide_up(stack.in_size, inputs))
    scale_columns = divide_up(stack.in_size, stack.scale_shape[1])
    if routing is None:
        num_blocks, num_pairs, num_chosen = divide_up(len(x), rows), len(x), 1
    else:
        num_blocks, num_pairs = len(routing.experts), routing.num_pairs
        num_chosen = routing.num_chosen
    launch(
        _grouped_product_kernel,
        (
            num_blocks,
            divide_up(stack.out_size, outputs),
            splits.num_programs,
        ),
        x,
        stack.codes,
        stack.scales,
        x if bias is None else bias,
        out,
        stack.codes if routing is None else routing.pairs,
        stack.codes if routing is None else routing.experts,
        num_pairs,
        stack.num_matrices,
        num_chosen,
        x.stride(0),
        out.stride(-2),
        stack.out_size,
        stack.in_size,
        stack.codes.stride(0),
        0
        if stack.kind == PLAIN
        else scale_columns * divide_up(stack.out_size, stack.scale_shape[0]),
        scale_columns,
        splits.num_steps * inputs,
        KIND=stack.kind,
        SCALE_ROWS=stack.scale_shape[0],
        SCALE_COLUMNS=stack.scale_shape[1],
        HAS_BYTE_SCALES=stack.kind != PLAIN and stack.scales.dtype == torch.uint8,
        HAS_BIAS=bias is not None,
        IS_ROUTED=routing is not None,
        IS_GATHER=is_gather,
        IS_SPLIT=splits.are_programs,
        TURNS=splits.num_turns,
        ROWS=rows,
        OUTPUTS=outputs,
        INPUTS=inputs,
    )


def linear_in_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``reference.linear`` with one order of sums in any batch, which cuBLAS does not promise."""
    return stack_linear(x, StoredStack.plain(weight.unsqueeze(0)))


def grouped_linear_in_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``reference.grouped_linear`` likewise: a slice is a row that chose its own matrix."""
    num_rows, num_groups, in_size = x.shape
    ids = torch.arange(num_groups, device=x.device).expand(num_rows, -1)
    rows = choose_rows_per_block(num_rows * num_groups, num_groups, is_invariant=True)
    routing = route(ids, num_groups, rows)
    flat = x.reshape(-1, in_size)
    mapped = grouped_product(flat, StoredStack.plain(weight), routing, is_gather=False)
    return mapped.view(num_rows, num_groups, -1)
