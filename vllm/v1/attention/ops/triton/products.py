"""Products with weights as they are stored, decoded in registers; grouped by expert, or one matrix.

    program (block of rows of one expert, block of outputs), a loop over the inputs

A row's sums have one order whatever stands beside it: blocks and the loop's step are fixed.
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
from vllm.v1.attention.ops.triton.routing import Routing, choose_rows_per_block, route
from vllm.v1.attention.ops.triton.small_floats import e2m1_value, e4m3_value, power_of

_OUTPUTS = 256 if IS_INTERPRETED else 64
_INPUTS = 256 if IS_INTERPRETED else 64


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
    KIND: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    HAS_BYTE_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATHER: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    block = tl.program_id(0)
    expert = tl.load(experts + block)
    if expert < num_experts:
        pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS))
        is_row = pair < num_pairs
        row = pair
        if IS_GATHER:
            row = pair // num_chosen
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = output < out_size
        own_codes = codes + expert.to(tl.int64) * matrix_stride
        own_scales = scales + expert.to(tl.int64) * scale_stride
        sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for first in range(0, in_size, INPUTS):
            column = first + tl.arange(0, INPUTS)
            is_column = column < in_size
            source = row.to(tl.int64)[:, None] * x_stride + column[None, :]
            values = tl.load(x + source, mask=is_row[:, None] & is_column[None, :], other=0.0)
            weights = load_weights(
                own_codes,
                own_scales,
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
        if HAS_BIAS:
            added = tl.load(bias + expert * out_size + output, mask=is_output, other=0.0)
            sums += added.to(tl.float32)[None, :]
        target = pair.to(tl.int64)[:, None] * out_stride + output[None, :]
        tl.store(
            out + target,
            sums.to(out.dtype.element_ty),
            mask=is_row[:, None] & is_output[None, :],
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
    assert x.stride(-1) == 1, "a row's values stand side by side"
    if out is None:
        out = x.new_empty((routing.num_pairs, stack.out_size))
    outputs = min(_OUTPUTS, max(16, power_of_two(stack.out_size)))
    scale_columns = divide_up(stack.in_size, stack.scale_shape[1])
    launch(
        _grouped_product_kernel,
        (len(routing.experts), divide_up(stack.out_size, outputs)),
        x,
        stack.codes,
        stack.scales,
        x if bias is None else bias,
        out,
        routing.pairs,
        routing.experts,
        routing.num_pairs,
        stack.num_matrices,
        routing.num_chosen,
        x.stride(0),
        out.stride(0),
        stack.out_size,
        stack.in_size,
        stack.codes.stride(0),
        0
        if stack.kind == PLAIN
        else scale_columns * divide_up(stack.out_size, stack.scale_shape[0]),
        scale_columns,
        KIND=stack.kind,
        SCALE_ROWS=stack.scale_shape[0],
        SCALE_COLUMNS=stack.scale_shape[1],
        HAS_BYTE_SCALES=stack.kind != PLAIN and stack.scales.dtype == torch.uint8,
        HAS_BIAS=bias is not None,
        IS_GATHER=is_gather,
        ROWS=routing.rows_per_block,
        OUTPUTS=outputs,
        INPUTS=min(_INPUTS, max(16, power_of_two(stack.in_size))),
    )
    return out


def stack_linear(
    x: torch.Tensor,
    stack: StoredStack,
    *,
    is_invariant: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Maps [T, in] by the one matrix of a stack to [T, out]; see ``grouped_product``."""
    num_rows = x.shape[0]
    rows = choose_rows_per_block(num_rows, 1, is_invariant=is_invariant)
    num_blocks = divide_up(num_rows, rows)
    # Rows in order: of the last block those from num_rows on are none.
    pairs = torch.arange(num_blocks * rows, dtype=torch.int32, device=x.device)
    experts = torch.zeros(num_blocks, dtype=torch.int32, device=x.device)
    routing = Routing(pairs, experts, num_rows, 1, rows)
    wide = x if x.stride(-1) == 1 else x.contiguous()
    return grouped_product(wide, stack, routing, is_gather=False, out=out)


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
