"""What draws a step's tokens on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.utils.uploads import upload
from vllm.v1.attention.ops.triton.sampling import draw_rows

if TYPE_CHECKING:
    # The module needs more than a bare torch, on which kernels are checked.
    from vllm.v1.sample.metadata import RandomRows


def draw_tokens(logits: torch.Tensor, random: RandomRows, uniforms: np.ndarray) -> torch.Tensor:
    """Draw on the device; see ``sampler.DrawTokens``.

    Tokens are those that torch draws, but where rounding decides: sums have another order.
    """
    own = random.settings
    # Whole numbers below 2^24 are fp32 exactly. All of a step is one upload.
    columns = (uniforms, own.temperature, own.min_p, own.top_k, own.top_p)
    settings = upload(np.stack([column.astype(np.float32) for column in columns]), logits.device)
    return draw_rows(logits, random.rows, settings)
