"""The profile run: the largest step once, over a pool just large enough for it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from vllm.platforms.interface import Platform
from vllm.sampling_params import SamplingParams
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
from vllm.v1.sample.metadata import RowSampling, SamplingMetadata
from vllm.v1.sample.sampler import sample_on_device
from vllm.v1.worker.kv_cache_tensors import allocate_kv_cache

# Tokens of steps that kernels treat otherwise than long ones.
_OTHER_COUNTS = (5, 1)
# (model, layout, cache name -> pages, device) -> what runs its steps.
MakeStepModel = Callable[[Any, CacheLayout, Mapping[str, torch.Tensor], torch.device], StepModel]


@torch.inference_mode()
def run_largest_step(
    model: Any,
    specs: Mapping[str, KVCacheSpec],
    platform: Platform,
    device: torch.device,
    make_step_model: MakeStepModel,
    *,
    num_tokens: int,
    num_logit_rows: int,
    num_drafts: int = 0,
) -> None:
    """Run one prefill chunk, the logits of a full batch and draws from them; frees what it took.

    Steps of a few tokens and of one follow, with drafts if there will be any: what compiles kernels
    at their first use does so now, not while requests wait.

    Dense groups get blocks for every row, because entries are read back from pages within the
    step; states get those of the last one. The others get none, as rows that die within a step do.

    Args:
        model: With its weights.
        specs: Of its caches.
        platform: Allocates the pages.
        device: Where.
        make_step_model: Makes what later runs the model's steps.
        num_tokens: Tokens of the largest step.
        num_logit_rows: Requests of the largest batch.
        num_drafts: Most drafts of a request in a step.
    """
    alike: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        alike.setdefault(spec, []).append(name)
    groups = [KVCacheGroupSpec(names, spec) for spec, names in alike.items()]
    layout = CacheLayout.from_kv_cache_config(KVCacheConfig(1, [], groups))
    tables = [_give_blocks(group, num_tokens) for group in layout.groups]
    # Pools are of one layer each: groups may use the same blocks.
    num_blocks = 1 + max(int(table.block_ids.max(initial=0)) for table in tables)
    tensors = [
        KVCacheTensor(num_blocks * spec.page_size_bytes, [name]) for name, spec in specs.items()
    ]
    pool = allocate_kv_cache(KVCacheConfig(num_blocks, tensors, groups), specs, platform, device)
    steps = make_step_model(model, layout, pool.layers, device)

    def run(count: int, num_drafts: int = 0) -> torch.Tensor:
        own = tuple(_give_blocks(group, count) for group in layout.groups)
        slices = [RequestSlice(0, count, own, num_drafts=num_drafts)]
        meta = steps.build_metadata(slices, layout)
        token_ids = torch.zeros(count, dtype=torch.int64, device=device)
        positions = torch.arange(count, device=device)
        streams = steps.model(token_ids, positions, meta, pool.layers)
        logits: torch.Tensor = steps.model.compute_logits(streams[: min(num_logit_rows, count)])
        if num_drafts and steps.settle_drafts is not None:
            steps.settle_drafts(slices, [num_drafts])
        return logits

    logits = run(num_tokens)
    for is_mixed in (False, True):
        _draw(steps, logits, is_mixed=is_mixed)
    for count in _OTHER_COUNTS:
        fewer = min(count, num_tokens)
        run(fewer, min(num_drafts, fewer - 1))


def _draw(steps: StepModel, logits: torch.Tensor, *, is_mixed: bool) -> None:
    """Samples rows of which all are drawn, or all but one, which is greedy."""
    drawn = RowSampling(SamplingParams(temperature=0.7, top_k=20, top_p=0.9), 0, 0)
    greedy = RowSampling(SamplingParams(temperature=0.0), 0, 0)
    rows = [greedy if is_mixed and not row else drawn for row in range(len(logits))]
    metadata = SamplingMetadata.build(rows, logits.shape[1], logits.device)
    sample_on_device(logits, metadata, np.ones(len(rows), np.int64), None, steps.draw_tokens)


def _give_blocks(group: GroupLayout, num_tokens: int) -> BlockTableView:
    if group.state is not None:
        num_pieces = group.state.num_blocks
        last = (num_tokens - 1) // group.block_size * num_pieces
        return BlockTableView(last, np.arange(1, 1 + num_pieces))
    count = cdiv(num_tokens, group.block_size)
    is_dense = group.kind == "dense"
    return BlockTableView(0, np.arange(1, 1 + count) if is_dense else np.zeros(count, np.int64))
