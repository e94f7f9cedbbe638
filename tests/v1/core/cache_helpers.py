"""Requests, configurations and questions shared by the tests of whole-block prefix caching."""

from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    KVCacheBlock,
    get_request_block_hasher,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.request import Request


def make_request(
    request_id: str,
    tokens: Sequence[int],
    hash_block_size: int = 16,
    prompt_logprobs: int | None = None,
    **kw: Any,
) -> Request:
    """Return a request whose prompt is ``tokens``."""
    params = SamplingParams(max_tokens=17, prompt_logprobs=prompt_logprobs)
    params.update_from_generation_config({}, eos_token_id=100)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(hash_block_size, sha256),
        **kw,
    )


def make_config(
    num_blocks: int, specs: Sequence[KVCacheSpec], eagle_groups: Sequence[int] = ()
) -> KVCacheConfig:
    """Return one group per spec."""
    return KVCacheConfig(
        num_blocks,
        [],
        [
            KVCacheGroupSpec([f"layer{i}"], spec, is_eagle_group=i in eagle_groups)
            for i, spec in enumerate(specs)
        ],
    )


def make_manager(config: KVCacheConfig, **kw: Any) -> KVCacheManager:
    """Return a manager whose block sizes follow from the groups."""
    sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
    defaults: dict[str, Any] = {
        "max_model_len": 8192,
        "scheduler_block_size": max(sizes),
        "hash_block_size": min(sizes),
    }
    return KVCacheManager(config, **{**defaults, **kw})


def start(
    manager: KVCacheManager, request: Request, num_tokens: int | None = None
) -> tuple[Any, int]:
    """Look up and allocate a request's whole prompt, or its first ``num_tokens``.

    Returns:
        The new blocks and the hit's tokens.
    """
    hit, num_hit = manager.get_computed_blocks(request)
    end = request.num_tokens if num_tokens is None else num_tokens
    blocks = manager.allocate_slots(request, end - num_hit, num_hit, hit)
    return blocks, num_hit


def run_prompt(manager: KVCacheManager, request: Request, chunk: int) -> int:
    """Compute a prompt chunk by chunk; return the hit's tokens."""
    hit, num_hit = manager.get_computed_blocks(request)
    end = num_hit
    while end < request.num_tokens:
        new = min(chunk, request.num_tokens - end)
        first = end == num_hit
        blocks = manager.allocate_slots(
            request, new, num_hit if first else 0, hit if first else None
        )
        assert blocks is not None
        end += new
        request.num_computed_tokens = end
    return num_hit


def cached_indices(manager: KVCacheManager, request: Request, group_id: int) -> set[int]:
    """Return which of the request's blocks of a group are in the prefix cache."""
    block_size = manager.coordinator.single_type_managers[group_id].block_size
    hash_block_size = manager.block_pool.hash_block_size
    hashes: Any = request.block_hashes
    if block_size != hash_block_size:
        hashes = BlockHashListWithBlockSize(hashes, hash_block_size, block_size)
    pool = manager.block_pool
    return {i for i, h in enumerate(hashes) if pool.get_cached_block(h, [group_id])}


def ids(blocks: Sequence[KVCacheBlock]) -> list[int]:
    """Return block ids."""
    return [block.block_id for block in blocks]


def free_ids(manager: KVCacheManager) -> list[int]:
    """Return the free queue's block ids in order."""
    return ids(manager.block_pool.free_block_queue.get_all_free_blocks())
