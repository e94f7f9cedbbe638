"""Reading and writing one named cache by the step's index tables."""

from collections.abc import Mapping
from typing import TypeVar

import torch

from vllm.model_executor.models.deepseek_v4.step import ModelParts, Step
from vllm.v1.attention.step_tables import PaddedRows, PageRows

_GroupT = TypeVar("_GroupT")


class PageReader:
    """Reads rows of one cache in the model's type.

    Args:
        name: The cache's name.
        parts: What to build from.
    """

    def __init__(self, name: str, parts: ModelParts) -> None:
        self._name = name
        self._dtype = parts.make.dtype
        self._read_rows = parts.ops("read_rows")

    def find_group(self, groups: Mapping[int, _GroupT], step: Step) -> _GroupT:
        """Returns the cache's group's tables out of those of a kind."""
        return groups[step.meta.group_of[self._name]]

    def read(self, source: PageRows, step: Step) -> torch.Tensor:
        """Returns rows [*source shape, width]."""
        rows: torch.Tensor = self._read_rows(
            step.kv_caches[self._name], source.blocks, source.rows, self._dtype
        )
        return rows

    def read_padded(self, reads: PaddedRows, step: Step) -> torch.Tensor:
        """Returns rows [B, L, width] of a decode batch; requests without any read zeros."""
        return self.read_with_empty(reads.source, reads.empty_requests, step)

    def read_with_empty(
        self, source: PageRows, empty_requests: torch.Tensor | None, step: Step
    ) -> torch.Tensor:
        """Returns rows [B, L, width], zero for ``empty_requests``, whose addresses are borrowed."""
        rows = self.read(source, step)
        if empty_requests is not None:
            rows[empty_requests] = 0
        return rows
