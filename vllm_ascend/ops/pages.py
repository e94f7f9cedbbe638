"""Rows of paged caches: scatter by npu_scatter_nd_update_, gather by aten, int8 index keys.

A row of an int8 cache, as the indexer's pages hold it (width 128: 130 bytes):

    | byte 0 .. width-1: int8 values | 2 bytes: fp16 scale |      value = int8 * scale

The scale is per row, max |row| / 127, so that the largest value keeps full resolution.
"""

import torch

from vllm.v1.attention.ops import reference

SCALE_BYTES = 2
"""Bytes of a quantised row's fp16 scale."""

_INT8_MAX = 127
_FP16_MAX = 65504.0


def quantise_rows(values: torch.Tensor) -> torch.Tensor:
    """Return int8 rows [N, width + 2] of float values [N, width].

    The values are divided by the scale as fp16 rounds it, so that reading back multiplies by the
    very number that was divided by.
    """
    wide = values.float()
    scales = (wide.abs().amax(-1, keepdim=True) / _INT8_MAX).clamp(max=_FP16_MAX).half()
    # A row so small that its scale is no fp16 number reads back as zeros.
    divisors = torch.where(scales > 0, scales.float(), torch.inf)
    quantised = (wide / divisors).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    return torch.cat([quantised, scales.view(torch.int8)], -1)


def dequantise_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values [..., width] of int8 rows [..., width + 2]."""
    values = rows[..., :-SCALE_BYTES]
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float16)
    return (values.float() * scales.float()).to(dtype)


def write_rows(
    cache: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, values: torch.Tensor
) -> None:
    """As ``reference.write_rows``; an int8 cache quantises.

    Mutates:
        cache [num_blocks, rows_per_block, width].
    """
    if not blocks.shape[0]:
        return
    is_quantised = cache.dtype == torch.int8
    updates = quantise_rows(values) if is_quantised else values.to(cache.dtype)
    indices = torch.stack([blocks, rows], -1)
    torch.ops.npu.npu_scatter_nd_update_(cache, indices, updates)


def read_rows(
    cache: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """As ``reference.read_rows``; an int8 cache is dequantised."""
    if cache.dtype != torch.int8:
        return reference.read_rows(cache, blocks, rows, dtype)
    return dequantise_rows(reference.read_rows(cache, blocks, rows, torch.int8), dtype)
