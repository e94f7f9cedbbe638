"""Parameter names, their order and defaults that code written against this interface uses."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
from vllm.v1.core.kv_cache_coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    get_kv_cache_coordinator,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    FreeKVCacheBlockQueue,
    estimate_max_model_len,
    generate_block_hash_extra_keys,
    get_kv_cache_configs,
    get_max_concurrency_for_kv_cache_config,
    get_request_block_hasher,
    hash_block_tokens,
    make_block_hash_with_group_id,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    FullAttentionManager,
    MambaManager,
    SinkFullAttentionManager,
    SlidingWindowManager,
    get_manager_for_kv_cache_spec,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups

MANAGERS = (
    FullAttentionManager,
    SinkFullAttentionManager,
    SlidingWindowManager,
    ChunkedLocalAttentionManager,
    MambaManager,
    CrossAttentionManager,
)
COORDINATORS = (
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    HybridKVCacheCoordinator,
)

# Callable -> its parameters; further ones may follow, if they have defaults.
SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (get_request_block_hasher, "block_size, caching_hash_fn"),
    (
        hash_block_tokens,
        "hash_function, parent_block_hash, curr_block_token_ids, extra_keys=None",
    ),
    (
        generate_block_hash_extra_keys,
        "request, start_token_idx, end_token_idx, start_mm_idx",
    ),
    (make_block_hash_with_group_id, "block_hash, group_id"),
    (BlockHashListWithBlockSize, "block_hashes, hash_block_size, target_block_size"),
    (FreeKVCacheBlockQueue, "blocks"),
    (FreeKVCacheBlockQueue.popleft_n, "n"),
    (FreeKVCacheBlockQueue.prepend_n, "blocks"),
    (BlockHashToBlockMap.insert, "key, block"),
    (BlockHashToBlockMap.pop, "key, block_id"),
    (
        BlockPool,
        "num_gpu_blocks, enable_caching, hash_block_size, enable_kv_cache_events=False, "
        "metrics_collector=None",
    ),
    (BlockPool.get_cached_block, "block_hash, kv_cache_group_ids"),
    (
        BlockPool.cache_full_blocks,
        "request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, "
        "block_mask=None",
    ),
    (BlockPool.free_blocks, "ordered_blocks, prepend=False"),
    (BlockPool.touch, "blocks"),
    (BlockPool.evict_blocks, "block_ids"),
    (get_kv_cache_configs, "vllm_config, kv_cache_specs, available_memory"),
    (estimate_max_model_len, "vllm_config, kv_cache_spec, available_memory"),
    (get_max_concurrency_for_kv_cache_config, "vllm_config, kv_cache_config"),
    (resolve_kv_cache_block_sizes, "kv_cache_config, vllm_config"),
    (
        add_kv_sharing_layers_to_kv_cache_groups,
        "shared_kv_cache_layers, kv_cache_groups, runner_only_attn_layers=None",
    ),
    (get_manager_for_kv_cache_spec, "kv_cache_spec, max_num_batched_tokens, max_model_len"),
    (
        get_kv_cache_coordinator,
        "kv_cache_config, max_model_len, max_num_batched_tokens, use_eagle, enable_caching, "
        "enable_kv_cache_events, dcp_world_size, pcp_world_size, scheduler_block_size, "
        "hash_block_size, metrics_collector=None",
    ),
    (
        KVCacheManager,
        "kv_cache_config, max_model_len, scheduler_block_size, hash_block_size, "
        "max_num_batched_tokens=None, enable_caching=True, use_eagle=False, log_stats=False, "
        "enable_kv_cache_events=False, dcp_world_size=1, pcp_world_size=1, "
        "metrics_collector=None",
    ),
    (
        KVCacheManager.allocate_slots,
        "request, num_new_tokens, num_new_computed_tokens=0, new_computed_blocks=None, "
        "num_lookahead_tokens=0, num_external_computed_tokens=0, delay_cache_blocks=False, "
        "num_encoder_tokens=0, full_sequence_must_fit=False, reserved_blocks=0",
    ),
    (KVCacheBlocks, "blocks"),
    (KVCacheBlocks.get_block_ids, "allow_none=False"),
    (KVCacheTensor, "size, shared_by"),
    (KVCacheGroupSpec, "layer_names, kv_cache_spec, is_eagle_group=False"),
    (KVCacheConfig, "num_blocks, kv_cache_tensors, kv_cache_groups"),
    (
        MambaSpec,
        "block_size, shapes, dtypes, page_size_padded=None, mamba_type='mamba2', "
        "mamba_cache_mode='none', num_speculative_blocks=0",
    ),
    (
        Request,
        "request_id, prompt_token_ids, sampling_params, pooling_params=None, client_index=0, "
        "arrival_time=None, prompt_embeds=None, prompt_is_token_ids=None, mm_features=None, "
        "lora_request=None, cache_salt=None, priority=0, trace_headers=None, "
        "block_hasher=None, resumable=False, reasoning_ended=None, "
        "reasoning_parser_kwargs=None, abort_immediately=False",
    ),
    (EncoderCacheManager, "cache_size"),
    (EncoderDecoderCacheManager, "cache_size"),
    (
        EncoderCacheManager.can_allocate,
        "request, input_id, encoder_compute_budget, num_embeds_to_schedule",
    ),
    (
        NewRequestData,
        "req_id, prompt_token_ids, mm_features, sampling_params, pooling_params, block_ids, "
        "num_computed_tokens, lora_request, prompt_embeds=None, prompt_is_token_ids=None, "
        "prefill_token_ids=None",
    ),
    (
        CachedRequestData,
        "req_ids, resumed_req_ids, new_token_ids, all_token_ids, new_block_ids, "
        "num_computed_tokens, num_output_tokens",
    ),
    (
        SchedulerOutput,
        "scheduled_new_reqs, scheduled_cached_reqs, num_scheduled_tokens, "
        "total_num_scheduled_tokens, scheduled_spec_decode_tokens, scheduled_encoder_inputs, "
        "num_common_prefix_blocks, finished_req_ids, free_encoder_mm_hashes, "
        "preempted_req_ids=None, has_structured_output_requests=False, "
        "pending_structured_output_tokens=False, num_invalid_spec_tokens=None, "
        "kv_connector_metadata=None, ec_connector_metadata=None, new_block_ids_to_zero=None",
    ),
    (ModelRunnerOutput, "req_ids, req_id_to_index"),
    (
        KVConnectorOutput,
        "finished_sending=None, finished_recving=None, kv_connector_stats=None, "
        "kv_cache_events=None, kv_connector_worker_meta=None",
    ),
]
for _manager in MANAGERS:
    SIGNATURES += [
        (
            _manager,
            "kv_cache_spec, block_pool, enable_caching, kv_cache_group_id, "
            "scheduler_block_size, dcp_world_size=1, pcp_world_size=1, "
            "max_admission_blocks_per_request=None",
        ),
        (
            _manager.get_num_blocks_to_allocate,
            "request_id, num_tokens, new_computed_blocks, total_computed_tokens, "
            "num_tokens_main_model, apply_admission_cap=False",
        ),
        (
            _manager.allocate_new_computed_blocks,
            "request_id, new_computed_blocks, num_local_computed_tokens, "
            "num_external_computed_tokens",
        ),
        (_manager.allocate_new_blocks, "request_id, num_tokens, num_tokens_main_model"),
        (_manager.cache_blocks, "request, num_tokens, retention_interval=None"),
        (
            _manager.reachable_block_mask,
            "start_block, end_block, alignment_tokens, kv_cache_spec, use_eagle, "
            "retention_interval=None, num_prompt_tokens=None",
        ),
        (_manager.remove_skipped_blocks, "request_id, total_computed_tokens"),
        (
            _manager.find_longest_cache_hit,
            "block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, "
            "drop_eagle_block, alignment_tokens, dcp_world_size=1, pcp_world_size=1",
        ),
    ]
for _coordinator in COORDINATORS:
    SIGNATURES += [
        (
            _coordinator.get_num_blocks_to_allocate,
            "request_id, num_tokens, new_computed_blocks, num_encoder_tokens, "
            "total_computed_tokens, num_tokens_main_model, apply_admission_cap=False",
        ),
        (
            _coordinator.allocate_new_blocks,
            "request_id, num_tokens, num_tokens_main_model, num_encoder_tokens=0",
        ),
        (_coordinator.cache_blocks, "request, num_computed_tokens"),
        (_coordinator.find_longest_cache_hit, "block_hashes, max_cache_hit_length"),
    ]
for _scheduler in (Scheduler, AsyncScheduler):
    SIGNATURES += [
        (
            _scheduler,
            "vllm_config, kv_cache_config, structured_output_manager, block_size, "
            "hash_block_size=None, mm_registry=None, include_finished_set=False, "
            "log_stats=False",
        ),
        (_scheduler.update_from_output, "scheduler_output, model_runner_output"),
        (_scheduler.finish_requests, "request_ids, finished_status"),
        (_scheduler.reset_prefix_cache, "reset_running_requests=False, reset_connector=False"),
    ]


def _describe(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    return f"{parameter.name}={parameter.default!r}"


@pytest.mark.parametrize(
    ("target", "expected"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", "")
)
def test_signature(target: Callable[..., Any], expected: str) -> None:
    parameters = [
        parameter
        for parameter in inspect.signature(target).parameters.values()
        if parameter.name not in ("self", "cls") and parameter.kind is not parameter.VAR_KEYWORD
    ]
    names = expected.split(", ")
    assert [_describe(parameter) for parameter in parameters[: len(names)]] == names
    for parameter in parameters[: len(names)]:
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    for parameter in parameters[len(names) :]:
        assert parameter.default is not inspect.Parameter.empty, parameter.name
