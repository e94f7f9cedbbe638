"""Decoding spelled out, value by value in Python's floats: what the fast one must equal."""

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


def scale_value(scales: torch.Tensor, row: int, column: int) -> float:
    value = scales[row, column].item()
    return 2.0 ** (value - 127) if scales.dtype == torch.uint8 else float(value)


def plain_fp4(codes: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """Decodes uint8 [R, n / 2] to fp32 [R, n]."""
    num_rows, num_bytes = codes.shape
    rows = []
    for i in range(num_rows):
        row = []
        for j in range(2 * num_bytes):
            byte = int(codes[i, j // 2])
            code = byte >> 4 if j % 2 else byte & 15
            row.append(e2m1_value(code) * scale_value(scales, i, j // group_size))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64).float()


def plain_fp8(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Decodes uint8 [R, n] to fp32 [R, n]."""
    num_rows, num_columns = codes.shape
    rows = [
        [
            e4m3_value(int(codes[i, j])) * scale_value(scales, i // block[0], j // block[1])
            for j in range(num_columns)
        ]
        for i in range(num_rows)
    ]
    return torch.tensor(rows, dtype=torch.float64).float()
