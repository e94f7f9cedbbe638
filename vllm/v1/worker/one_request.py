"""Steps of one request over a pool just large enough for it, before there is a cache."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from vllm.platforms.interface import Platform
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.step_model import StepModel
from vllm.v1.attention.step_tables import BlockTableView, RequestSlice
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
)
from vllm.v1.worker.kv_cache_tensors import allocate_kv_cache

# (model, layout, cache name -> pages, device) -> what runs its steps.
MakeStepModel = Callable[[Any, CacheLayout, Mapping[str, torch.Tensor], torch.device], StepModel]


class OneRequest:
    """A pool for one request, which begins anew with every step.

    Groups of ``stored`` kinds get blocks for every row, states those of the last one. The others
    get none, as rows that die within a step do.

    Args:
        model: With its weights.
        specs: Of its caches.
        platform: Allocates the pages.
        device: Where.
        make_step_model: Makes what runs the model's steps.
        num_tokens: Tokens of the largest step.
        stored: Kinds of groups whose rows are kept: "dense" ones are read back within a step.

    Owns: the pool.

    Attributes:
        steps: What runs the model's steps.
        pages: Cache name -> its pages; a row's block is one above the multiple of its block's size.
    """

    def __init__(
        self,
        model: Any,
        specs: Mapping[str, KVCacheSpec],
        platform: Platform,
        device: torch.device,
        make_step_model: MakeStepModel,
        *,
        num_tokens: int,
        stored: frozenset[str] = frozenset({"dense"}),
    ) -> None:
        self._device, self._stored = device, stored
        alike: dict[KVCacheSpec, list[str]] = {}
        for name, spec in specs.items():
            alike.setdefault(spec, []).append(name)
        groups = [KVCacheGroupSpec(names, spec) for spec, names in alike.items()]
        self._layout = layout = CacheLayout.from_kv_cache_config(KVCacheConfig(1, [], groups))
        tables = [self._give_blocks(group, num_tokens) for group in layout.groups]
        # Pools are of one layer each: groups may use the same blocks.
        num_blocks = 1 + max(int(table.block_ids.max(initial=0)) for table in tables)
        tensors = [
            KVCacheTensor(num_blocks * spec.page_size_bytes, [name]) for name, spec in specs.items()
        ]
        config = KVCacheConfig(num_blocks, tensors, groups)
        self.pages = allocate_kv_cache(config, specs, platform, device).layers
        self.steps = make_step_model(model, layout, self.pages, device)

    def run(self, token_ids: torch.Tensor, num_drafts: int = 0) -> torch.Tensor:
        """Run the request's only step; return the residual stream of its tokens.

        Args:
            token_ids: int64 [T].
            num_drafts: How many of the last are drafts, which are all accepted.
        """
        count, steps = len(token_ids), self.steps
        own = tuple(self._give_blocks(group, count) for group in self._layout.groups)
        slices = [RequestSlice(0, count, own, num_drafts=num_drafts)]
        meta = steps.build_metadata(slices, self._layout)
        positions = torch.arange(count, device=self._device)
        streams: torch.Tensor = steps.model(token_ids, positions, meta, self.pages)
        if num_drafts and steps.settle_drafts is not None:
            steps.settle_drafts(slices, [num_drafts])
        return streams

    def _give_blocks(self, group: GroupLayout, num_tokens: int) -> BlockTableView:
        if group.state is not None:
            num_pieces = group.state.num_blocks
            last = (num_tokens - 1) // group.block_size * num_pieces
            return BlockTableView(last, np.arange(1, 1 + num_pieces))
        count = cdiv(num_tokens, group.block_size)
        is_stored = group.kind in self._stored
        return BlockTableView(
            0, np.arange(1, 1 + count) if is_stored else np.zeros(count, np.int64)
        )
