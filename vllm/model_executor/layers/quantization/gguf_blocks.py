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

from collections.abc import Callable
from dataclasses import replace

import torch

from vllm.model_executor.layers.quantization.nibble_words import pack_halves
from vllm.model_executor.layers.quantization.panels import (
    SIGN_BITS_INT4,
    SIX_BIT_LIFT,
    CodedRows,
    GroupValues,
    pack_bytes,
    pack_six_bits,
    scale_e4m3,
    view_as,
)
from vllm.v1.attention.ops.stored import CodeKind

_K = 256
# Of e4m3: its largest bits, and the number that they would be.
_E4M3_NAN = 0x7F
_PAST_E4M3 = 480.0


def read_blocks(type_name: str, rows: torch.Tensor) -> CodedRows:
    """Turn a matrix's blocks, uint8 [rows, bytes of a row], into codes and scales.

    Args:
        type_name: GGUF's name of the type, one of ``BLOCK_READERS``.
        rows: The blocks.
    """
    block_bytes, read = BLOCK_READERS[type_name]
    return read(rows.reshape(len(rows), -1, block_bytes))


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Returns the fp16 numbers [R, B] at a place of each block."""
    return view_as(blocks[..., at : at + 2].contiguous(), torch.float16)[..., 0]


def _split(nibbles: torch.Tensor) -> torch.Tensor:
    """Returns codes [R, B, 32] of half-split bytes [R, B, 16]."""
    return torch.cat([nibbles & 15, nibbles >> 4], -1)


def _in_rows(
    codes: torch.Tensor, scales: GroupValues, offsets: GroupValues | None, kind: str, group: int
) -> CodedRows:
    flat = codes.flatten(1)
    width = flat.shape[1]
    if kind == "int8":
        return CodedRows("int8", pack_bytes(flat), width, group, scales, offsets)
    if kind == "int6" and flat.device.type != "cpu":
        own = pack_bytes(flat.to(torch.int8) - SIX_BIT_LIFT)
        return CodedRows("int8", own, width, group, scales, offsets)
    return CodedRows("int6", pack_six_bits(flat), width, group, scales, offsets)


def _nibbles_in_rows(
    runs: torch.Tensor,
    scales: GroupValues,
    offsets: GroupValues | None,
    kind: CodeKind,
    group: int = 32,
) -> CodedRows:
    """Returns rows of four bits of half-split runs, uint8 [R, runs, bytes]."""
    words = pack_halves(runs)
    if kind == "int4":
        words.bitwise_xor_(SIGN_BITS_INT4)
    return CodedRows(kind, words, words.shape[1] * 8, group, scales, offsets)


def _read_q8_0(blocks: torch.Tensor) -> CodedRows:
    return _in_rows(blocks[..., 2:], GroupValues(_halves(blocks, 0)), None, "int8", 32)


def _read_q4_0(blocks: torch.Tensor) -> CodedRows:
    return _nibbles_in_rows(blocks[..., 2:], GroupValues(_halves(blocks, 0)), None, "int4")


def _read_q4_1(blocks: torch.Tensor) -> CodedRows:
    scales, offsets = GroupValues(_halves(blocks, 0)), GroupValues(_halves(blocks, 2))
    return _nibbles_in_rows(blocks[..., 4:], scales, offsets, "uint4")


def _fifth_bits(stored: torch.Tensor) -> torch.Tensor:
    """Returns 16 times the bits [R, B, 32] of four bytes, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=stored.device)
    return (((stored[..., None] >> shifts) & 1) << 4).flatten(-2)


def _read_q5_0(blocks: torch.Tensor) -> CodedRows:
    codes = _split(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    scales = GroupValues(_halves(blocks, 0))
    return _in_rows(codes + (SIX_BIT_LIFT - 16), scales, None, "int6", 32)


def _read_q5_1(blocks: torch.Tensor) -> CodedRows:
    codes = _split(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    scales, offsets = GroupValues(_halves(blocks, 0)), GroupValues(_halves(blocks, 2))
    return _in_rows(codes + SIX_BIT_LIFT, scales, offsets, "int6", 32)


def _six_bits(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and minima [R, B, 8] of 12 bytes."""
    first, second, third = stored[..., :4], stored[..., 4:8], stored[..., 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], -1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], -1)
    return scales, minima


def _k_numbers(blocks: torch.Tensor) -> tuple[GroupValues, GroupValues]:
    """Returns scales and offsets of Q4_K and Q5_K."""
    scales, minima = _six_bits(blocks[..., 4:16])
    factors, lowest = _halves(blocks, 0), -_halves(blocks, 2)
    return (
        GroupValues(scales.flatten(1).to(torch.int8), factors, 8),
        GroupValues(minima.flatten(1).to(torch.int8), lowest, 8),
    )


def _runs(nibbles: torch.Tensor) -> torch.Tensor:
    """Returns codes [R, B, 8, 32]: each 32 of 128 bytes hold two runs, the low nibbles first."""
    stored = nibbles.reshape(*nibbles.shape[:2], 4, 32)
    return torch.stack([stored & 15, stored >> 4], -2).flatten(2, 3)


def _read_q4_k(blocks: torch.Tensor) -> CodedRows:
    runs = blocks[..., 16:].reshape(len(blocks), -1, 32)
    return _nibbles_in_rows(runs, *_k_numbers(blocks), "uint4")


def _read_q5_k(blocks: torch.Tensor) -> CodedRows:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[..., None, 16:48] >> shifts) & 1) << 4
    codes = (_runs(blocks[..., 48:]) | high).flatten(2)
    return _in_rows(codes + SIX_BIT_LIFT, *_k_numbers(blocks), "int6", 32)


def _read_q6_k(blocks: torch.Tensor) -> CodedRows:
    halves = []
    for half in range(2):
        low = blocks[..., 64 * half : 64 * half + 64]
        high = blocks[..., 128 + 32 * half : 160 + 32 * half]
        nibbles = torch.stack([low[..., :32] & 15, low[..., 32:] & 15, low[..., :32] >> 4,
                               low[..., 32:] >> 4], -2)  # fmt: skip
        pairs = torch.stack([(high >> 2 * run) & 3 for run in range(4)], -2)
        halves.append((nibbles | (pairs << 4)).flatten(-2))
    scales = view_as(blocks[..., 192:208].contiguous(), torch.int8).flatten(1)
    numbers = GroupValues(scales, _halves(blocks, 208), 16)
    return _in_rows(torch.cat(halves, -1), numbers, None, "int6", 16)


def _read_iq4_nl(blocks: torch.Tensor) -> CodedRows:
    return _nibbles_in_rows(blocks[..., 2:], GroupValues(_halves(blocks, 0)), None, "iq4")


def _read_iq4_xs(blocks: torch.Tensor) -> CodedRows:
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = ((blocks[..., 2:4, None] >> shifts) & 3).flatten(-2)
    scales = (low | (high << 4)).to(torch.int8) - 32
    numbers = GroupValues(scales.flatten(1), _halves(blocks, 0), 8)
    return _nibbles_in_rows(blocks[..., 8:].reshape(len(blocks), -1, 16), numbers, None, "iq4")


def _read_mxfp4(blocks: torch.Tensor) -> CodedRows:
    scales = GroupValues(blocks[..., 0].contiguous())
    return _nibbles_in_rows(blocks[..., 1:], scales, None, "e2m1")


def _read_nvfp4(blocks: torch.Tensor) -> CodedRows:
    stored = blocks[..., :4].flatten(1)
    scales = stored & _E4M3_NAN
    is_largest = scales == _E4M3_NAN
    # The largest code stands for nothing, with a sign bit for one step more than e4m3 has.
    scales = scales.masked_fill(is_largest, 0).view(torch.float8_e4m3fn)
    past = is_largest & (stored != _E4M3_NAN)
    numbers = scale_e4m3(scales, torch.ones(1, device=blocks.device), divides=False)
    if past.any():
        numbers = GroupValues(scales.half().masked_fill(past, _PAST_E4M3))
    runs = blocks[..., 4:].reshape(len(blocks), -1, 8)
    return _nibbles_in_rows(runs, numbers, None, "e2m1", 16)


def scale_whole(rows: CodedRows, scale: torch.Tensor) -> CodedRows:
    """Return NVFP4 rows whose scales are multiplied by one of the whole matrix, fp32, one value."""
    own = rows.scales
    if own.steps is not None:
        return replace(rows, scales=scale_e4m3(own.values, scale, divides=False))
    return replace(rows, scales=GroupValues(own.widen() * scale.reshape(1, 1)))


BLOCK_READERS: dict[str, tuple[int, Callable[[torch.Tensor], CodedRows]]] = {
    "Q8_0": (34, _read_q8_0),
    "Q4_0": (18, _read_q4_0),
    "Q4_1": (20, _read_q4_1),
    "Q5_0": (22, _read_q5_0),
    "Q5_1": (24, _read_q5_1),
    "Q4_K": (144, _read_q4_k),
    "Q5_K": (176, _read_q5_k),
    "Q6_K": (210, _read_q6_k),
    "IQ4_NL": (18, _read_iq4_nl),
    "IQ4_XS": (136, _read_iq4_xs),
    "MXFP4": (17, _read_mxfp4),
    "NVFP4": (36, _read_nvfp4),
}
"""GGUF's name -> bytes of a block, and what reads blocks [rows, blocks, bytes]."""
