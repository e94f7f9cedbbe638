"""How rows of quantised pages are written down: bytes that hold values and their scales.

    A2/A3 index key, 130 bytes  | 128 int8 | fp16 scale |
    A5 index key, 132 bytes     | 128 e4m3 | fp32 scale |
    A5 key, 640 = 512 + 128     | 448 e4m3 | 7 e8m0 scales | 57 zeros || 64 rotary values in bf16 |

DeepSeek-V4 keeps the rotary values of a key in bf16 and gives each 64 of the others a scale that is
a power of two. Upstream's packed row of a GPU is the same numbers in 584 bytes (448 + 128 + 7 + 1);
an A5's row is 512 + 128 bytes, so that the quantised part with its scales fills what 512 fp8 values
would, and both parts begin on a multiple of 128.

Formats are pure: bytes as int8 tensors in and out, fp32 arithmetic in between.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm.exceptions import ConfigError
from vllm.utils.math_utils import cdiv

E4M3 = torch.float8_e4m3fn

_INT8_MAX = 127
_FP16_MAX = 65504.0
_E4M3_MAX = 448.0
_SCALE_GROUP = 64
# fp32: exponent bits, and the mantissa of 448 = 1.75 * 2^8.
_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_MANTISSA_OF_MAX = 0x600000
_EXPONENT_OF_MAX = 8


class RowFormat(Protocol):
    """One way to write rows down."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return int8 bytes [N, row bytes] of float values [N, width]."""

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return values [..., width] of int8 bytes [..., row bytes]."""


class Int8Rows:
    """int8 values, then one fp16 scale: max |row| / 127."""

    scale_bytes = 2

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """See ``RowFormat``.

        The values are divided by the scale as fp16 rounds it, so that reading back multiplies by
        the very number that was divided by.
        """
        wide = values.float()
        scales = (wide.abs().amax(-1, keepdim=True) / _INT8_MAX).clamp(max=_FP16_MAX).half()
        # A row so small that its scale is no fp16 number reads back as zeros.
        divisors = torch.where(scales > 0, scales.float(), torch.inf)
        quantised = (wide / divisors).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8)
        return torch.cat([quantised, scales.view(torch.int8)], -1)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See ``RowFormat``."""
        values = rows[..., : -self.scale_bytes]
        scales = rows[..., -self.scale_bytes :].contiguous().view(torch.float16)
        return (values.float() * scales.float()).to(dtype)


class Fp8IndexRows:
    """e4m3 values, then one fp32 scale: max |row| / 448."""

    scale_bytes = 4

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """See ``RowFormat``. A row of zeros has scale zero."""
        wide = values.float()
        scales = wide.abs().amax(-1, keepdim=True) / _E4M3_MAX
        divisors = torch.where(scales > 0, scales, torch.inf)
        # Rounding the quotient can end just above the largest value, which the cast makes NaN.
        quantised = (wide / divisors).clamp(-_E4M3_MAX, _E4M3_MAX).to(E4M3)
        return torch.cat([quantised.view(torch.int8), scales.view(torch.int8)], -1)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See ``RowFormat``."""
        values = rows[..., : -self.scale_bytes].view(E4M3)
        scales = rows[..., -self.scale_bytes :].contiguous().view(torch.float32)
        return (values.float() * scales).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8KeyRows:
    """e4m3 values in groups of 64 with a power of two each, then the rotary values in bf16.

    Attributes:
        head_dim: Values of a row.
        rope_dim: How many of them, at the end, are rotary.

    Raises:
        ConfigError: The scales do not fit in the bytes the rotary values leave free.
    """

    head_dim: int
    rope_dim: int

    def __post_init__(self) -> None:
        if self._num_groups > self.rope_dim:
            raise ConfigError(
                f"A5 pages need a byte of scale for each {_SCALE_GROUP} of a key's "
                f"{self._num_plain} plain values, but a head of {self.head_dim} values with "
                f"{self.rope_dim} rotary ones leaves {self.rope_dim} bytes: this model needs "
                "--kv-cache-dtype float32 (reference mode), or an A2 or A3."
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: one per value, and two more per rotary value."""
        return self.head_dim + 2 * self.rope_dim

    @property
    def _num_plain(self) -> int:
        return self.head_dim - self.rope_dim

    @property
    def _num_groups(self) -> int:
        return cdiv(self._num_plain, _SCALE_GROUP)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """See ``RowFormat``."""
        plain, rotary = torch.split(values, [self._num_plain, self.rope_dim], -1)
        padding = self._num_groups * _SCALE_GROUP - self._num_plain
        grouped = torch.nn.functional.pad(plain.float(), (0, padding))
        grouped = grouped.view(-1, self._num_groups, _SCALE_GROUP)
        exponents = _exponents(grouped.abs().amax(-1))
        quantised = (grouped / _powers(exponents).unsqueeze(-1)).to(E4M3)
        row = values.new_zeros((values.shape[0], self.row_bytes), dtype=torch.int8)
        row[:, : self._num_plain] = quantised.view(torch.int8).flatten(1)[:, : self._num_plain]
        row[:, self._num_plain : self._num_plain + self._num_groups] = exponents.to(
            torch.uint8
        ).view(torch.int8)
        row[:, self.head_dim :] = rotary.to(torch.bfloat16).contiguous().view(torch.int8)
        return row

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See ``RowFormat``."""
        plain = rows[..., : self._num_plain].view(E4M3).float()
        exponents = rows[..., self._num_plain : self._num_plain + self._num_groups]
        scales = _powers(exponents.to(torch.int32) & 0xFF).repeat_interleave(_SCALE_GROUP, -1)
        rotary = rows[..., self.head_dim :].contiguous().view(torch.bfloat16).float()
        scaled = plain * scales[..., : self._num_plain]
        return torch.cat([scaled, rotary], -1).to(dtype)


def _exponents(largest: torch.Tensor) -> torch.Tensor:
    """Return the biased exponents of the smallest powers of two p with largest <= 448 p: int32.

    Read off the bits of fp32, so that no logarithm's rounding decides: with the largest value
    m * 2^e, 1 <= m < 2, p is 2^(e - 8), or twice that where m exceeds 448's own 1.75.
    """
    bits = largest.contiguous().view(torch.int32)
    exponents = (bits >> _MANTISSA_BITS) - _EXPONENT_OF_MAX
    exponents += (bits & _MANTISSA_MASK) > _MANTISSA_OF_MAX
    return exponents.clamp(min=1)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Return the fp32 powers of two of biased exponents."""
    return (exponents << _MANTISSA_BITS).view(torch.float32)
