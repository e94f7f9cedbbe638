"""Decoders of the small floating-point formats that checkpoints store weights in.

Formats (OCP Microscaling Formats 1.0, and OCP 8-bit Floating Point 1.0):

    e2m1   4 bits, two to a byte, even column in the low nibble: 0 .5 1 1.5 2 3 4 6 and negatives
    e4m3   8 bits, finite (no infinities; 0x7f and 0xff are NaN)
    e8m0   8 bits, a scale: 2^(byte - 127); 255 is NaN

Every decoded value is the one fp32 product of a code's value and its scale. All are table look-ups:
on a CPU torch's own conversion of e4m3 takes 4.9 ns a value, a look-up 0.7 ns, and one of a whole
byte of e2m1 gives two values.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127
# 80 us of look-ups, against some 20 us to wake a thread.
_MIN_CODES_PER_THREAD = 1 << 17


@cache
def _e8m0_values(device: torch.device) -> torch.Tensor:
    """Returns fp32 [256]; the first is subnormal, the last NaN."""
    values = [2.0 ** (byte - _E8M0_BIAS) for byte in range(255)]
    return torch.tensor([*values, float("nan")], dtype=torch.float32, device=device)


@cache
def _e4m3_values(device: torch.device) -> torch.Tensor:
    """Returns fp32 [256]."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


@cache
def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """Returns int64 [256]: the two fp32 values of a byte, side by side as in memory."""
    # Minus zero (code 8) is zero: a product with it must not turn a sum of zeros negative.
    negatives = [0.0 - magnitude for magnitude in _E2M1_MAGNITUDES]
    values = torch.tensor([*_E2M1_MAGNITUDES, *negatives], dtype=torch.float32)
    codes = torch.arange(256)
    pairs = torch.stack([values[codes & 15], values[codes >> 4]], 1)
    return pairs.view(torch.int64).flatten().to(device)


def _look_up(
    table: torch.Tensor, codes: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns table[codes], in the shape of the uint8 codes; ``out`` is contiguous."""
    flat = codes.flatten().to(torch.int32)
    num_parts = min(torch.get_num_threads(), flat.shape[0] // _MIN_CODES_PER_THREAD)
    if num_parts > 1 and codes.device.type == "cpu":
        found = torch.empty(codes.shape, dtype=table.dtype) if out is None else out
        _select_in_threads(table, flat, found.view(-1), num_parts)
        return found
    if out is None:
        return table.index_select(0, flat).view(codes.shape)
    torch.index_select(table, 0, flat, out=out.view(-1))
    return out


@cache
def _threads(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="decode")


def _select_in_threads(
    table: torch.Tensor, index: torch.Tensor, out: torch.Tensor, num_parts: int
) -> None:
    """``index_select`` of one axis, which torch itself runs on one core.

    Mutates:
        out.
    """
    is_inference = torch.is_inference_mode_enabled()

    def select(index_part: torch.Tensor, out_part: torch.Tensor) -> None:
        # Every thread has a mode of its own.
        with torch.inference_mode(is_inference):
            torch.index_select(table, 0, index_part, out=out_part)

    parts = zip(index.chunk(num_parts), out.chunk(num_parts), strict=True)
    pending = [_threads(num_parts).submit(select, *part) for part in parts]
    for future in pending:
        future.result()


def decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 scales of uint8 e8m0 bytes of any shape."""
    return _look_up(_e8m0_values(scales.device), scales)


def decode_e4m3(codes: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the fp32 values of uint8 e4m3 codes of any shape, in ``out`` if given."""
    return _look_up(_e4m3_values(codes.device), codes, out)


def decode_e2m1(codes: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the fp32 values [..., n] of uint8 bytes [..., n / 2], two e2m1 codes each.

    ``out``, if given, is contiguous and becomes the result.
    """
    pairs = None if out is None else out.view(torch.int64)
    return _look_up(_e2m1_pairs(codes.device), codes, pairs).view(torch.float32)


def decode_scales(scales: torch.Tensor) -> torch.Tensor:
    """Returns fp32 scales as they are, and uint8 ones as e8m0."""
    return decode_e8m0(scales) if scales.dtype == torch.uint8 else scales.float()


def decode_fp4_groups(
    codes: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the fp32 matrix [R, n] of e2m1 codes with one scale per group of a row's columns.

    MXFP4 is this with groups of 32 and e8m0 scales.

    Args:
        codes: uint8 [R, n / 2].
        scales: uint8 (e8m0) or floating [R, ceil(n / group_size)].
        group_size: Columns of a group; the last may be cut off.
        out: fp32 [R, n], contiguous: becomes the result.
    """
    values = decode_e2m1(codes, out)
    factors = decode_scales(scales)
    num_rows, num_columns = values.shape
    if num_columns % group_size == 0:
        grouped = values.view(num_rows, -1, group_size)
        return grouped.mul_(factors.unsqueeze(2)).view(num_rows, num_columns)
    return values.mul_(factors.repeat_interleave(group_size, 1)[:, :num_columns])


def decode_fp8_blocks(
    codes: torch.Tensor,
    scales: torch.Tensor,
    block_shape: tuple[int, int],
    first_row: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the fp32 rows of e4m3 codes with one scale per block of the matrix they belong to.

    Args:
        codes: uint8 [R, n]: rows ``first_row .. first_row + R - 1`` of the matrix.
        scales: uint8 (e8m0) or floating [rows of blocks, ceil(n / columns of a block)], of the
            whole matrix.
        block_shape: Rows and columns of a block; the last ones may be cut off.
        first_row: See ``codes``.
        out: fp32 [R, n], contiguous: becomes the result.
    """
    values = decode_e4m3(codes, out)
    num_rows, num_columns = values.shape
    block_rows, block_columns = block_shape
    # | first_row .. end of its block | whole blocks ... | start of the last row's block .. |
    first_block, stop_block = first_row // block_rows, -(-(first_row + num_rows) // block_rows)
    factors = decode_scales(scales[first_block:stop_block])
    whole_rows = first_row % block_rows == 0 and num_rows % block_rows == 0
    if whole_rows and num_columns % block_columns == 0:
        blocks = values.view(-1, block_rows, factors.shape[1], block_columns)
        blocks.mul_(factors[:, None, :, None])
        return values
    factors = factors.repeat_interleave(block_columns, 1)[:, :num_columns]
    for index in range(stop_block - first_block):
        start = max((first_block + index) * block_rows - first_row, 0)
        stop = (first_block + index + 1) * block_rows - first_row
        values[start:stop].mul_(factors[index])
    return values


def view_as(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of a tensor's rows as values of another type."""
    values = values.contiguous()
    is_apart = values.storage_offset() * values.itemsize % dtype.itemsize != 0
    if values.stride(-1) != 1 or is_apart:
        # An axis of one value counts as contiguous whatever its stride; a part of a row may begin
        # between two such values.
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(dtype)
