"""Norms, rotary turns, gates and caps: one pass over memory each, fp32 in registers."""

import torch
import triton
import triton.language as tl

from vllm.v1.attention.ops.triton.launch import divide_up, launch, power_of_two, rows_per_program

_SILU, _GELU_TANH, _CLAMPED_SILU, _CLAMPED_PAIRS = 0, 1, 2, 3


def _as_two_level(x: torch.Tensor) -> torch.Tensor:
    """Returns [A, B, d] over the same memory where strides allow, else a copy."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        x = x.contiguous()
    if x.dim() == 3:
        return x
    if x.dim() == 2:
        return x.unsqueeze(1)
    return x.reshape(-1, 1, x.shape[-1])


# -- norms ------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,
    weight,
    out,
    num_rows,
    inner,
    stride_outer,
    stride_inner,
    weight_rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    source = (row // inner).to(tl.int64) * stride_outer + (row % inner) * stride_inner
    values = tl.load(x + source[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(values * values, axis=1) / WIDTH
    values = values * tl.rsqrt(mean + eps)[:, None]
    if HAS_WEIGHT:
        own = (row % weight_rows)[:, None] * WIDTH + column[None, :]
        scale = tl.load(weight + own, mask=mask, other=0.0).to(tl.float32)
        values = values * (scale + OFFSET)
    target = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out + target, values.to(out.dtype.element_ty), mask=mask)


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float) -> torch.Tensor:
    width = x.shape[-1]
    view = _as_two_level(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = view.shape[0] * view.shape[1]
    rows = rows_per_program(width)
    launch(
        _rms_norm_kernel,
        (divide_up(num_rows, rows),),
        view,
        view if weight is None else weight.contiguous(),
        out,
        num_rows,
        view.shape[1],
        view.stride(0),
        view.stride(1),
        1 if weight is None else weight.numel() // width,
        eps,
        WIDTH=width,
        BLOCK=power_of_two(width),
        ROWS=rows,
        HAS_WEIGHT=weight is not None,
        OFFSET=offset,
    )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See ``reference.rms_norm``; a weight may have rows, one for each index of the axis before."""
    return _norm(x, weight, eps, 0.0)


def rms_norm_offset(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``decoder.rms_norm_offset``."""
    return _norm(x, weight, eps, 1.0)


# -- rotary embedding -------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_halves_kernel(
    x,
    cos,
    sin,
    out,
    num_rows,
    heads,
    stride_row,
    stride_head,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < HALF)[None, :]
    token = row // heads
    source = token.to(tl.int64) * stride_row + (row % heads) * stride_head
    source = source[:, None] + column[None, :]
    first = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + source + HALF, mask=mask, other=0.0).to(tl.float32)
    turn = token[:, None] * (2 * HALF) + column[None, :]
    cos_first = tl.load(cos + turn, mask=mask, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + turn + HALF, mask=mask, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + turn, mask=mask, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + turn + HALF, mask=mask, other=0.0).to(tl.float32)
    target = row.to(tl.int64)[:, None] * (2 * HALF) + column[None, :]
    dtype = out.dtype.element_ty
    tl.store(out + target, (first * cos_first + second * sin_first).to(dtype), mask=mask)
    tl.store(out + target + HALF, (second * cos_second + first * sin_second).to(dtype), mask=mask)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See ``decoder.rotate_halves``."""
    view = _as_two_level(x)
    num_tokens, heads, width = view.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = rows_per_program(width)
    launch(
        _rotate_halves_kernel,
        (divide_up(num_tokens * heads, rows),),
        view,
        cos.contiguous(),
        sin.contiguous(),
        out,
        num_tokens * heads,
        heads,
        view.stride(0),
        view.stride(1),
        HALF=width // 2,
        BLOCK=power_of_two(width // 2),
        ROWS=rows,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_pairs_kernel(
    x,
    turns,
    num_rows,
    inner,
    stride_outer,
    stride_inner,
    rows_per_turn,
    FIRST: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (pair < PAIRS)[None, :]
    source = (row // inner).to(tl.int64) * stride_outer + (row % inner) * stride_inner
    source = source[:, None] + FIRST + 2 * pair[None, :]
    turn = (row // rows_per_turn)[:, None] * (2 * PAIRS) + 2 * pair[None, :]
    real = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    imaginary = tl.load(x + source + 1, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(turns + turn, mask=mask, other=0.0)
    sin = tl.load(turns + turn + 1, mask=mask, other=0.0)
    dtype = x.dtype.element_ty
    tl.store(x + source, (real * cos - imaginary * sin).to(dtype), mask=mask)
    tl.store(x + source + 1, (real * sin + imaginary * cos).to(dtype), mask=mask)


def rotate_(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """See ``reference.rotate_``; the turns of a row serve all rows of the axes behind it."""
    width, pairs = x.shape[-1], turns.shape[-1]
    num_rows = x.numel() // max(1, width)
    if not num_rows or not pairs:
        return x
    view = x.unsqueeze(1) if x.dim() == 2 else x
    assert view.dim() == 3, f"rows or heads of rows are turned, not {tuple(x.shape)}"
    assert view.stride(-1) == 1, "pairs stand side by side"
    rows = rows_per_program(width)
    launch(
        _rotate_pairs_kernel,
        (divide_up(num_rows, rows),),
        view,
        torch.view_as_real(turns.contiguous()),
        num_rows,
        view.shape[1],
        view.stride(0),
        view.stride(1),
        num_rows // (turns.numel() // pairs),
        FIRST=width - 2 * pairs,
        PAIRS=pairs,
        BLOCK=power_of_two(pairs),
        ROWS=rows,
    )
    return x


# -- gates ------------------------------------------------------------------------------------


@triton.jit
def sigmoid_of(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh_of(x):
    """By the exponential, which does not overflow where x is large."""
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def gate_of(gate, up, alpha, limit, KIND: tl.constexpr):
    """The gated product of fp32 values; kinds as in ``activate_and_mul``."""
    if KIND == 0:
        result = gate * sigmoid_of(gate) * up
    elif KIND == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = 0.5 * gate * (1.0 + tanh_of(inner)) * up
    elif KIND == 2:
        gate = tl.minimum(gate, limit)
        result = gate * sigmoid_of(gate) * tl.minimum(tl.maximum(up, -limit), limit)
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        result = (up + 1.0) * gate * sigmoid_of(alpha * gate)
    return result


@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(
    x,
    out,
    num_rows,
    stride,
    alpha,
    limit,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    IS_PAIRED: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    start = row.to(tl.int64)[:, None] * stride
    if IS_PAIRED:
        first = start + 2 * column[None, :]
        second = first + 1
    else:
        first = start + column[None, :]
        second = first + WIDTH
    gate = tl.load(x + first, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + second, mask=mask, other=0.0).to(tl.float32)
    result = gate_of(gate, up, alpha, limit, KIND)
    target = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=mask)


def _activate(
    gate_up: torch.Tensor, kind: int, alpha: float = 0.0, limit: float = 0.0
) -> torch.Tensor:
    rows_in = gate_up if gate_up.stride(-1) == 1 else gate_up.contiguous()
    num_rows, both = rows_in.shape
    width = both // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, power_of_two(width))
    rows = rows_per_program(block)
    launch(
        _gate_kernel,
        (divide_up(num_rows, rows), divide_up(width, block)),
        rows_in,
        out,
        num_rows,
        rows_in.stride(0),
        alpha,
        limit,
        WIDTH=width,
        BLOCK=block,
        ROWS=rows,
        KIND=kind,
        IS_PAIRED=kind == _CLAMPED_PAIRS,
    )
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``decoder.silu_and_mul``."""
    return _activate(gate_up, _SILU)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``decoder.gelu_tanh_and_mul``."""
    return _activate(gate_up, _GELU_TANH)


def clamped_glu_and_mul(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """See ``decoder.clamped_glu_and_mul``."""
    return _activate(gate_up, _CLAMPED_PAIRS, alpha, limit)


def clamped_silu_and_mul(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """See ``decoder.limited_silu_and_mul``."""
    return _activate(gate_up, _CLAMPED_SILU, 0.0, limit)


@triton.jit
def _soft_cap_kernel(x, size, cap, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    values = tl.load(x + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + index, (tanh_of(values / cap) * cap).to(x.dtype.element_ty), mask=mask)


def soft_cap_(x: torch.Tensor, cap: float) -> torch.Tensor:
    """See ``decoder.soft_cap_``."""
    if not x.is_contiguous():
        return x.copy_(soft_cap_(x.contiguous(), cap))
    block = rows_per_program(1)
    launch(_soft_cap_kernel, (divide_up(x.numel(), block),), x, x.numel(), cap, BLOCK=block)
    return x
