"""What towers do outside their layers, in plain torch. One picture at a time, so that nothing else
in a step moves a bit of it; norms are fp32 whatever the type of the weights."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.functional import layer_norm

Weights = Mapping[str, torch.Tensor]
KeepGoing = Callable[[], None]
"""Called between layers; raises where nobody waits for the rows any more."""


def go_on() -> None:
    """Goes on: whoever asked waits."""


def norm_rows(weights: Weights, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the layer norm of rows, by weights and bias."""
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)


def rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Scales the last axis to unit root mean square, then by ``weight``."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def make_turns(theta: float, num_pairs: int, axes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns cosines and sines fp32 [N, 2, axes * pairs] of places times theta^(-i / pairs).

    Args:
        theta: The base.
        num_pairs: That turn by one axis.
        axes: Places [N] on each.
    """
    frequencies = 1.0 / theta ** (torch.arange(num_pairs, dtype=torch.float32) / num_pairs)
    angles = torch.cat([axis.float().unsqueeze(1) * frequencies for axis in axes], 1)
    return torch.stack([angles.cos(), angles.sin()], 1)


def cut_patches(pixels: torch.Tensor, patch: int) -> torch.Tensor:
    """Cuts pixels [H, W, 3] into patches [H / p, W / p, p, p, 3] (row, column, channel inside)."""
    height, width = pixels.shape[0] // patch, pixels.shape[1] // patch
    return pixels.view(height, patch, width, patch, 3).transpose(1, 2)


def pool_squares(x: torch.Tensor, rows: int, columns: int, size: int) -> torch.Tensor:
    """Means of squares of ``size`` x ``size``: [rows * columns, D], row by row, to fewer rows."""
    split = x.view(rows // size, size, columns // size, size, -1)
    return split.mean((1, 3)).flatten(0, 1)
