"""What towers are made of, in plain torch. One picture at a time, so that nothing else in a step
moves a bit of it; norms and softmax are fp32 whatever the type of the weights."""

from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

Weights = Mapping[str, torch.Tensor]
KeepGoing = Callable[[], None]
"""Called between layers; raises where nobody waits for the rows any more."""


def map_rows(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Maps rows [N, in] by a matrix and, where there is one, its bias."""
    return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm_rows(weights: Weights, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the layer norm of rows, by weights and bias."""
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)


def rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Scales the last axis to unit root mean square, then by ``weight``."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def split_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Maps rows [N, H * d] to [N, H, d]."""
    return x.view(len(x), num_heads, -1)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attends all rows to all: queries [N, H, d], keys and values [N, K, d] to [N, H * d]."""
    query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (queries, keys, values))
    attended = scaled_dot_product_attention(
        query, key, value, scale=scale, enable_gqa=keys.shape[1] != queries.shape[1]
    )
    return attended[0].transpose(0, 1).flatten(1)


def turn_halves(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turns pairs (i, i + d / 2) of heads [N, H, d] by angles fp32 [N, d / 2]."""
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)


def frequencies(theta: float, num_pairs: int) -> torch.Tensor:
    """Returns theta^(-i / pairs), fp32 [pairs]."""
    steps = torch.arange(num_pairs, dtype=torch.float32) / num_pairs
    return 1.0 / theta**steps


def cut_patches(pixels: torch.Tensor, patch: int) -> torch.Tensor:
    """Cuts pixels [H, W, 3] into patches [H / p, W / p, p, p, 3] (row, column, channel inside)."""
    height, width = pixels.shape[0] // patch, pixels.shape[1] // patch
    return pixels.view(height, patch, width, patch, 3).transpose(1, 2)


def pool_squares(x: torch.Tensor, rows: int, columns: int, size: int) -> torch.Tensor:
    """Means of squares of ``size`` x ``size``: [rows * columns, D], row by row, to fewer rows."""
    split = x.view(rows // size, size, columns // size, size, -1)
    return split.mean((1, 3)).flatten(0, 1)
