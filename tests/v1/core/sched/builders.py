"""Schedulers and requests for tests: real configuration, real KV managers, no model."""

from collections.abc import Sequence
from typing import Any

from tests.v1.core.specs import full, swa
from tests.v1.core.v4_geometry import v4_config
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

EOS = 50256
BLOCK_SIZE = 16

init_none_hash(sha256)


def full_config(num_blocks: int, block_size: int = BLOCK_SIZE) -> KVCacheConfig:
    """One full-attention group."""
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], full(block_size=block_size))])


def hybrid_config(num_blocks: int, block_size: int = BLOCK_SIZE) -> KVCacheConfig:
    """A full-attention group and a sliding window of two blocks."""
    return KVCacheConfig(
        num_blocks,
        [],
        [
            KVCacheGroupSpec(["full"], full(block_size=block_size)),
            KVCacheGroupSpec(["window"], swa(block_size=block_size, sliding_window=2 * block_size)),
        ],
    )


def make_scheduler(
    *,
    num_blocks: int = 1000,
    kv_cache_config: KVCacheConfig | None = None,
    block_size: int = BLOCK_SIZE,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 8192,
    max_model_len: int = 8192,
    enable_prefix_caching: bool = True,
    policy: str = "fcfs",
    num_speculative_tokens: int | None = None,
    kv_transfer_config: KVTransferConfig | None = None,
    parallel_config: ParallelConfig | None = None,
    use_async: bool = False,
    include_finished_set: bool = False,
    log_stats: bool = True,
    cls: type[Scheduler] | None = None,
    **scheduler_fields: Any,
) -> Scheduler:
    """Build a scheduler; ``scheduler_fields`` are further fields of SchedulerConfig."""
    config = kv_cache_config or full_config(num_blocks, block_size)
    speculative = None
    if num_speculative_tokens is not None:
        speculative = SpeculativeConfig(
            model="ngram", num_speculative_tokens=num_speculative_tokens
        )
    vllm_config = VllmConfig(
        model_config=ModelConfig("test", max_model_len=max_model_len, skip_tokenizer_init=True),
        cache_config=CacheConfig(
            block_size=block_size, enable_prefix_caching=enable_prefix_caching
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
            async_scheduling=use_async,
            **scheduler_fields,
        ),
        speculative_config=speculative,
        kv_transfer_config=kv_transfer_config,
        parallel_config=parallel_config or ParallelConfig(),
    )
    register_all_kvcache_specs(vllm_config)
    scheduler_class = cls or (AsyncScheduler if use_async else Scheduler)
    return scheduler_class(
        vllm_config=vllm_config,
        kv_cache_config=config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size,
        include_finished_set=include_finished_set,
        log_stats=log_stats,
    )


def make_v4_scheduler(num_blocks: int, unit: int = 32, **kwargs: Any) -> Scheduler:
    """A scheduler over DeepSeek-V4's groups that hits at one unit."""
    config = v4_config(unit, num_blocks)
    return make_scheduler(kv_cache_config=config, block_size=unit, **kwargs)


def make_request(
    request_id: str,
    prompt: Sequence[int] | int,
    max_tokens: int = 16,
    *,
    block_size: int = BLOCK_SIZE,
    params: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Request:
    """Build a request; a prompt given as a number has that many tokens of its own.

    Args:
        request_id: Its id.
        prompt: The tokens, or how many.
        max_tokens: Output tokens at most.
        block_size: Tokens under one hash.
        params: Further fields of SamplingParams.
        **kwargs: Further arguments of Request.
    """
    if isinstance(prompt, int):
        seed = sum(map(ord, request_id)) * 1000
        prompt = [seed + i for i in range(prompt)]
    sampling = SamplingParams(max_tokens=max_tokens, **(params or {}))
    sampling.update_from_generation_config({}, EOS)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=get_request_block_hasher(block_size, sha256),
        **kwargs,
    )


def answer(output: SchedulerOutput, tokens: dict[str, list[int]]) -> ModelRunnerOutput:
    """A step's result with the given tokens; requests not named get none."""
    req_ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
        sampled_token_ids=[tokens.get(req_id, []) for req_id in req_ids],
    )


def outputs_by_request(bundles: dict[int, Any]) -> dict[str, EngineCoreOutput]:
    """Return the outputs of all clients by request id."""
    return {output.request_id: output for b in bundles.values() for output in b.outputs}


def step(scheduler: Scheduler, executor: Any) -> dict[str, EngineCoreOutput]:
    """Schedule, run and update once."""
    output = scheduler.schedule()
    return outputs_by_request(scheduler.update_from_output(output, executor.execute(output)))


def run_all(scheduler: Scheduler, executor: Any, max_steps: int = 5000) -> dict[str, list[int]]:
    """Step until everything has finished; returns the tokens delivered by request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not scheduler.has_requests():
            return tokens
        for request_id, output in step(scheduler, executor).items():
            tokens.setdefault(request_id, []).extend(output.new_token_ids)
    raise AssertionError(f"not finished: {scheduler.running}, {list(scheduler.waiting)}")


def all_blocks_free(scheduler: Scheduler) -> bool:
    """Whether nobody holds a block (copies of the last step let go first)."""
    scheduler.kv_cache_manager.new_step_starts()
    pool = scheduler.kv_cache_manager.block_pool
    return bool(pool.get_num_free_blocks() == pool.num_gpu_blocks - 1)
