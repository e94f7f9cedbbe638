"""A model ready for steps, with what builds the tables that it reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm.v1.attention.metadata import CacheLayout, RequestSlice, build_step_metadata


@dataclass(frozen=True, slots=True)
class StepModel:
    """A model and its tables belong together: another executor may read other tables.

    Attributes:
        model: A ``CausalLM``; with an MTP block an ``MTPModel`` too.
        build_metadata: Makes its ``meta`` from a step's requests and the KV groups they use.
    """

    model: Any
    build_metadata: Callable[[Sequence[RequestSlice], CacheLayout], Any]


def make_torch_step_model(model: Any, device: torch.device) -> StepModel:
    """Returns a model that torch runs, by index tables on ``device``."""
    return StepModel(model, partial(build_step_metadata, device=device))
