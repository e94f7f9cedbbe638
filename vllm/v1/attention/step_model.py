"""A model ready for steps, with what builds the tables that it reads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch

from vllm.v1.attention.metadata import CacheLayout, RequestSlice, build_step_metadata
from vllm.v1.attention.recurrent_tables import build_settled_rows


class TablesBuilder(Protocol):
    """Makes a model's ``meta`` from a step's requests and the KV groups they use."""

    def __call__(self, slices: Sequence[RequestSlice], layout: CacheLayout) -> Any:
        """Return the tables; their type is the model's own matter."""


SettlesDrafts = Callable[[Sequence[RequestSlice], Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class StepModel:
    """A model and what belongs to it: another executor may read other tables and draw by itself.

    Attributes:
        model: A ``CausalLM``; with an MTP block an ``MTPModel`` too.
        build_metadata: Makes its ``meta``.
        draw_tokens: A ``sampler.DrawTokens``; None: torch draws from its logits.
        settle_drafts: Told a step's requests, and how many drafts of each stand, before the next
            step; None: nothing that the model stores depends on it.
        forbid_tokens: An ``edits.ForbidTokens``; None: torch applies masks.
        runs_drafter: Whether it runs a decoder's block that drafts; else torch does.
        takes_pictures: Whether it takes ``StepPictures`` besides.
        has_same_bits: Whether a row has the same bits in any company: no draft changes an answer.
    """

    model: Any
    build_metadata: TablesBuilder
    draw_tokens: Callable[[torch.Tensor, Any, np.ndarray], torch.Tensor] | None = None
    settle_drafts: SettlesDrafts | None = None
    forbid_tokens: Callable[[torch.Tensor, np.ndarray, np.ndarray], None] | None = None
    runs_drafter: bool = False
    takes_pictures: bool = False
    has_same_bits: bool = False


def make_torch_step_model(
    model: Any,
    device: torch.device,
    layout: CacheLayout | None = None,
    kv_caches: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> StepModel:
    """Returns a model that torch runs, by index tables on ``device``.

    Args:
        model: The model.
        device: Where it runs.
        layout: The KV groups; needed where some of them keep recurrent states.
        kv_caches: Cache name -> pages; likewise.
    """
    settle = None if layout is None else make_settle(model, device, layout, kv_caches)
    return StepModel(
        model,
        partial(build_step_metadata, device=device),
        settle_drafts=settle,
        takes_pictures=getattr(model, "takes_pictures", False),
    )


def make_settle(
    model: Any, device: torch.device, layout: CacheLayout, kv_caches: Mapping[str, torch.Tensor]
) -> SettlesDrafts | None:
    """Returns what stores the recurrent states behind accepted drafts; None: there are no states.

    Args:
        model: The model.
        device: Where it runs.
        layout: The KV groups.
        kv_caches: Cache name -> pages.
    """
    if all(group.kind != "recurrent" for group in layout.groups):
        return None

    def settle(slices: Sequence[RequestSlice], num_accepted: Sequence[int]) -> None:
        model.settle_drafts(build_settled_rows(slices, num_accepted, layout, device), kv_caches)

    return settle
