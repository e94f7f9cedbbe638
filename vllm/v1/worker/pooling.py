"""Vectors of prompts' tokens, as the output matrix reads them, or some of their logits."""

from typing import Protocol

import numpy as np
import torch

from vllm.v1.request_options import PoolingParams
from vllm.v1.worker.step_input import StepInput


class Head(Protocol):
    """The end of a model."""

    def norm_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """Return what the output matrix reads of any M rows of streams: ``[M, D]``."""

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits ``[M, V]`` of any M rows of streams."""


def gather_pooled(
    step: StepInput, streams: torch.Tensor, head: Head
) -> list[np.ndarray | None] | None:
    """Look up the rows of this step that requests for vectors want.

    Args:
        step: The flat batch.
        streams: ``[T, n, D]`` of its rows.
        head: What reads them.

    Returns:
        fp32 ``[rows, D]`` by place in the batch, None for others; None: nobody wants any.
    """
    if not step.pooled:
        return None
    vectors: list[np.ndarray | None] = [None] * len(step.requests)
    for place, rows in step.pooled.items():
        wanted = step.requests[place].pooling
        assert wanted is not None, "only requests for vectors have such rows"
        # A row at a time: its bits must not depend on how many others a product has.
        parts = [_read(head, streams[row : row + 1], wanted) for row in rows]
        vectors[place] = torch.cat(parts).float().cpu().numpy()
    return vectors


def _read(head: Head, stream: torch.Tensor, wanted: PoolingParams) -> torch.Tensor:
    """Return what is wanted of one row: ``[1, D]``, or as many logits."""
    if wanted.logit_ids:
        return head.compute_logits(stream)[:, wanted.logit_ids]
    return head.norm_streams(stream)
