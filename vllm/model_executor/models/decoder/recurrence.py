"""What recurrent layers have in common: a request's state is taken through its rows."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from vllm.model_executor.models.decoder.kv_cache import STATES, state_shape
from vllm.model_executor.models.decoder.state_pages import StatePages
from vllm.model_executor.models.decoder.step import ModelParts, Step
from vllm.v1.attention.step_tables import RecurrentRows

Inputs = tuple[torch.Tensor, ...]
"""What some rows do to a state: tensors of so many rows."""


class RecurrentNet(nn.Module):
    """A layer that mixes tokens by a state.

    Owns: what the last step's drafts would do to the states, until they are settled; kernels that
    read pages keep it themselves.

    Args:
        index: The layer.
        parts: What to build from, within the layer's part that mixes tokens.
    """

    def __init__(self, index: int, parts: ModelParts) -> None:
        super().__init__()
        config = parts.config
        self._number = sum(layer.recurrence is not None for layer in config.layers[:index])
        self._narrows = index == config.last_owner
        self._shape = state_shape(config.for_ranks(parts.make.group.size))
        self._drafts: list[Inputs] = []

    @abstractmethod
    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""

    @abstractmethod
    def _run(self, item: RecurrentRows, pages: StatePages, inputs: Inputs) -> torch.Tensor:
        """Takes one request's state through its rows; stores it wherever it is to be left."""

    def _advance(self, inputs: Inputs, step: Step, outputs: torch.Tensor) -> None:
        """Takes every request's state through its rows, and writes what comes of each row."""
        self._drafts = []
        pages = StatePages(step.kv_caches[STATES], self._shape, self._number)
        for item in step.meta.recurrent[step.meta.group_of[STATES]]:
            own = _take_rows(inputs, item.rows)
            outputs[item.rows] = self._run(item, pages, own)
            if item.num_drafts:
                self._drafts.append(_take_rows(own, slice(-item.num_drafts, None)))

    def settle_drafts(
        self, settled: Sequence[RecurrentRows | None], kv_caches: Mapping[str, torch.Tensor]
    ) -> None:
        """Stores the states behind the last step's accepted drafts.

        Args:
            settled: For each request of that step that had drafts, what its accepted ones read and
                leave; None: none stands.
            kv_caches: Cache name -> pages.
        """
        pages = StatePages(kv_caches[STATES], self._shape, self._number)
        for item, drafts in zip(settled, self._drafts, strict=True):
            if item is not None:
                self._run(item, pages, _take_rows(drafts, slice(item.rows.stop)))
        self._drafts = []


def _take_rows(inputs: Inputs, rows: slice) -> Inputs:
    return tuple(own[rows] for own in inputs)
