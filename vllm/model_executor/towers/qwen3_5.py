"""Qwen 3.5's tower: the patches of a soft token lie side by side from the start."""

import torch
from torch.nn.functional import gelu

from vllm.model_executor.towers.kernels import TowerKernels
from vllm.model_executor.towers.parts import (
    KeepGoing,
    Weights,
    cut_patches,
    make_turns,
    norm_rows,
)
from vllm.model_executor.towers.plans import QWEN_EPS, QwenTowerPlan

_THETA = 10_000.0


def encode(
    plan: QwenTowerPlan,
    weights: Weights,
    kernels: TowerKernels,
    pixels: torch.Tensor,
    keep_going: KeepGoing,
) -> torch.Tensor:
    """Maps pixels uint8 [H, W, 3] to the rows of soft tokens [N, out_width], row by row."""
    patches = cut_patches(pixels, plan.patch)
    rows, columns = patches.shape[:2]
    ys, xs = _order(rows, columns, plan.merge)
    # A patch lies as [channel, frame, row, column] where its weights do.
    cut = patches[ys, xs].permute(0, 3, 1, 2).unsqueeze(2)
    scaled = (cut.float() * (1 / 255) - 0.5) / 0.5
    x = kernels.map(
        "visual.patch_embed.proj", scaled.expand(-1, -1, plan.num_frames, -1, -1).flatten(1)
    )
    x = x + _interpolate(plan, weights["visual.pos_embed.weight"], rows, columns)[ys, xs]
    turns = make_turns(_THETA, plan.width // plan.num_heads // 4, (ys, xs))
    for layer in range(plan.num_layers):
        keep_going()
        x = kernels.run_layer(layer, x, turns)
    joined = norm_rows(weights, "visual.merger.norm", x, QWEN_EPS)
    inner = kernels.map("visual.merger.linear_fc1", joined.view(-1, plan.width * plan.merge**2))
    return kernels.map("visual.merger.linear_fc2", gelu(inner))


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
