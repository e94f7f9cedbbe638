"""Gemma 4's tower, and the embedder that 12B has in its place."""

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
    pool_squares,
    rms,
    split_heads,
    turn_halves,
)
from vllm.model_executor.towers.plans import GEMMA4_NORMS, Gemma4EmbedderPlan, Gemma4TowerPlan

_EMBEDDER_EPS = 1e-5


def encode(
    plan: Gemma4TowerPlan, weights: Weights, pixels: torch.Tensor, keep_going: KeepGoing
) -> torch.Tensor:
    """Maps pixels uint8 [H, W, 3] to the rows of soft tokens [N, out_width], row by row."""
    embedder = "vision_tower.patch_embedder"
    patches = cut_patches(pixels, plan.patch)
    rows, columns = patches.shape[:2]
    matrix = weights[f"{embedder}.input_proj.weight"]
    scaled = 2.0 * (patches.flatten(2).flatten(0, 1).float() * (1 / 255) - 0.5)
    ys, xs = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    along_x, along_y = weights[f"{embedder}.position_embedding_table"]
    x = linear(scaled.to(matrix.dtype), matrix) + along_x[xs] + along_y[ys]
    by_axis = frequencies(plan.theta, plan.head_dim // 4)
    angles = tuple(axis.float().unsqueeze(1) * by_axis for axis in (xs, ys))
    for layer in range(plan.num_layers):
        keep_going()
        x = _run_layer(plan, weights, f"vision_tower.encoder.layers.{layer}", x, angles)
    pooled = pool_squares(x.float(), rows, columns, plan.pooling) * plan.width**0.5
    if plan.is_standardised:
        bias, scale = (weights[f"vision_tower.std_{part}"].float() for part in ("bias", "scale"))
        pooled = (pooled - bias) * scale
    normed = rms(pooled, None, plan.eps).to(matrix.dtype)
    return linear(normed, weights["embed_vision.embedding_projection.weight"])


def _run_layer(
    plan: Gemma4TowerPlan,
    weights: Weights,
    prefix: str,
    x: torch.Tensor,
    angles: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    before, after, before_mlp, after_mlp = (
        weights[f"{prefix}.{name}.weight"] for name in GEMMA4_NORMS
    )
    normed = rms(x, before, plan.eps)
    queries, keys, values = (
        split_heads(_map(plan, weights, f"{prefix}.self_attn.{part}_proj", normed), heads)
        for part, heads in zip(
            "qkv", (plan.num_heads, plan.num_kv_heads, plan.num_kv_heads), strict=True
        )
    )
    queries = _turn(rms(queries, weights[f"{prefix}.self_attn.q_norm.weight"], plan.eps), angles)
    keys = _turn(rms(keys, weights[f"{prefix}.self_attn.k_norm.weight"], plan.eps), angles)
    attended = attend(queries, keys, rms(values, None, plan.eps), 1.0)
    x = x + rms(_map(plan, weights, f"{prefix}.self_attn.o_proj", attended), after, plan.eps)
    normed = rms(x, before_mlp, plan.eps)
    gate = gelu(_map(plan, weights, f"{prefix}.mlp.gate_proj", normed), approximate="tanh")
    inner = gate * _map(plan, weights, f"{prefix}.mlp.up_proj", normed)
    return x + rms(_map(plan, weights, f"{prefix}.mlp.down_proj", inner), after_mlp, plan.eps)


def _map(plan: Gemma4TowerPlan, weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Maps rows by a matrix, both sides clamped where the tower has bounds."""
    if plan.is_clipped:
        x = x.clamp(weights[f"{name}.input_min"], weights[f"{name}.input_max"])
    x = linear(x, weights[f"{name}.linear.weight"])
    if plan.is_clipped:
        x = x.clamp(weights[f"{name}.output_min"], weights[f"{name}.output_max"])
    return x


def _turn(heads: torch.Tensor, angles: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Turns the first half of each head by the column, the second by the row."""
    halves = zip(heads.chunk(2, -1), angles, strict=True)
    return torch.cat([turn_halves(half, own) for half, own in halves], -1)


def embed(
    plan: Gemma4EmbedderPlan, weights: Weights, pixels: torch.Tensor, keep_going: KeepGoing
) -> torch.Tensor:
    """Maps pixels uint8 [H, W, 3] to the rows of soft tokens [N, out_width], row by row."""
    keep_going()
    cells = cut_patches(pixels, plan.cell)
    rows, columns = cells.shape[:2]
    places = weights["vision_embedder.pos_embedding"]
    scaled = cells.flatten(2).flatten(0, 1).float() * (1 / 255)
    x = norm_rows(weights, "vision_embedder.patch_ln1", scaled.to(places.dtype), _EMBEDDER_EPS)
    x = map_rows(weights, "vision_embedder.patch_dense", x)
    x = norm_rows(weights, "vision_embedder.patch_ln2", x, _EMBEDDER_EPS)
    x = x + (places[:columns, 0].repeat(rows, 1) + places[:rows, 1].repeat_interleave(columns, 0))
    x = norm_rows(weights, "vision_embedder.pos_norm", x, _EMBEDDER_EPS)
    return map_rows(weights, "embed_vision.embedding_projection", rms(x, None, plan.eps))
