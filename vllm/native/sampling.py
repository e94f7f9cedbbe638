"""What a batch's logits forbid, and drawing tokens from them, each in one native call."""

import numpy as np
import torch

from vllm.native.library import NativeContext
from vllm.native.structs import Draws
from vllm.v1.sample.metadata import RandomRows


def forbid_tokens(
    context: NativeContext, logits: torch.Tensor, rows: np.ndarray, bits: np.ndarray
) -> None:
    """Rule out what masks do; see ``edits.ForbidTokens``.

    Raises:
        InvariantError: A row is out of range.
    """
    context.forbid(logits, torch.from_numpy(rows), torch.from_numpy(bits))


def draw_tokens(
    context: NativeContext, logits: torch.Tensor, random: RandomRows, uniforms: np.ndarray
) -> torch.Tensor:
    """Draw from the random rows, which are overwritten; see ``sampler.DrawTokens``.

    Tokens are those that torch draws, but where rounding decides: sums have another order.

    Args:
        context: Threads.
        logits: fp32 ``[R, V]`` on the CPU, contiguous.
        random: Which rows, and how.
        uniforms: fp32 ``[N]`` in [0, 1).

    Raises:
        InvariantError: A row or a parameter is out of range.
    """
    settings = random.settings
    token_ids = torch.empty(len(uniforms), dtype=torch.int64)
    draws = Draws(
        len(uniforms),
        random.rows_host.ctypes.data,
        settings.temperature.ctypes.data,
        settings.min_p.ctypes.data,
        settings.top_k.ctypes.data,
        settings.top_p.ctypes.data,
        uniforms.ctypes.data,
    )
    context.sample(logits, draws, token_ids)
    return token_ids
