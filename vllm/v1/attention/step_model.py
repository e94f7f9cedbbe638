"""A model ready for steps, with what builds the tables that it reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from vllm.v1.attention.metadata import CacheLayout, RequestSlice, build_step_metadata


class TablesBuilder(Protocol):
    """Makes a model's ``meta`` from a step's requests and the KV groups they use."""

    def __call__(self, slices: Sequence[RequestSlice], layout: CacheLayout) -> Any:
        """Return the tables; their type is the model's own matter."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """A model and what belongs to it: another executor may read other tables and draw by itself.

    Attributes:
        model: A ``CausalLM``; with an MTP block an ``MTPModel`` too.
        build_metadata: Makes its ``meta``.
        draw_tokens: A ``sampler.DrawTokens``; None: torch draws from its logits.
    """

    model: Any
    build_metadata: TablesBuilder
    draw_tokens: Callable[[torch.Tensor, Any, np.ndarray], torch.Tensor] | None = None


def make_torch_step_model(model: Any, device: torch.device) -> StepModel:
    """Returns a model that torch runs, by index tables on ``device``."""
    return StepModel(model, partial(build_step_metadata, device=device))
