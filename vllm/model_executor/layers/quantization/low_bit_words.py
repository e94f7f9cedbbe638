"""Codes of less than four bits as words, as panels hold them (``csrc/units.h`` draws them).

uint2, int2     16 codes, a word: bits 2p and 2p + 1 of byte b are code 4p + b
int3, iq1, iq2  32 codes, three words: two as those of two bits, then the third bits: bit 4u + p
                of byte b is of code 4p + b of word u
iq2_xxs         32 codes, two words: four indexes; four signs of seven bits and, on top, a scale
iq3_xxs         32 codes, three words: indexes 0, 2, 4, 6; 1, 3, 5, 7; signs and scale
"""

from collections.abc import Mapping
from functools import cache

import torch

from vllm.model_executor.layers.quantization.decode import view_as
from vllm.model_executor.layers.quantization.gguf_grids import grid_digits, grid_values
from vllm.v1.attention.ops.stored import CodeKind

LOW_BIT_TABLES: Mapping[CodeKind, tuple[int, ...]] = {
    "uint2": (0, 1, 2, 3),
    "int2": (-1, 0, 1, 2),
    "int3": (-4, -3, -2, -1, 0, 1, 2, 3),
    # Eight times -1, 0 and 1, and one less or more.
    "iq1": (-9, -7, -1, 1, 7, 9, 0, 0),
    "iq2": (8, 25, 43, 0, -8, -25, -43, 0),
}
"""What the codes of kinds without indexes stand for."""
_CODEBOOKS: Mapping[CodeKind, str] = {"iq2_xxs": "IQ2_XXS", "iq3_xxs": "IQ3_XXS"}
LOW_BIT_KINDS = frozenset({*LOW_BIT_TABLES, *_CODEBOOKS})


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return words int32 [rows, n / 16] of codes 0 to 3, uint8 [rows, n]."""
    fields = codes.view(len(codes), -1, 4, 4) & 3
    words = (
        fields[:, :, 0] | (fields[:, :, 1] << 2) | (fields[:, :, 2] << 4) | (fields[:, :, 3] << 6)
    )
    return view_as(words.flatten(1), torch.int32)


def pack_triples(codes: torch.Tensor) -> torch.Tensor:
    """Return words int32 [rows, 3n / 32] of codes 0 to 7, uint8 [rows, n]."""
    low = pack_pairs(codes).view(len(codes), -1, 2)
    bits = (codes >> 2).view(len(codes), -1, 8, 4)
    shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)[:, None]
    high = (bits << shifts).sum(2, dtype=torch.uint8)
    return torch.cat([low, view_as(high.flatten(1), torch.int32)[:, :, None]], 2).flatten(1)


def pack_indexes_of_four(indexes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return iq3_xxs words, int32 [rows, 3g], of indexes uint8 [rows, 8g] and words [rows, g]."""
    pairs = indexes.view(len(indexes), -1, 4, 2)
    even, odd = (view_as(pairs[..., i].flatten(1), torch.int32) for i in range(2))
    return torch.stack([even, odd, words], 2).flatten(1)


def widen_low_bits(words: torch.Tensor, kind: CodeKind) -> torch.Tensor:
    """Return the fp32 values [rows, codes] of words int32 [rows, n]: whole units."""
    if kind == "iq2_xxs":
        pairs = words.view(len(words), -1, 2)
        indexes = view_as(pairs[..., 0], torch.uint8)
        return find_values("IQ2_XXS", indexes, whole_signs(pairs[..., 1])).float()
    if kind == "iq3_xxs":
        parts = words.view(len(words), -1, 3)
        both = [view_as(parts[..., i], torch.uint8) for i in range(2)]
        indexes = torch.stack(both, -1).flatten(1)
        return find_values("IQ3_XXS", indexes, whole_signs(parts[..., 2])).float()
    table = torch.tensor(LOW_BIT_TABLES[kind], dtype=torch.float32, device=words.device)
    if len(table) == 4:
        return table[_unpack_pairs(words).int()]
    parts = words.view(len(words), -1, 3)
    low = _unpack_pairs(parts[..., :2].flatten(1))
    bits = view_as(parts[..., 2], torch.uint8).view(len(words), -1, 1, 4)
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)[:, None]
    high = ((bits >> shifts) & 1).flatten(1)
    return table[(low | (high << 2)).int()]


def find_values(
    name: str, indexes: torch.Tensor, signs: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a codebook's values, int8 [..., values], of indexes [..., n].

    Args:
        name: The codebook.
        indexes: Of entries.
        signs: uint8, a bit a value, lowest first: set, the value is negative; None: none is.
    """
    values = grid_values(name).to(indexes.device)[indexes.int()].flatten(-2)
    return values if signs is None else torch.where(spread_bits(signs) != 0, -values, values)


def spread_bits(stored: torch.Tensor) -> torch.Tensor:
    """Return the bits [..., 8n] of bytes [..., n], lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=stored.device)
    return ((stored[..., None] >> shifts) & 1).flatten(-2)


def add_parity(seven: torch.Tensor) -> torch.Tensor:
    """Return bytes of seven signs with the eighth, which makes their number even."""
    parity = seven ^ (seven >> 4)
    parity = parity ^ (parity >> 2)
    return (seven | (((parity ^ (parity >> 1)) & 1) << 7)).to(torch.uint8)


def whole_signs(words: torch.Tensor) -> torch.Tensor:
    """Return bytes of signs [..., 4n] of words [..., n], which have four of seven bits."""
    shifts = torch.tensor([0, 7, 14, 21], dtype=torch.int32, device=words.device)
    return add_parity((words[..., None] >> shifts) & 127).flatten(-2)


@cache
def make_codebook(kind: CodeKind) -> torch.Tensor | None:
    """Return a kind's codebook as kernels take it, uint8 [512]; None: it has none.

    Two tables: the first half of the digits of each entry in a byte, then the second half.
    """
    if kind not in _CODEBOOKS:
        return None
    digits = grid_digits(_CODEBOOKS[kind]).int()
    half = digits.shape[1] // 2
    shifts = 8 // half * torch.arange(half, dtype=torch.int32)
    parts = [(digits[:, at : at + half] << shifts).sum(1) for at in (0, half)]
    return torch.cat(parts).to(torch.uint8)


def _unpack_pairs(words: torch.Tensor) -> torch.Tensor:
    """Returns codes 0 to 3, uint8 [rows, 16n], of words [rows, n]."""
    stored = view_as(words, torch.uint8).view(len(words), -1, 1, 4)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=words.device)[:, None]
    return ((stored >> shifts) & 3).flatten(1)
