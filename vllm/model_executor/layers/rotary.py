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
) -> torch.Tensor:
    """Returns YaRN's blend of plain and 1/factor-slowed frequencies; it holds at every length.

    Pairs that turn more than ``beta_fast`` times in ``original_length`` tokens are left alone,
    those that turn less than ``beta_slow`` times are slowed by ``factor``.
    """

    def find_pair(num_turns: float) -> float:
        wavelength = original_length / (num_turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(find_pair(beta_fast)), 0)
    high = min(math.ceil(find_pair(beta_slow)), dim - 1)
    # Keeps the ramp finite when both ends meet.
    span = max(high - low, 0.001)
    pairs = torch.arange(dim // 2, dtype=torch.float32, device=device)
    ramp = ((pairs - low) / span).clamp(0, 1)
    return plain_frequencies(theta, dim, device) * (ramp / factor + 1 - ramp)


def compute_turns(positions: torch.Tensor, frequencies: torch.Tensor) -> Turns:
    """Returns the turns of int64 positions [N] for fp32 frequencies [P]."""
    angles = positions.float().unsqueeze(1) * frequencies
    rows = torch.polar(torch.ones_like(angles), angles)
    heads = rows.unsqueeze(1)
    # Materialised: a lazy conjugate would be resolved again by every layer.
    return Turns(rows, heads, heads.conj().resolve_conj())
