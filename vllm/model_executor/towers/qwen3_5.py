"""Qwen 3.5's tower: the patches of a soft token lie side by side from the start."""

import torch
from torch.nn.functional import gelu, linear

from vllm.model_executor.towers.parts import (
    KeepGoing,
    Weights,
    attend,
    cut_patches,
    frequencies,
    map_rows,
    norm_rows,
    split_heads,
    turn_halves,
)
from vllm.model_executor.towers.plans import QwenTowerPlan

_EPS = 1e-6
_THETA = 10_000.0


def encode(
    plan: QwenTowerPlan, weights: Weights, pixels: torch.Tensor, keep_going: KeepGoing
) -> torch.Tensor:
    """Maps pixels uint8 [H, W, 3] to the rows of soft tokens [N, out_width], row by row."""
    patches = cut_patches(pixels, plan.patch)
    rows, columns = patches.shape[:2]
    ys, xs = _order(rows, columns, plan.merge)
    matrix = weights["visual.patch_embed.proj.weight"]
    # A patch lies as [channel, frame, row, column] where its weights do.
    cut = patches[ys, xs].permute(0, 3, 1, 2).unsqueeze(2)
    scaled = (cut.float() * (1 / 255) - 0.5) / 0.5
    frames = scaled.expand(-1, -1, plan.num_frames, -1, -1).flatten(1).to(matrix.dtype)
    x = linear(frames, matrix.flatten(1), weights["visual.patch_embed.proj.bias"])
    x = x + _interpolate(plan, weights["visual.pos_embed.weight"], rows, columns)[ys, xs]
    by_axis = frequencies(_THETA, plan.width // plan.num_heads // 4)
    angles = torch.cat([axis.float().unsqueeze(1) * by_axis for axis in (ys, xs)], 1)
    scale = (plan.width // plan.num_heads) ** -0.5
    for layer in range(plan.num_layers):
        keep_going()
        prefix = f"visual.blocks.{layer}"
        normed = norm_rows(weights, f"{prefix}.norm1", x, _EPS)
        queries, keys, values = (
            split_heads(part, plan.num_heads)
            for part in map_rows(weights, f"{prefix}.attn.qkv", normed).chunk(3, 1)
        )
        attended = attend(turn_halves(queries, angles), turn_halves(keys, angles), values, scale)
        x = x + map_rows(weights, f"{prefix}.attn.proj", attended)
        normed = norm_rows(weights, f"{prefix}.norm2", x, _EPS)
        inner = gelu(map_rows(weights, f"{prefix}.mlp.linear_fc1", normed), approximate="tanh")
        x = x + map_rows(weights, f"{prefix}.mlp.linear_fc2", inner)
    joined = norm_rows(weights, "visual.merger.norm", x, _EPS).view(-1, plan.width * plan.merge**2)
    inner = gelu(map_rows(weights, "visual.merger.linear_fc1", joined))
    return map_rows(weights, "visual.merger.linear_fc2", inner)


def _order(rows: int, columns: int, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns row and column of each patch: block by block, row by row inside."""
    grid = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    places = grid.transpose(1, 2).flatten()
    return places // columns, places % columns


def _interpolate(plan: QwenTowerPlan, table: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Spreads the table of positions over a grid, its corners on the grid's: [rows, columns, D]."""
    side = plan.positions_a_side
    square = table.view(side, side, -1).float()
    by_row = _blend(square, rows)
    return _blend(by_row.transpose(0, 1), columns).transpose(0, 1).to(table.dtype)


def _blend(square: torch.Tensor, count: int) -> torch.Tensor:
    """Interpolates the first axis linearly to ``count`` places."""
    places = torch.linspace(0, len(square) - 1, count)
    low = places.long()
    high = (low + 1).clamp(max=len(square) - 1)
    share = (places - low).view(-1, 1, 1)
    return square[low] * (1 - share) + square[high] * share
