"""Rotary frequencies and the per-step turns shared by all layers; always fp32."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Turns:
    """Unit complex numbers that turn a batch of rows to their positions.

    Attributes:
        rows: complex64 [N, P], for one vector per row.
        heads: The same as [N, 1, P], for several heads per row.
        inverse_heads: Conjugates of ``heads``.
    """

    rows: torch.Tensor
    heads: torch.Tensor
    inverse_heads: torch.Tensor


def split_pairs(values: torch.Tensor) -> torch.Tensor:
    """Returns pairs of neighbours [..., 2 * P] as two halves: the first ones of all, the others."""
    pairs = values.reshape(*values.shape[:-1], -1, 2)
    return pairs.transpose(-1, -2).flatten(-2)


def plain_frequencies(theta: float, dim: int, device: torch.device) -> torch.Tensor:
    """Returns theta^(-2k / dim) for the dim / 2 pairs."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return 1.0 / theta**exponents


def yarn_frequencies(
    theta: float,
    dim: int,
    factor: float,
    original_length: int,
    beta_fast: float,
    beta_slow: float,
    device: torch.device,
    *,
    truncates: bool = True,
) -> torch.Tensor:
    """Returns YaRN's blend of plain and 1/factor-slowed frequencies; it holds at every length.

    Pairs that turn more than ``beta_fast`` times in ``original_length`` tokens are left alone,
    those that turn less than ``beta_slow`` times are slowed by ``factor``. ``truncates`` rounds the
    ends of the ramp between them to whole pairs.
    """

    def find_pair(num_turns: float) -> float:
        wavelength = original_length / (num_turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = find_pair(beta_fast), find_pair(beta_slow)
    if truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # Keeps the ramp finite when both ends meet.
    span = max(high - low, 0.001)
    pairs = torch.arange(dim // 2, dtype=torch.float32, device=device)
    ramp = ((pairs - low) / span).clamp(0, 1)
    return plain_frequencies(theta, dim, device) * (ramp / factor + 1 - ramp)


def llama3_frequencies(
    theta: float,
    dim: int,
    factor: float,
    original_length: int,
    low: float,
    high: float,
    device: torch.device,
) -> torch.Tensor:
    """Returns Llama 3's frequencies: long waves slowed by ``factor``, short ones left alone.

    A pair that turns at least ``high`` times in ``original_length`` tokens is short, one that turns
    at most ``low`` times is long; in between the two are blended by the number of turns.
    """
    plain = plain_frequencies(theta, dim, device)
    num_turns = original_length * plain / (2 * math.pi)
    share = ((num_turns - low) / (high - low)).clamp(0, 1)
    return plain * ((1 - share) / factor + share)


def compute_half_turns(
    positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what turns pairs (i, i + P) of rows at int64 positions [N].

    Args:
        positions: Of the rows; or [N, P], one of each pair.
        frequencies: fp32 [P].
        magnitude: Turned rows are scaled by it.
        dtype: Of the rows.

    Returns:
        Cosines [N, 1, 2 * P], and sines likewise, those of the first half negated.
    """
    by_pair = positions.float()
    angles = (by_pair if by_pair.dim() > 1 else by_pair.unsqueeze(1)) * frequencies
    cos, sin = angles.cos().mul_(magnitude), angles.sin().mul_(magnitude)
    cosines, sines = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return cosines.to(dtype).unsqueeze(1), sines.to(dtype).unsqueeze(1)


def compute_turns(positions: torch.Tensor, frequencies: torch.Tensor) -> Turns:
    """Returns the turns of int64 positions [N] for fp32 frequencies [P]."""
    angles = positions.float().unsqueeze(1) * frequencies
    rows = torch.polar(torch.ones_like(angles), angles)
    heads = rows.unsqueeze(1)
    # Materialised: a lazy conjugate would be resolved again by every layer.
    return Turns(rows, heads, heads.conj().resolve_conj())
