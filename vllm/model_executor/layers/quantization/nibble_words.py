"""Codes of four bits from a file's order into words, without a byte for each code on the way.

Eight bytes are moved at once, and so few rows at a time that what is between stays in a cache: a
4-bit file is packed in a fraction of the time that unpacking its codes would take.
"""

import torch

_CHUNK_BYTES = 1 << 18
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F
# What is left of eight codes after each step of ``_squeeze``: by bytes, by pairs of them.
_BY_BYTES, _BY_PAIRS = 0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF
# Which output each nibble of AWQ's words is of.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Of an exchange across words: how far apart they lie, how many bits, and those that are kept.
_EXCHANGES = ((4, 16, 0x0000FFFF), (2, 8, 0x00FF00FF), (1, 4, 0x0F0F0F0F))


def pack_halves(runs: torch.Tensor) -> torch.Tensor:
    """Return words of half-split runs: their bytes' low nibbles first, then the high ones.

    Args:
        runs: uint8 [rows, runs, bytes], bytes a multiple of 8.

    Returns:
        int32 [rows, runs * bytes / 4], eight codes to a word, the first lowest.
    """
    num_rows, num_runs, num_bytes = runs.shape
    half = num_bytes // 8
    words = torch.empty((num_rows, num_runs, 2 * half), dtype=torch.int32, device=runs.device)
    step = max(1, _CHUNK_BYTES // max(1, num_runs * num_bytes))
    for start in range(0, num_rows, step):
        part = runs[start : start + step].clone(memory_format=torch.contiguous_format)
        high = part.view(torch.int64)
        low = high & _LOW_NIBBLES
        high.bitwise_right_shift_(4).bitwise_and_(_LOW_NIBBLES)
        own = words[start : start + step]
        own[..., :half] = _squeeze(low)
        own[..., half:] = _squeeze(high)
    return words.flatten(1)


def _squeeze(codes: torch.Tensor) -> torch.Tensor:
    """Returns int32 words of int64 ones, a code in each byte of these, which are written."""
    moved = codes >> 4
    codes.bitwise_or_(moved).bitwise_and_(_BY_BYTES)
    torch.bitwise_right_shift(codes, 8, out=moved)
    codes.bitwise_or_(moved).bitwise_and_(_BY_PAIRS)
    torch.bitwise_right_shift(codes, 16, out=moved)
    return codes.bitwise_or_(moved).view(torch.int32)[..., ::2]


def turn_awq_words(words: torch.Tensor) -> torch.Tensor:
    """Return AWQ's words, int32 [in, out / 8], as words along inputs, int32 [out, in / 8].

    Eight words of eight inputs are a square of nibbles, which is turned by exchanging its halves,
    their halves, and single nibbles.
    """
    num_inputs, width = words.shape
    squares = words.view(num_inputs // 8, 8, width)
    turned = torch.empty((width, 8, num_inputs // 8), dtype=torch.int32, device=words.device)
    step = max(1, _CHUNK_BYTES // max(1, 32 * width))
    for start in range(0, len(squares), step):
        rows = list(squares[start : start + step].transpose(0, 1).contiguous())
        for distance, bits, kept in _EXCHANGES:
            for first in (i for i in range(8) if not i & distance):
                lower, upper = rows[first], rows[first + distance]
                moved = (lower >> bits).bitwise_xor_(upper).bitwise_and_(kept)
                upper.bitwise_xor_(moved)
                lower.bitwise_xor_(moved.bitwise_left_shift_(bits))
        for nibble, output in enumerate(_AWQ_ORDER):
            turned[:, output, start : start + step] = rows[nibble].T
    return turned.flatten(0, 1)
