"""Blocks of GGUF's types as rows of codes under scales.

Nibbles of a run of 32 are "half-split": the low ones of its 16 bytes are the first half. ``d`` and
``m`` are fp16. Source: the block layouts of the ggml project, in words:

    Q8_0    d, 32 bytes                                       d * q
    Q4_0/1  d, [m], 16 bytes                                  d * (q - 8), d * q + m
    Q5_0/1  d, [m], 32 fifth bits, 16 bytes                   d * (q - 16), d * q + m
    Q4_K    d, dmin, 12 bytes of 8 scales and 8 minima of six bits, 128 bytes; per 32:
                                                              d * sc * q - dmin * m
    Q5_K    the same, with 32 bytes of fifth bits before the nibbles: bit j is run j's
    Q6_K    128 bytes of low nibbles, 64 of pairs of high bits, 16 scales, d; per 16:
                                                              d * sc * (q - 32)
    IQ4_NL  d, 16 bytes                                       d * table[q]
    IQ4_XS  d, 16 high bits and 4 bytes of low ones of 8 scales, 128 bytes; per 32:
                                                              d * (sc - 32) * table[q]
    MXFP4   e8m0, 16 bytes                                    2^(e - 127) * e2m1
    NVFP4   4 e4m3 without signs, 32 bytes; per 16, half-split in eights:
                                                              e4m3 * e2m1, times a number of the
                                                              whole matrix
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

import torch

from vllm.model_executor.layers.quantization.decode import view_as
from vllm.model_executor.layers.quantization.gguf_forms import (
    BlockForm,
    ReadCodes,
    read_halves,
    scale_alone,
    split_nibbles,
)
from vllm.model_executor.layers.quantization.gguf_low_bits import LOW_BIT_FORMS
from vllm.model_executor.layers.quantization.low_bit_words import spread_bits
from vllm.model_executor.layers.quantization.nibble_words import pack_halves
from vllm.model_executor.layers.quantization.panels import (
    SIGN_BITS_INT4,
    SIX_BIT_LIFT,
    CodedRows,
    GroupValues,
    PackedRows,
    pack_bytes,
    pack_six_bits,
    scale_e4m3,
)
from vllm.v1.attention.ops.stored import PANEL

BlockPacker = Callable[[str, torch.Tensor], torch.Tensor]
"""GGUF's name of a type, blocks uint8 [rows, bytes of a row] -> int32 [panels, words, 64]."""

# Of e4m3: its largest bits, and the number that they would be.
_E4M3_NAN = 0x7F
_PAST_E4M3 = 480.0


def read_blocks(type_name: str, rows: torch.Tensor, pack: BlockPacker | None = None) -> CodedRows:
    """Turn a matrix's blocks, uint8 [rows, bytes of a row], into codes and scales.

    Args:
        type_name: GGUF's name of the type, one of ``BLOCK_FORMS``.
        rows: The blocks.
        pack: What packs codes of blocks as they are; None: they are turned into words first.
    """
    form = BLOCK_FORMS[type_name]
    blocks = rows.reshape(len(rows), -1, form.num_bytes)
    kind, num_columns = form.kind, form.count_columns(rows.shape[1])
    numbers = form.read_numbers(blocks)
    if pack is not None and form.is_moved:
        own = partial(pack, type_name)
        return CodedRows(kind, rows, num_columns, form.group, *numbers, pack=own)
    words = form.read_codes(blocks)
    if kind == "int6":
        words = pack_six_bits(words)
    elif kind == "int8":
        words = pack_bytes(words)
    coded = CodedRows(kind, words, num_columns, form.group, *numbers)
    return coded if rows.device.type == "cpu" else coded.for_accelerators()


@cache
def kept_block_bytes(type_name: str) -> float:
    """Return what a processor's memory holds of a block of a type, as its panels are made."""
    form = BLOCK_FORMS[type_name]
    # Enough that what a panel has once is next to nothing.
    num_blocks = 64
    zeros = torch.zeros((PANEL, num_blocks * form.num_bytes), dtype=torch.uint8)
    packed = PackedRows(read_blocks(type_name, zeros), type_name)
    return packed.nbytes / (PANEL * num_blocks)


def kept_bytes(type_name: str, num_bytes: int) -> int:
    """Return what a processor's memory holds of so many bytes of a file, of any type."""
    form = BLOCK_FORMS.get(type_name)
    if form is None:
        return 2 * num_bytes if type_name == "F16" else num_bytes
    return round(num_bytes / form.num_bytes * kept_block_bytes(type_name))


def _nibbles(at: int, run_bytes: int, signs: int = 0) -> ReadCodes:
    """Returns what reads words of half-split runs behind so many bytes."""

    def read(blocks: torch.Tensor) -> torch.Tensor:
        words = pack_halves(blocks[..., at:].reshape(len(blocks), -1, run_bytes))
        return words.bitwise_xor_(signs) if signs else words

    return read


def _scale_and_offset(blocks: torch.Tensor) -> tuple[GroupValues, GroupValues]:
    return GroupValues(read_halves(blocks, 0)), GroupValues(read_halves(blocks, 2))


def _five_bits(at: int, lift: int) -> ReadCodes:
    """Returns what reads codes whose fifth bits lie behind so many bytes."""

    def read(blocks: torch.Tensor) -> torch.Tensor:
        codes = split_nibbles(blocks[..., at + 4 :]) | (spread_bits(blocks[..., at : at + 4]) << 4)
        return (codes + lift).flatten(1)

    return read


def _six_bits(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and minima [R, B, 8] of 12 bytes."""
    first, second, third = stored[..., :4], stored[..., 4:8], stored[..., 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], -1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], -1)
    return scales, minima


def _k_numbers(blocks: torch.Tensor) -> tuple[GroupValues, GroupValues]:
    """Returns scales and offsets of Q4_K and Q5_K."""
    scales, minima = _six_bits(blocks[..., 4:16])
    factors, lowest = read_halves(blocks, 0), -read_halves(blocks, 2)
    return (
        GroupValues(scales.flatten(1).to(torch.int8), factors, 8),
        GroupValues(minima.flatten(1).to(torch.int8), lowest, 8),
    )


def _runs(nibbles: torch.Tensor) -> torch.Tensor:
    """Returns codes [R, B, 8, 32]: each 32 of 128 bytes hold two runs, the low nibbles first."""
    stored = nibbles.reshape(*nibbles.shape[:2], 4, 32)
    return torch.stack([stored & 15, stored >> 4], -2).flatten(2, 3)


def _read_q5_k(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[..., None, 16:48] >> shifts) & 1) << 4
    return (_runs(blocks[..., 48:]) | high).flatten(1) + SIX_BIT_LIFT


def _read_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    halves = []
    for half in range(2):
        low = blocks[..., 64 * half : 64 * half + 64]
        high = blocks[..., 128 + 32 * half : 160 + 32 * half]
        nibbles = torch.stack([low[..., :32] & 15, low[..., 32:] & 15, low[..., :32] >> 4,
                               low[..., 32:] >> 4], -2)  # fmt: skip
        pairs = torch.stack([(high >> 2 * run) & 3 for run in range(4)], -2)
        halves.append((nibbles | (pairs << 4)).flatten(-2))
    return torch.cat(halves, -1).flatten(1)


def _q6_k_numbers(blocks: torch.Tensor) -> tuple[GroupValues, None]:
    scales = view_as(blocks[..., 192:208].contiguous(), torch.int8).flatten(1)
    return GroupValues(scales, read_halves(blocks, 208), 16), None


def _iq4_xs_numbers(blocks: torch.Tensor) -> tuple[GroupValues, None]:
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = ((blocks[..., 2:4, None] >> shifts) & 3).flatten(-2)
    scales = (low | (high << 4)).to(torch.int8) - 32
    return GroupValues(scales.flatten(1), read_halves(blocks, 0), 8), None


def _mxfp4_numbers(blocks: torch.Tensor) -> tuple[GroupValues, None]:
    return GroupValues(blocks[..., 0].contiguous()), None


def _nvfp4_numbers(blocks: torch.Tensor) -> tuple[GroupValues, None]:
    stored = blocks[..., :4].flatten(1)
    scales = stored & _E4M3_NAN
    is_largest = scales == _E4M3_NAN
    # The largest code stands for nothing, with a sign bit for one step more than e4m3 has.
    scales = scales.masked_fill(is_largest, 0).view(torch.float8_e4m3fn)
    past = is_largest & (stored != _E4M3_NAN)
    if past.any():
        return GroupValues(scales.half().masked_fill(past, _PAST_E4M3)), None
    return scale_e4m3(scales, torch.ones(1, device=blocks.device), divides=False), None


def scale_whole(rows: CodedRows, scale: torch.Tensor) -> CodedRows:
    """Return NVFP4 rows whose scales are multiplied by one of the whole matrix, fp32, one value."""
    own = rows.scales
    if own.steps is not None:
        return replace(rows, scales=scale_e4m3(own.values, scale, divides=False))
    return replace(rows, scales=GroupValues(own.widen() * scale.reshape(1, 1)))


BLOCK_FORMS: Mapping[str, BlockForm] = {
    "Q8_0": BlockForm(
        34, 32, "int8", 32, lambda blocks: blocks[..., 2:].flatten(1), scale_alone(0)
    ),
    "Q4_0": BlockForm(18, 32, "int4", 32, _nibbles(2, 16, SIGN_BITS_INT4), scale_alone(0)),
    "Q4_1": BlockForm(20, 32, "uint4", 32, _nibbles(4, 16), _scale_and_offset),
    "Q5_0": BlockForm(22, 32, "int6", 32, _five_bits(2, SIX_BIT_LIFT - 16), scale_alone(0)),
    "Q5_1": BlockForm(24, 32, "int6", 32, _five_bits(4, SIX_BIT_LIFT), _scale_and_offset),
    "Q4_K": BlockForm(144, 256, "uint4", 32, _nibbles(16, 32), _k_numbers),
    "Q5_K": BlockForm(176, 256, "int6", 32, _read_q5_k, _k_numbers),
    "Q6_K": BlockForm(210, 256, "int6", 16, _read_q6_k, _q6_k_numbers),
    "IQ4_NL": BlockForm(18, 32, "iq4", 32, _nibbles(2, 16), scale_alone(0)),
    "IQ4_XS": BlockForm(136, 256, "iq4", 32, _nibbles(8, 16), _iq4_xs_numbers),
    "MXFP4": BlockForm(17, 32, "e2m1", 32, _nibbles(1, 16), _mxfp4_numbers),
    "NVFP4": BlockForm(36, 64, "e2m1", 16, _nibbles(4, 8), _nvfp4_numbers),
    **LOW_BIT_FORMS,
}
"""By GGUF's names of the types."""
