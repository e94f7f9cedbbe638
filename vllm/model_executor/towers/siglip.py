"""SigLIP with Gemma 3's projector."""

import torch

from vllm.model_executor.towers.kernels import TowerKernels
from vllm.model_executor.towers.parts import (
    KeepGoing,
    Weights,
    cut_patches,
    norm_rows,
    pool_squares,
    rms,
)
from vllm.model_executor.towers.plans import SiglipPlan


def encode(
    plan: SiglipPlan,
    weights: Weights,
    kernels: TowerKernels,
    pixels: torch.Tensor,
    keep_going: KeepGoing,
) -> torch.Tensor:
    """Maps pixels uint8 [S, S, 3] to the rows of soft tokens [N, out_width]."""
    embeddings = "vision_tower.embeddings"
    # A patch lies as [channel, row, column] where its weights do.
    cut = cut_patches(pixels, plan.patch).permute(0, 1, 4, 2, 3).flatten(2).flatten(0, 1)
    x = kernels.map(f"{embeddings}.patch_embedding", (cut.float() * (1 / 255) - 0.5) / 0.5)
    x = x + weights[f"{embeddings}.position_embedding.weight"]
    for layer in range(plan.num_layers):
        keep_going()
        x = kernels.run_layer(layer, x, None)
    x = norm_rows(weights, "vision_tower.post_layernorm", x, plan.eps)
    side = plan.patches_a_side
    pooled = pool_squares(x, side, side, side // plan.tokens_a_side)
    # Stored less one, as the norms of Gemma 3's layers are.
    norm = weights["multi_modal_projector.mm_soft_emb_norm.weight"].float() + 1.0
    return kernels.map("multi_modal_projector.mm_input_projection", rms(pooled, norm, plan.eps))
