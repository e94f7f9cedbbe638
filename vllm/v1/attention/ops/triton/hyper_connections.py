"""DeepSeek-V4's hyper-connections: projections of streams, doubly stochastic mixing, sums."""

import torch
import triton
import triton.language as tl

from vllm.v1.attention.ops.triton.launch import (
    divide_up,
    launch,
    multiply,
    power_of_two,
    rows_per_program,
)

# The flattened streams are long (28,672 values in a release) and tokens may be few, so the sum is
# split; a fixed length keeps its order the same in any batch.
_SPLIT_VALUES = 2048
_BLOCK_VALUES = 64
_BLOCK_TOKENS = 16


@triton.jit(do_not_specialize=["num_tokens"])
def _project_kernel(
    streams,
    fn,
    partial,
    num_tokens,
    stride,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(1)
    output = tl.arange(0, BLOCK_OUT)
    sums = tl.zeros((TOKENS, BLOCK_OUT), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for first in range(0, SPLIT, BLOCK):
        column = split * SPLIT + first + tl.arange(0, BLOCK)
        mask = (token < num_tokens)[:, None] & (column < WIDTH)[None, :]
        source = token.to(tl.int64)[:, None] * stride + column[None, :]
        values = tl.load(streams + source, mask=mask, other=0.0).to(tl.float32)
        weight_mask = (output < OUTPUTS)[:, None] & (column < WIDTH)[None, :]
        weights = tl.load(
            fn + output[:, None] * WIDTH + column[None, :], mask=weight_mask, other=0.0
        )
        sums += multiply(values, tl.trans(weights))
        squares += tl.sum(values * values, axis=1)
    # Column OUTPUTS holds the squares.
    sums = tl.where((output == OUTPUTS)[None, :], squares[:, None], sums)
    target = (split * num_tokens + token).to(tl.int64)[:, None] * BLOCK_OUT + output[None, :]
    mask = (token < num_tokens)[:, None] & (output <= OUTPUTS)[None, :]
    tl.store(partial + target, sums, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _finish_projection_kernel(
    partial,
    scale,
    base,
    out,
    num_tokens,
    eps,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    output = tl.arange(0, BLOCK_OUT)
    sums = tl.zeros((TOKENS, BLOCK_OUT), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    is_token = token < num_tokens
    is_output = output < OUTPUTS
    mask = is_token[:, None] & is_output[None, :]
    for split in range(SPLITS):
        row = (split * num_tokens + token).to(tl.int64) * BLOCK_OUT
        sums += tl.load(partial + row[:, None] + output[None, :], mask=mask, other=0.0)
        squares += tl.load(partial + row + OUTPUTS, mask=is_token, other=0.0)
    inverse = tl.rsqrt(squares / WIDTH + eps)
    factor = tl.load(scale + output, mask=is_output, other=0.0)
    start = tl.load(base + output, mask=is_output, other=0.0)
    values = start[None, :] + sums * inverse[:, None] * factor[None, :]
    tl.store(out + token[:, None] * OUTPUTS + output[None, :], values, mask=mask)


def hc_project(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float
) -> torch.Tensor:
    """See ``reference.hc_project``; the scale may be one number for all outputs."""
    flat = streams.flatten(1)
    num_tokens, width = flat.shape
    outputs = fn.shape[0]
    block_out = max(16, power_of_two(outputs + 1))
    splits = divide_up(width, _SPLIT_VALUES)
    partial = torch.empty(
        (splits, num_tokens, block_out), dtype=torch.float32, device=streams.device
    )
    tokens = _BLOCK_TOKENS
    launch(
        _project_kernel,
        (divide_up(num_tokens, tokens), splits),
        flat,
        fn,
        partial,
        num_tokens,
        flat.stride(0),
        WIDTH=width,
        OUTPUTS=outputs,
        BLOCK_OUT=block_out,
        TOKENS=tokens,
        BLOCK=_BLOCK_VALUES,
        SPLIT=min(_SPLIT_VALUES, divide_up(width, _BLOCK_VALUES) * _BLOCK_VALUES),
    )
    out = torch.empty((num_tokens, outputs), dtype=torch.float32, device=streams.device)
    launch(
        _finish_projection_kernel,
        (divide_up(num_tokens, tokens),),
        partial,
        scale.expand(outputs).contiguous(),
        base,
        out,
        num_tokens,
        eps,
        SPLITS=splits,
        WIDTH=width,
        OUTPUTS=outputs,
        BLOCK_OUT=block_out,
        TOKENS=tokens,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _sinkhorn_kernel(
    logits,
    out,
    num_tokens,
    eps,
    stride,
    ITERATIONS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK)
    inside = (row < SIZE)[None, :, None] & (column < SIZE)[None, None, :]
    mask = (token < num_tokens)[:, None, None] & inside
    cell = row[None, :, None] * SIZE + column[None, None, :]
    source = token.to(tl.int64)[:, None, None] * stride + cell
    values = tl.load(logits + source, mask=mask, other=float("-inf"))
    # Padding rows are all -inf: their softmax must not become NaN.
    peak = tl.max(values, axis=2)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    values = tl.exp(values - peak[:, :, None])
    total = tl.sum(values, axis=2)
    values = values / tl.where(total == 0.0, 1.0, total)[:, :, None]
    values = tl.where(inside, values + eps, 0.0)
    values = values / (tl.sum(values, axis=1) + eps)[:, None, :]
    for _ in range(ITERATIONS - 1):
        values = values / (tl.sum(values, axis=2) + eps)[:, :, None]
        values = values / (tl.sum(values, axis=1) + eps)[:, None, :]
    target = token.to(tl.int64)[:, None, None] * (SIZE * SIZE) + cell
    tl.store(out + target, values, mask=mask)


def sinkhorn(
    logits: torch.Tensor,
    num_iterations: int,
    eps: float,
    row_sums: torch.Tensor,
    column_sums: torch.Tensor,
) -> torch.Tensor:
    """See ``reference.sinkhorn``; the constant matrices are not needed here."""
    del row_sums, column_sums
    num_tokens, size, _ = logits.shape
    assert logits.stride(2) == 1, "rows of a matrix stand side by side"
    assert logits.stride(1) == size, "rows of a matrix stand side by side"
    block = power_of_two(size)
    tokens = min(64, rows_per_program(block * block))
    out = torch.empty((num_tokens, size, size), dtype=torch.float32, device=logits.device)
    launch(
        _sinkhorn_kernel,
        (divide_up(num_tokens, tokens),),
        logits,
        out,
        num_tokens,
        eps,
        logits.stride(0),
        ITERATIONS=num_iterations,
        SIZE=size,
        BLOCK=block,
        TOKENS=tokens,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _collapse_kernel(
    streams,
    weights,
    out,
    num_tokens,
    token_stride,
    stream_stride,
    weight_stride,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    mask = is_token[:, None] & (column < WIDTH)[None, :]
    sums = tl.zeros((TOKENS, BLOCK), tl.float32)
    for index in range(STREAMS):
        source = token.to(tl.int64)[:, None] * token_stride + index * stream_stride
        values = tl.load(streams + source + column[None, :], mask=mask, other=0.0)
        weight = tl.load(weights + token * weight_stride + index, mask=is_token, other=0.0)
        sums += weight[:, None] * values.to(tl.float32)
    target = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out + target, sums.to(out.dtype.element_ty), mask=mask)


def hc_collapse(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See ``reference.hc_collapse``."""
    num_tokens, num_streams, width = streams.shape
    assert streams.stride(2) == 1, "a stream's values stand side by side"
    block = min(1024, power_of_two(width))
    tokens = rows_per_program(block)
    out = torch.empty((num_tokens, width), dtype=streams.dtype, device=streams.device)
    weights = weights.contiguous()
    launch(
        _collapse_kernel,
        (divide_up(num_tokens, tokens), divide_up(width, block)),
        streams,
        weights,
        out,
        num_tokens,
        streams.stride(0),
        streams.stride(1),
        weights.stride(0),
        STREAMS=num_streams,
        WIDTH=width,
        BLOCK=block,
        TOKENS=tokens,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    output,
    streams,
    post,
    mix,
    out,
    num_tokens,
    output_stride,
    token_stride,
    stream_stride,
    post_stride,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    mask = is_token[:, None] & (column < WIDTH)[None, :]
    wide = token.to(tl.int64)[:, None]
    added = tl.load(output + wide * output_stride + column[None, :], mask=mask, other=0.0)
    added = added.to(tl.float32)
    for target_index in range(STREAMS):
        factor = tl.load(post + token * post_stride + target_index, mask=is_token, other=0.0)
        sums = factor[:, None] * added
        for index in range(STREAMS):
            source = wide * token_stride + index * stream_stride + column[None, :]
            values = tl.load(streams + source, mask=mask, other=0.0).to(tl.float32)
            cell = (token * STREAMS + index) * STREAMS + target_index
            weight = tl.load(mix + cell, mask=is_token, other=0.0)
            sums += weight[:, None] * values
        target = (wide * STREAMS + target_index) * WIDTH + column[None, :]
        tl.store(out + target, sums.to(out.dtype.element_ty), mask=mask)


def hc_expand(
    output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """See ``reference.hc_expand``."""
    num_tokens, num_streams, width = streams.shape
    assert output.stride(1) == 1, "a row's values stand side by side"
    assert streams.stride(2) == 1, "a stream's values stand side by side"
    block = min(1024, power_of_two(width))
    tokens = rows_per_program(block)
    out = torch.empty((num_tokens, num_streams, width), dtype=streams.dtype, device=streams.device)
    launch(
        _expand_kernel,
        (divide_up(num_tokens, tokens), divide_up(width, block)),
        output,
        streams,
        post if post.stride(1) == 1 else post.contiguous(),
        mix.contiguous(),
        out,
        num_tokens,
        output.stride(0),
        streams.stride(0),
        streams.stride(1),
        post.stride(0) if post.stride(1) == 1 else num_streams,
        STREAMS=num_streams,
        WIDTH=width,
        BLOCK=block,
        TOKENS=tokens,
    )
    return out
