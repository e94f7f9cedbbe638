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

from vllm.model_executor.layers.quantization.gguf_forms import (
    BlockForm,
    ReadCodes,
    ReadNumbers,
    read_halves,
    scale_alone,
    spread_bits,
)
from vllm.model_executor.layers.quantization.gguf_grids import grid_values
from vllm.model_executor.layers.quantization.panels import GroupValues, pack_nibbles, view_as
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


def _words_of_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Returns words of codes [R, B, n], of which the lowest four bits count."""
    return pack_nibbles(codes.flatten(1).to(torch.uint8) & 15)


def _read_q2_k(blocks: torch.Tensor) -> torch.Tensor:
    return _words_of_nibbles(_runs(blocks[..., 16:80]))


def _q2_k_numbers(blocks: torch.Tensor) -> tuple[GroupValues, GroupValues]:
    stored = blocks[..., :16].flatten(1)
    return (
        GroupValues((stored & 15).to(torch.int8), read_halves(blocks, 80), 16),
        GroupValues((stored >> 4).to(torch.int8), -read_halves(blocks, 82), 16),
    )


def _read_q3_k(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[..., None, :32] >> shifts) & 1).flatten(2)
    return _words_of_nibbles(_runs(blocks[..., 32:96]) + 4 * high - 4)


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


def _find_values(
    name: str, indexes: torch.Tensor, signs: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns int8 [R, B, values] of indexes [R, B, n], negative where signs have a bit set."""
    values = grid_values(name).to(indexes.device)[indexes.int()].flatten(2)
    return values if signs is None else torch.where(spread_bits(signs) != 0, -values, values)


def _whole_signs(seven: torch.Tensor) -> torch.Tensor:
    """Returns bytes of signs, of which the eighth makes their number even."""
    parity = seven ^ (seven >> 4)
    parity = parity ^ (parity >> 2)
    return (seven | (((parity ^ (parity >> 1)) & 1) << 7)).to(torch.uint8)


def _signs_of_words(words: torch.Tensor) -> torch.Tensor:
    """Returns bytes of signs [R, B, 4n] of words [R, B, n] that have four of seven bits."""
    shifts = torch.tensor([0, 7, 14, 21], dtype=torch.int32, device=words.device)
    return _whole_signs((words[..., None] >> shifts) & 127).flatten(2)


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    return view_as(values.flatten(1), torch.uint8)


def _pairs_of_words(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns IQ2_XXS's indexes [R, B, 32], and the words of signs and scales [R, B, 8]."""
    stored = blocks[..., 2:].reshape(*blocks.shape[:2], 8, 8)
    return stored[..., :4].flatten(2), _read_int32(stored[..., 4:])[..., 0]


def _read_iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    indexes, words = _pairs_of_words(blocks)
    return _bytes_of(_find_values("IQ2_XXS", indexes, _signs_of_words(words)))


def _odd_scales(blocks: torch.Tensor, at: int, steps: torch.Tensor, part: float) -> GroupValues:
    """Returns d * (2s + 1) * part, fp32: exact, as none has more than 16 bits."""
    own = (2 * steps + 1).float() * read_halves(blocks, at).float()[..., None] * part
    return GroupValues(own.flatten(1))


def _top_nibbles(words: torch.Tensor) -> torch.Tensor:
    return (words >> 28) & 15


def _iq2_xxs_numbers(blocks: torch.Tensor) -> tuple[GroupValues, None]:
    _, words = _pairs_of_words(blocks)
    return _odd_scales(blocks, 0, _top_nibbles(words), _EIGHTH), None


def _nibbles_in_turn(stored: torch.Tensor) -> torch.Tensor:
    """Returns nibbles [R, B, 2n] of bytes [R, B, n], the low one of each first."""
    return torch.stack([stored & 15, stored >> 4], -1).flatten(-2).int()


def _read_iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    words = _read_int16(blocks[..., 2:66])
    return _bytes_of(_find_values("IQ2_XS", words & 511, _whole_signs(words >> 9)))


def _nibble_scales(
    blocks: torch.Tensor, at: int, count: int, part: float
) -> tuple[GroupValues, None]:
    """Returns scales whose s are nibbles of so many bytes behind others."""
    steps = _nibbles_in_turn(blocks[..., at : at + count])
    return _odd_scales(blocks, 0, steps, part), None


def _high_bits(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns runs of so many bits [R, B, 8n / bits], lowest first, at the ninth."""
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=stored.device)
    return (((stored.int()[..., None] >> shifts) & ((1 << bits) - 1)) << 8).flatten(-2)


def _read_iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    indexes = blocks[..., 2:34].int() | _high_bits(blocks[..., 66:74], 2)
    return _bytes_of(_find_values("IQ2_S", indexes, blocks[..., 34:66]))


def _read_iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    signs = _signs_of_words(_read_int32(blocks[..., 66:98]))
    return _bytes_of(_find_values("IQ3_XXS", blocks[..., 2:66], signs))


def _iq3_xxs_numbers(blocks: torch.Tensor) -> tuple[GroupValues, None]:
    return _odd_scales(blocks, 0, _top_nibbles(_read_int32(blocks[..., 66:98])), 2 * _EIGHTH), None


def _read_iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    indexes = blocks[..., 2:66].int() | _high_bits(blocks[..., 66:74], 1)
    return _bytes_of(_find_values("IQ3_S", indexes, blocks[..., 74:106]))


def _iq3_s_numbers(blocks: torch.Tensor) -> tuple[GroupValues, None]:
    steps = _nibbles_in_turn(blocks[..., 106:110])
    return GroupValues((2 * steps + 1).to(torch.int8).flatten(1), read_halves(blocks, 0), 8), None


def _shifted(indexes: torch.Tensor, are_less: torch.Tensor) -> torch.Tensor:
    """Returns eight times IQ1's values, and one more or less: int8 bytes [R, values]."""
    values = _find_values("IQ1_S", indexes)
    step = (1 - 2 * are_less.to(torch.int8)).repeat_interleave(8, 2)
    return _bytes_of(8 * values + step)


def _read_iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    words = _read_int16(blocks[..., 34:50])
    shifts = torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=blocks.device)
    high = (((words[..., None] >> shifts) & 7) << 8).flatten(2)
    are_less = (words >> 15).repeat_interleave(4, 2)
    return _shifted(blocks[..., 2:34].int() | high, are_less)


def _iq1_s_numbers(blocks: torch.Tensor) -> tuple[GroupValues, None]:
    steps = (_read_int16(blocks[..., 34:50]) >> 12) & 7
    return _odd_scales(blocks, 0, steps, _EIGHTH), None


def _read_iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    nibbles = _nibbles_in_turn(blocks[..., 32:48])
    return _shifted(blocks[..., :32].int() | ((nibbles & 7) << 8), nibbles >> 3)


def _iq1_m_numbers(blocks: torch.Tensor) -> tuple[GroupValues, None]:
    words = _read_int16(blocks[..., 48:56])
    shifts = torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=blocks.device)
    steps = ((words[..., None] >> shifts) & 7).flatten(2)
    quarters = (words >> 12) << (4 * torch.arange(4, dtype=torch.int32, device=words.device))
    whole = view_as(quarters.sum(-1, keepdim=True).to(torch.int16), torch.float16)
    own = (2 * steps + 1).float() * whole.float() * _EIGHTH
    return GroupValues(own.flatten(1)), None


def _read_tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    parts = []
    for at, count, num_trits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        powers = torch.tensor(_POWERS_OF_THREE[:num_trits], dtype=torch.int32)[:, None]
        moved = (blocks[..., None, at : at + count].int() * powers.to(blocks.device)) & 255
        parts.append(((moved * 3) >> 8).flatten(2))
    return _words_of_nibbles(torch.cat(parts, 2) - 1)


def _read_tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    return _words_of_nibbles(_runs(blocks[..., :64]) - 1)


def _read_q2_0(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    return _words_of_nibbles(((blocks[..., 2:, None] >> shifts) & 3).flatten(2) - 1)


def _read_q1_0(blocks: torch.Tensor) -> torch.Tensor:
    return _words_of_nibbles(2 * spread_bits(blocks[..., 2:]) - 1)


def _form(
    num_bytes: int,
    kind: CodeKind,
    group: int,
    read_codes: ReadCodes,
    read_numbers: ReadNumbers,
    num_codes: int = 256,
) -> BlockForm:
    return BlockForm(num_bytes, num_codes, kind, group, read_codes, read_numbers, is_moved=False)


_XS_SCALES = partial(_nibble_scales, at=66, count=8, part=_EIGHTH)
_S_SCALES = partial(_nibble_scales, at=74, count=8, part=_EIGHTH)
LOW_BIT_FORMS: Mapping[str, BlockForm] = {
    "Q2_K": _form(84, "uint4", 16, _read_q2_k, _q2_k_numbers),
    "Q3_K": _form(110, "int4", 16, _read_q3_k, _q3_k_numbers),
    "IQ2_XXS": _form(66, "int8", 32, _read_iq2_xxs, _iq2_xxs_numbers),
    "IQ2_XS": _form(74, "int8", 16, _read_iq2_xs, _XS_SCALES),
    "IQ2_S": _form(82, "int8", 16, _read_iq2_s, _S_SCALES),
    "IQ3_XXS": _form(98, "int8", 32, _read_iq3_xxs, _iq3_xxs_numbers),
    "IQ3_S": _form(110, "int8", 32, _read_iq3_s, _iq3_s_numbers),
    "IQ1_S": _form(50, "int8", 32, _read_iq1_s, _iq1_s_numbers),
    "IQ1_M": _form(56, "int8", 16, _read_iq1_m, _iq1_m_numbers),
    "TQ1_0": _form(54, "int4", 256, _read_tq1_0, scale_alone(52)),
    "TQ2_0": _form(66, "int4", 256, _read_tq2_0, scale_alone(64)),
    "Q1_0": _form(18, "int4", 128, _read_q1_0, scale_alone(0), 128),
    "Q2_0": _form(18, "int4", 64, _read_q2_0, scale_alone(0), 64),
}
"""By GGUF's names of the types."""
