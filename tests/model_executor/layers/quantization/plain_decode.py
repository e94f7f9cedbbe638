"""Decoding spelled out, code by code in Python's floats: what the fast one must equal."""

from collections.abc import Callable

import torch

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e2m1_value(code: int) -> float:
    return -E2M1[code - 8] if code >= 8 else E2M1[code]


def e4m3_value(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e8m0_value(byte: int) -> float:
    return 2.0 ** (byte - 127)


def _table(decode: Callable[[int], float], num_codes: int) -> torch.Tensor:
    return torch.tensor([decode(code) for code in range(num_codes)], dtype=torch.float64)


_E2M1, _E4M3, _E8M0 = _table(e2m1_value, 16), _table(e4m3_value, 256), _table(e8m0_value, 256)


def _multiply(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Multiplies float64 [R, n] by the scales of blocks; rounds once."""
    scales = _E8M0[scales.long()] if scales.dtype == torch.uint8 else scales.double()
    by_row = scales.repeat_interleave(block[0], 0)[: values.shape[0]]
    return (values * by_row.repeat_interleave(block[1], 1)[:, : values.shape[1]]).float()


def plain_fp4(codes: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """Decodes uint8 [R, n / 2] to fp32 [R, n]."""
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    return _multiply(_E2M1[nibbles.long()], scales, (1, group_size))


def plain_fp8(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Decodes uint8 [R, n] to fp32 [R, n]."""
    return _multiply(_E4M3[codes.long()], scales, block)
