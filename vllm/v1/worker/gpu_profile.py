"""The profile run: the largest step once, over a pool just large enough for it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm.platforms.interface import Platform
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.attention.metadata import build_step_metadata
from vllm.v1.attention.step_tables import BlockTableView, RequestSlice
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
)
from vllm.v1.worker.kv_cache_tensors import allocate_kv_cache


@torch.inference_mode()
def run_largest_step(
    model: Any,
    specs: Mapping[str, KVCacheSpec],
    platform: Platform,
    device: torch.device,
    *,
    num_tokens: int,
    num_logit_rows: int,
) -> None:
    """Run one prefill chunk and the logits of a full batch; frees what it took.

    Dense groups get blocks for every row, because entries are read back from pages within the
    step. The others get none, as rows that die within a step do.

    Args:
        model: With its weights.
        specs: Of its caches.
        platform: Allocates the pages.
        device: Where.
        num_tokens: Tokens of the largest step.
        num_logit_rows: Requests of the largest batch.
    """
    alike: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        alike.setdefault(spec, []).append(name)
    groups = [KVCacheGroupSpec(names, spec) for spec, names in alike.items()]
    layout = CacheLayout.from_kv_cache_config(KVCacheConfig(1, [], groups))
    tables, num_blocks = [], 1
    for group in layout.groups:
        count = cdiv(num_tokens, group.block_size)
        ids = np.zeros(count, dtype=np.int64)
        if group.kind == "dense":
            # Pools are of one layer each: groups may use the same blocks.
            ids = np.arange(1, 1 + count)
            num_blocks = max(num_blocks, 1 + count)
        tables.append(BlockTableView(0, ids))
    tensors = [
        KVCacheTensor(num_blocks * spec.page_size_bytes, [name]) for name, spec in specs.items()
    ]
    pool = allocate_kv_cache(KVCacheConfig(num_blocks, tensors, groups), specs, platform, device)
    meta = build_step_metadata([RequestSlice(0, num_tokens, tuple(tables))], layout, device)
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(num_tokens, device=device)
    streams = model(token_ids, positions, meta, pool.layers)
    model.compute_logits(streams[: min(num_logit_rows, num_tokens)])
