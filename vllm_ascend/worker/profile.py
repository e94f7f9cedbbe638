"""The profile run: the largest step once, over a pool just large enough for it."""

from collections.abc import Mapping

import numpy as np
import torch

from vllm.platforms.interface import Platform
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.metadata import (
    BlockTableView,
    CacheLayout,
    RequestSlice,
    build_step_metadata,
)
from vllm.v1.core.layout.packing import build_packed_tensors, group_for_packing
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.kv_cache_tensors import allocate_kv_cache
from vllm.v1.worker.model_runner import CausalLM


@torch.inference_mode()
def run_largest_step(
    model: CausalLM,
    specs: Mapping[str, KVCacheSpec],
    platform: Platform,
    device: torch.device,
    *,
    num_tokens: int,
    num_logit_rows: int,
) -> None:
    """Run one prefill chunk and the logits of a full batch; frees what it took.

    Dense groups get blocks for every row, because entries are read back from pages within the
    step. Window groups get none, as rows that die within a step do.

    Args:
        model: With its weights.
        specs: Of its caches.
        platform: Allocates the pages.
        device: Where.
        num_tokens: Tokens of the largest step.
        num_logit_rows: Requests of the largest batch.
    """
    groups = group_for_packing(specs)
    layout = CacheLayout.from_kv_cache_config(KVCacheConfig(1, [], groups))
    tables, num_blocks = [], 1
    for group in layout.groups:
        count = cdiv(num_tokens, group.block_size)
        if group.kind != "dense":
            tables.append(BlockTableView(0, np.zeros(count, dtype=np.int64)))
            continue
        tables.append(BlockTableView(0, np.arange(num_blocks, num_blocks + count)))
        num_blocks += count
    _, tensors = build_packed_tensors(groups, 0, num_blocks)
    config = KVCacheConfig(num_blocks, tensors, groups)
    pool = allocate_kv_cache(config, specs, platform, device)
    meta = build_step_metadata([RequestSlice(0, num_tokens, tuple(tables))], layout, device)
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(num_tokens, device=device)
    streams = model(token_ids, positions, meta, pool.layers)
    model.compute_logits(streams[: min(num_logit_rows, num_tokens)])
