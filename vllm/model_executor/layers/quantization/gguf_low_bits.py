"""Blocks of GGUF's types of less than four bits, of 256 values but Q1_0's and Q2_0's.

``d`` is fp16; "runs" are 64 bytes in two halves of 32: bits 0 and 1 of a half's bytes are its first
32 values, bits 2 and 3 the next 32. A sign of seven bits has the eighth that makes the number of
minus signs even. Source: the block layouts of the ggml project, in words:

    Q2_K     16 bytes: scale low, minimum high, one per 16; runs; d, dmin    d * s * q - dmin * m
    Q3_K     32 bytes: bit r of byte i is the high bit of value i of run r; runs; 12 bytes of
             scales of six bits; d                                  d * (s - 32) * (q + 4h - 4)
    IQ2_XXS  d; per 32: 4 indexes, then a word of four 7-bit signs and, on top, s of 4 bits
    IQ2_XS   d; 32 words of 16 bits: 9 of an index, 7 of signs; 8 bytes of s, one nibble per 16
    IQ2_S    d; 32 low indexes; 32 bytes of signs; 8 bytes of their pairs of high bits; s as XS
             these three:                                     d * (2s + 1) / 8 * sign * grid
    IQ3_XXS  d; 64 indexes of 4 values each; 8 words as IQ2_XXS's
                                                              d * (2s + 1) / 4 * sign * grid
    IQ3_S    d; 64 low indexes; 8 bytes of ninth bits; 32 bytes of signs; 4 bytes of s, one nibble
             per 32                                               d * (2s + 1) * sign * grid
    IQ1_S    d; 32 low indexes; 8 words of 16 bits, one per 32: four times 3 high bits, s of 3
             bits, and the sign of 1/8                          d * (2s + 1) * (grid +- 1/8)
    IQ1_M    32 low indexes; 16 bytes, a nibble an index: 3 high bits and the sign of 1/8; 4 words
             of 16 bits: four s of 3 bits, one per 16; their top nibbles together are d
    TQ1_0    48 bytes of five trits each and 4 of four; d                           d * (t - 1)
    TQ2_0    runs; d                                                                d * (q - 1)
    Q1_0     d, 128 bits                                                               d or -d
    Q2_0     d, 16 bytes of four codes each, the first lowest                       d * (q - 1)
"""

from collections.abc import Mapping
from functools import partial

import torch

from vllm.model_executor.layers.quantization.decode import view_as
from vllm.model_executor.layers.quantization.gguf_forms import (
    BlockForm,
    ReadCodes,
    ReadNumbers,
    read_halves,
    scale_alone,
)
from vllm.model_executor.layers.quantization.gguf_grids import grid_digits
from vllm.model_executor.layers.quantization.low_bit_words import (
    add_parity,
    find_values,
    pack_indexes_of_four,
    pack_pairs,
    pack_triples,
    spread_bits,
)
from vllm.model_executor.layers.quantization.panels import GroupValues, pack_nibbles
from vllm.v1.attention.ops.stored import CodeKind

# Of the trits of a byte, five or four: what brings each to the top.
_POWERS_OF_THREE = (1, 3, 9, 27, 81)
# Eighths: the values of IQ1's codes are eight times those of its grid, and one more or less.
_EIGHTH = 0.125


def _runs(stored: torch.Tensor) -> torch.Tensor:
    """Returns codes [R, B, 256] of runs [R, B, 64]."""
    halves = stored.reshape(*stored.shape[:2], 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=stored.device)
    return ((halves >> shifts[:, None]) & 3).flatten(2)


def _read_q2_k(blocks: torch.Tensor) -> torch.Tensor:
    return pack_pairs(_runs(blocks[..., 16:80]).flatten(1))


def _q2_k_numbers(blocks: torch.Tensor) -> tuple[GroupValues, GroupValues]:
    stored = blocks[..., :16].flatten(1)
    return (
        GroupValues(stored, read_halves(blocks, 80), 16, part="low"),
        GroupValues(stored, -read_halves(blocks, 82), 16, part="high"),
    )


def _read_q3_k(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[..., None, :32] >> shifts) & 1).flatten(2)
    return pack_triples((_runs(blocks[..., 32:96]) | (high << 2)).flatten(1))


def _q3_k_numbers(blocks: torch.Tensor) -> tuple[GroupValues, None]:
    low, pairs = blocks[..., 96:104], blocks[..., None, 104:108]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((pairs >> shifts) & 3).flatten(2)
    scales = (torch.cat([low & 15, low >> 4], -1) | (high << 4)).to(torch.int8) - 32
    return GroupValues(scales.flatten(1), read_halves(blocks, 108), 16), None


def _read_int32(stored: torch.Tensor) -> torch.Tensor:
    return view_as(stored, torch.int32)


def _read_int16(stored: torch.Tensor) -> torch.Tensor:
    """Returns words of 16 bits as int32."""
    return view_as(stored, torch.int16).int() & 0xFFFF


def _read_iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    return _read_int32(blocks[..., 2:]).flatten(1)


def _iq2_xxs_numbers(blocks: torch.Tensor) -> tuple[GroupValues, None]:
    words = _read_int32(blocks[..., 2:])[..., 1::2].flatten(1)
    return GroupValues(words, read_halves(blocks, 0), 8, part="codes", step=_EIGHTH), None


def _odd(steps: torch.Tensor, factors: torch.Tensor, fan: int, step: float = 1.0) -> GroupValues:
    """Returns the numbers d * (2s + 1) * step."""
    return GroupValues((2 * steps + 1).to(torch.int8).flatten(1), factors, fan, step=step)


def _nibbles_in_turn(stored: torch.Tensor) -> torch.Tensor:
    """Returns nibbles [R, B, 2n] of bytes [R, B, n], the low one of each first."""
    return torch.stack([stored & 15, stored >> 4], -1).flatten(-2).int()


def _scales_in_nibbles(
    blocks: torch.Tensor, *, at: int, count: int, fan: int, step: float
) -> tuple[GroupValues, None]:
    """Returns numbers whose s are nibbles of so many bytes behind others."""
    steps = _nibbles_in_turn(blocks[..., at : at + count])
    return _odd(steps, read_halves(blocks, 0), fan, step), None


def _iq2_codes(name: str, indexes: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Returns words of codes whose lower two bits are digits of a codebook, the third a sign."""
    digits = grid_digits(name).to(indexes.device)[indexes.int()].flatten(-2)
    return pack_triples((digits | (spread_bits(signs) << 2)).flatten(1))


def _read_iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    words = _read_int16(blocks[..., 2:66])
    return _iq2_codes("IQ2_XS", words & 511, add_parity(words >> 9))


def _high_bits(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns runs of so many bits [R, B, 8n / bits], lowest first, at the ninth."""
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=stored.device)
    return (((stored.int()[..., None] >> shifts) & ((1 << bits) - 1)) << 8).flatten(-2)


def _read_iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    indexes = blocks[..., 2:34].int() | _high_bits(blocks[..., 66:74], 2)
    return _iq2_codes("IQ2_S", indexes, blocks[..., 34:66])


def _read_iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    words = _read_int32(blocks[..., 66:98]).flatten(1)
    return pack_indexes_of_four(blocks[..., 2:66].flatten(1), words)


def _iq3_xxs_numbers(blocks: torch.Tensor) -> tuple[GroupValues, None]:
    words = _read_int32(blocks[..., 66:98]).flatten(1)
    return GroupValues(words, read_halves(blocks, 0), 8, part="codes", step=2 * _EIGHTH), None


def _read_iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    indexes = blocks[..., 2:66].int() | _high_bits(blocks[..., 66:74], 1)
    values = find_values("IQ3_S", indexes, blocks[..., 74:106]).flatten(1)
    return pack_nibbles(((values + 15) >> 1).to(torch.uint8))


def _iq1_codes(indexes: torch.Tensor, are_less: torch.Tensor) -> torch.Tensor:
    """Returns words of codes 2 * (grid + 1), and one more where 1/8 is added, not taken off."""
    digits = grid_digits("IQ1_S").to(indexes.device)[indexes].flatten(-2)
    more = (1 - are_less).to(torch.uint8).repeat_interleave(8, 2)
    return pack_triples((2 * digits + more).flatten(1))


def _read_iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    words = _read_int16(blocks[..., 34:50])
    shifts = torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=blocks.device)
    high = (((words[..., None] >> shifts) & 7) << 8).flatten(2)
    are_less = (words >> 15).repeat_interleave(4, 2)
    return _iq1_codes(blocks[..., 2:34].int() | high, are_less)


def _iq1_s_numbers(blocks: torch.Tensor) -> tuple[GroupValues, None]:
    steps = (_read_int16(blocks[..., 34:50]) >> 12) & 7
    return _odd(steps, read_halves(blocks, 0), 8, _EIGHTH), None


def _read_iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    nibbles = _nibbles_in_turn(blocks[..., 32:48])
    return _iq1_codes(blocks[..., :32].int() | ((nibbles & 7) << 8), nibbles >> 3)


def _iq1_m_numbers(blocks: torch.Tensor) -> tuple[GroupValues, None]:
    words = _read_int16(blocks[..., 48:56])
    shifts = torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=blocks.device)
    steps = ((words[..., None] >> shifts) & 7).flatten(2)
    quarters = (words >> 12) << (4 * torch.arange(4, dtype=torch.int32, device=words.device))
    whole = view_as(quarters.sum(-1, keepdim=True).to(torch.int16), torch.float16)[..., 0]
    return _odd(steps, whole, 16, _EIGHTH), None


def _read_tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    parts = []
    for at, count, num_trits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        powers = torch.tensor(_POWERS_OF_THREE[:num_trits], dtype=torch.int32)[:, None]
        moved = (blocks[..., None, at : at + count].int() * powers.to(blocks.device)) & 255
        parts.append(((moved * 3) >> 8).flatten(2))
    return pack_pairs(torch.cat(parts, 2).flatten(1).to(torch.uint8))


def _read_tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    return pack_pairs(_runs(blocks[..., :64]).flatten(1))


def _read_q2_0(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    return pack_pairs(((blocks[..., 2:, None] >> shifts) & 3).flatten(1))


def _read_q1_0(blocks: torch.Tensor) -> torch.Tensor:
    return pack_pairs(2 * spread_bits(blocks[..., 2:]).flatten(1))


_IQ2_XS_NUMBERS = partial(_scales_in_nibbles, at=66, count=8, fan=16, step=_EIGHTH)
_IQ2_S_NUMBERS = partial(_scales_in_nibbles, at=74, count=8, fan=16, step=_EIGHTH)
_IQ3_S_NUMBERS = partial(_scales_in_nibbles, at=106, count=4, fan=8, step=1.0)


def _turned(
    num_bytes: int,
    kind: CodeKind,
    group: int,
    read_codes: ReadCodes,
    read_numbers: ReadNumbers,
    num_codes: int = 256,
) -> BlockForm:
    """Returns a form whose blocks torch turns into words."""
    return BlockForm(num_bytes, num_codes, kind, group, read_codes, read_numbers, is_moved=False)


LOW_BIT_FORMS: Mapping[str, BlockForm] = {
    "Q2_K": BlockForm(84, 256, "uint2", 16, _read_q2_k, _q2_k_numbers),
    "Q3_K": BlockForm(110, 256, "int3", 16, _read_q3_k, _q3_k_numbers),
    "IQ2_XXS": BlockForm(66, 256, "iq2_xxs", 32, _read_iq2_xxs, _iq2_xxs_numbers),
    "IQ2_XS": _turned(74, "iq2", 16, _read_iq2_xs, _IQ2_XS_NUMBERS),
    "IQ2_S": _turned(82, "iq2", 16, _read_iq2_s, _IQ2_S_NUMBERS),
    "IQ3_XXS": BlockForm(98, 256, "iq3_xxs", 32, _read_iq3_xxs, _iq3_xxs_numbers),
    "IQ3_S": _turned(110, "odd4", 32, _read_iq3_s, _IQ3_S_NUMBERS),
    "IQ1_S": _turned(50, "iq1", 32, _read_iq1_s, _iq1_s_numbers),
    "IQ1_M": _turned(56, "iq1", 16, _read_iq1_m, _iq1_m_numbers),
    "TQ1_0": _turned(54, "int2", 256, _read_tq1_0, scale_alone(52)),
    "TQ2_0": BlockForm(66, 256, "int2", 256, _read_tq2_0, scale_alone(64)),
    "Q1_0": _turned(18, "int2", 128, _read_q1_0, scale_alone(0), 128),
    "Q2_0": _turned(18, "int2", 64, _read_q2_0, scale_alone(0), 64),
}
"""By GGUF's names of the types."""
