"""Gemma 4's tower, and the embedder that 12B has in its place."""

import torch

from vllm.model_executor.towers.kernels import TowerKernels
from vllm.model_executor.towers.parts import (
    KeepGoing,
    Weights,
    cut_patches,
    make_turns,
    norm_rows,
    pool_squares,
    rms,
)
from vllm.model_executor.towers.plans import Gemma4EmbedderPlan, Gemma4TowerPlan

_EMBEDDER_EPS = 1e-5


def encode(
    plan: Gemma4TowerPlan,
    weights: Weights,
    kernels: TowerKernels,
    pixels: torch.Tensor,
    keep_going: KeepGoing,
) -> torch.Tensor:
    """Maps pixels uint8 [H, W, 3] to the rows of soft tokens [N, out_width], row by row."""
    embedder = "vision_tower.patch_embedder"
    patches = cut_patches(pixels, plan.patch)
    rows, columns = patches.shape[:2]
    scaled = 2.0 * (patches.flatten(2).flatten(0, 1).float() * (1 / 255) - 0.5)
    ys, xs = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    along_x, along_y = weights[f"{embedder}.position_embedding_table"]
    x = kernels.map(f"{embedder}.input_proj", scaled) + along_x[xs] + along_y[ys]
    # The first half of each head turns by the column, the second by the row.
    turns = make_turns(plan.theta, plan.head_dim // 4, (xs, ys))
    for layer in range(plan.num_layers):
        keep_going()
        x = kernels.run_layer(layer, x, turns)
    pooled = pool_squares(x.float(), rows, columns, plan.pooling) * plan.width**0.5
    if plan.is_standardised:
        bias, scale = (weights[f"vision_tower.std_{part}"].float() for part in ("bias", "scale"))
        pooled = (pooled - bias) * scale
    return kernels.map("embed_vision.embedding_projection", rms(pooled, None, plan.eps))


def embed(
    plan: Gemma4EmbedderPlan,
    weights: Weights,
    kernels: TowerKernels,
    pixels: torch.Tensor,
    keep_going: KeepGoing,
) -> torch.Tensor:
    """Maps pixels uint8 [H, W, 3] to the rows of soft tokens [N, out_width], row by row."""
    keep_going()
    cells = cut_patches(pixels, plan.cell)
    rows, columns = cells.shape[:2]
    places = weights["vision_embedder.pos_embedding"]
    scaled = cells.flatten(2).flatten(0, 1).float() * (1 / 255)
    x = norm_rows(weights, "vision_embedder.patch_ln1", scaled.to(places.dtype), _EMBEDDER_EPS)
    x = kernels.map("vision_embedder.patch_dense", x)
    x = norm_rows(weights, "vision_embedder.patch_ln2", x, _EMBEDDER_EPS)
    x = x + (places[:columns, 0].repeat(rows, 1) + places[:rows, 1].repeat_interleave(columns, 0))
    x = norm_rows(weights, "vision_embedder.pos_norm", x, _EMBEDDER_EPS)
    return kernels.map("embed_vision.embedding_projection", rms(x, None, plan.eps))
