"""Encoders of the formats that ``decode`` reads, for converters and tests.

A scale is the smallest power of two that brings the largest magnitude it covers into the format's
range; values are rounded to the nearest code, ties to even.
"""

import torch

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_E8M0_BIAS = 127
# Where a magnitude begins to round to the next code: midpoints, each belonging to the even code.
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def encode_fp8_blocks(
    weight: torch.Tensor, block_shape: tuple[int, int], *, float_scales: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a matrix [R, n] to e4m3.

    Args:
        weight: Finite values.
        block_shape: Rows and columns that share a scale; the last blocks may be cut off.
        float_scales: Scales are fp32 and use the whole range, instead of e8m0.

    Returns:
        Codes, float8_e4m3fn [R, n], and scales, float8_e8m0fnu or fp32.
    """
    wide = weight.float()
    peaks = _block_peaks(wide, block_shape)
    if float_scales:
        stored = factors = torch.where(peaks > 0, peaks / _E4M3_MAX, 1.0)
    else:
        stored, factors = _e8m0_scales(peaks, _E4M3_MAX)
    spread = factors.repeat_interleave(block_shape[0], 0).repeat_interleave(block_shape[1], 1)
    scaled = wide / spread[: wide.shape[0], : wide.shape[1]]
    return scaled.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), stored


def encode_fp4_groups(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a matrix [R, n], n even, to e2m1.

    Returns:
        Codes, uint8 [R, n / 2], the even column in the low nibble, and scales, float8_e8m0fnu
        [R, ceil(n / group_size)].
    """
    wide = weight.float()
    stored, factors = _e8m0_scales(_block_peaks(wide, (1, group_size)), _E2M1_MAX)
    scaled = wide / factors.repeat_interleave(group_size, 1)[:, : wide.shape[1]]
    midpoints = torch.tensor(_E2M1_MIDPOINTS)
    # Codes 1, 3 and 5 give their upper midpoint to the even code above.
    midpoints[1::2] = torch.nextafter(midpoints[1::2], torch.tensor(0.0))
    codes = torch.bucketize(scaled.abs(), midpoints).to(torch.uint8)
    codes += 8 * ((scaled < 0) & (codes > 0)).to(torch.uint8)
    return codes[:, ::2] | (codes[:, 1::2] << 4), stored


def _block_peaks(weight: torch.Tensor, block_shape: tuple[int, int]) -> torch.Tensor:
    """Returns the largest magnitude of each block."""
    rows, columns = weight.shape
    block_rows, block_columns = block_shape
    padded = torch.nn.functional.pad(
        weight.abs(), (0, -columns % block_columns, 0, -rows % block_rows)
    )
    grid = padded.view(
        padded.shape[0] // block_rows, block_rows, padded.shape[1] // block_columns, block_columns
    )
    return grid.amax((1, 3))


def _e8m0_scales(peaks: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales as float8_e8m0fnu and as fp32; of zeros alone, one."""
    # frexp: peak / largest = mantissa * 2^exponent, mantissa in [0.5, 1).
    mantissas, exponents = torch.frexp(torch.where(peaks > 0, peaks / largest, 1.0))
    exponents = torch.where(mantissas == 0.5, exponents - 1, exponents)
    stored = (exponents + _E8M0_BIAS).clamp(0, 254).to(torch.uint8)
    factors = torch.exp2((stored.int() - _E8M0_BIAS).double()).float()
    return stored.view(torch.float8_e8m0fnu), factors
