"""SigLIP with Gemma 3's projector."""

import torch
from torch.nn.functional import gelu, linear

from vllm.model_executor.towers.parts import (
    KeepGoing,
    Weights,
    attend,
    cut_patches,
    map_rows,
    norm_rows,
    pool_squares,
    rms,
    split_heads,
)
from vllm.model_executor.towers.plans import SiglipPlan


def encode(
    plan: SiglipPlan, weights: Weights, pixels: torch.Tensor, keep_going: KeepGoing
) -> torch.Tensor:
    """Maps pixels uint8 [S, S, 3] to the rows of soft tokens [N, out_width]."""
    embeddings = "vision_tower.embeddings"
    patch = weights[f"{embeddings}.patch_embedding.weight"]
    # A patch lies as [channel, row, column] where its weights do.
    cut = cut_patches(pixels, plan.patch).permute(0, 1, 4, 2, 3).flatten(2).flatten(0, 1)
    scaled = (cut.float() * (1 / 255) - 0.5) / 0.5
    x = linear(
        scaled.to(patch.dtype), patch.flatten(1), weights[f"{embeddings}.patch_embedding.bias"]
    )
    x = x + weights[f"{embeddings}.position_embedding.weight"]
    scale = (plan.width // plan.num_heads) ** -0.5
    for layer in range(plan.num_layers):
        keep_going()
        prefix = f"vision_tower.encoder.layers.{layer}"
        normed = norm_rows(weights, f"{prefix}.layer_norm1", x, plan.eps)
        queries, keys, values = (
            split_heads(
                map_rows(weights, f"{prefix}.self_attn.{part}_proj", normed), plan.num_heads
            )
            for part in "qkv"
        )
        attended = attend(queries, keys, values, scale)
        x = x + map_rows(weights, f"{prefix}.self_attn.out_proj", attended)
        normed = norm_rows(weights, f"{prefix}.layer_norm2", x, plan.eps)
        inner = gelu(map_rows(weights, f"{prefix}.mlp.fc1", normed), approximate="tanh")
        x = x + map_rows(weights, f"{prefix}.mlp.fc2", inner)
    x = norm_rows(weights, "vision_tower.post_layernorm", x, plan.eps)
    side = plan.patches_a_side
    pooled = pool_squares(x, side, side, side // plan.tokens_a_side)
    # Stored less one, as the norms of Gemma 3's layers are.
    norm = weights["multi_modal_projector.mm_soft_emb_norm.weight"].float() + 1.0
    return rms(pooled, norm, plan.eps) @ weights["multi_modal_projector.mm_input_projection_weight"]
