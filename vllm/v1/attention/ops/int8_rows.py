"""Cached rows in bytes: codes of every head, and a scale of each behind them.

    | codes of key heads | codes of value heads | fp32 scales of key heads | of value heads |
      K * d bytes          K * d bytes            4 * K bytes                4 * K bytes

A head is spread before it is rounded: in the place of its values stand all their sums and
differences, as the rows of a Hadamard matrix give them. So no value is far larger than the others,
and what rounding adds falls on all alike. Spread values are multiples of a scale, at most 127 of
it. They depend on the head's own values in the row alone, so that a row has the same bytes whatever
is stored beside it.
"""

from dataclasses import dataclass

import torch

from vllm.v1.kv_cache_specs.base import SCALE_BYTES

_LARGEST = 127.0
# Heads whose largest value is below are zeros: its 127th part would not be normal.
_LEAST = 1e-30
_MOST_SPREAD = 512


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Rows of some heads.

    Attributes:
        num_heads: Of keys and values together.
        head_dim: Values of each.
    """

    num_heads: int
    head_dim: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.num_heads * (self.head_dim + SCALE_BYTES)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return int8 [N, row bytes] of values [N, heads * d].

        Ties go to even codes. A head with a value that is no number reads back as such values.
        """
        wide = self._spread(values.float().view(len(values), self.num_heads, self.head_dim))
        peaks = wide.abs().amax(-1, keepdim=True)
        is_finite, is_some = peaks.isfinite(), peaks >= _LEAST
        steps = torch.where(is_finite & is_some, _LARGEST / peaks, torch.zeros_like(peaks))
        codes = torch.where(is_finite, wide * steps, torch.zeros_like(wide)).round().to(torch.int8)
        scales = torch.where(is_some, peaks / _LARGEST, torch.zeros_like(peaks))
        scales = torch.where(is_finite, scales, torch.full_like(scales, torch.nan))
        return torch.cat([codes.flatten(1), scales.flatten(1).contiguous().view(torch.int8)], 1)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return values [..., heads * d] of int8 [..., row bytes]."""
        width = self.num_heads * self.head_dim
        codes = rows[..., :width].reshape(*rows.shape[:-1], self.num_heads, self.head_dim)
        # A copy: a view of other types must begin at a multiple of them.
        scales = rows[..., width:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        values = self._spread(codes.float() * scales.unsqueeze(-1)) / self._spread_width
        return values.flatten(-2).to(dtype)

    @property
    def _spread_width(self) -> int:
        """So many values are spread over each other: a power of two that divides a head."""
        return min(self.head_dim & -self.head_dim, _MOST_SPREAD)

    def _spread(self, heads: torch.Tensor) -> torch.Tensor:
        """Return [..., d] whose runs are sums and differences of those of the heads [..., d].

        Twice, that is the heads times the length of a run. The kernels add in this order.
        """
        width = self._spread_width
        half = width // 2
        runs = heads.reshape(*heads.shape[:-1], -1, width)
        for _ in range(half.bit_length()):
            first, second = runs[..., :half], runs[..., half:]
            runs = torch.stack([first + second, first - second], -1).flatten(-2)
        return runs.reshape(heads.shape)
