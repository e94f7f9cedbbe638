"""Prompt lookup: what followed the last tokens where they stood before is drafted again."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch

from vllm.v1.worker.step_input import StepInput


class NgramProposer:
    """Drafts by looking the last tokens up in the request's own text.

    Args:
        num_drafts: Most tokens of a draft.
        min_length: Fewest last tokens that must match.
        max_length: Most last tokens that are compared.
    """

    reads_all_rows: ClassVar[bool] = False

    def __init__(self, num_drafts: int, min_length: int, max_length: int) -> None:
        self._num_drafts = num_drafts
        self._min_length = min_length
        self._max_length = max_length

    def propose(
        self, step: StepInput, streams: torch.Tensor, rebuilds: Mapping[str, int]
    ) -> list[list[int]]:
        """Draft for the sampled requests; nothing but their tokens is looked at."""
        return [
            self.find(state.get_tokens(0, state.num_tokens)) if count else []
            for state, count in zip(step.requests, step.sampled_counts, strict=True)
        ]

    def forget(self, block_ids: Sequence[int]) -> None:
        """Do nothing: nothing is kept of blocks."""

    def find(self, tokens: np.ndarray) -> list[int]:
        """Return what followed the longest earlier match of the last tokens ``[L]``."""
        num_tokens = len(tokens)
        if num_tokens <= self._min_length:
            return []
        # Indices where a match of the suffix ends; the suffix itself does not count.
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        length = min(1, len(ends))
        while length and length < min(self._max_length, num_tokens - 1):
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[-1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if length < self._min_length:
            return []
        # The latest match says most, unless too few tokens follow it.
        full = ends[ends + self._num_drafts < num_tokens]
        end = int(full[-1]) if len(full) else int(ends[0])
        drafts: list[int] = tokens[end + 1 : end + 1 + self._num_drafts].tolist()
        return drafts
