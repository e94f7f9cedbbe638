"""UniProcExecutor over the real worker and model, with dummy weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm.config import (
    CacheConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.exceptions import ConfigError, EngineError, UnsupportedModelError
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.values.cache_step import WindowTable
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor


@pytest.fixture(autouse=True)
def _keep_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def make_config(*, block_size: int = 32, cache_dtype: str = "auto", **others: Any) -> VllmConfig:
    checkpoint = resolve_checkpoint("deepseek-v4")
    return VllmConfig(
        model_config=ModelConfig(
            "deepseek-v4", path=checkpoint.path, hf_config=read_hf_config(checkpoint.path)
        ),
        cache_config=CacheConfig(
            block_size=block_size, cache_dtype=cache_dtype, kv_cache_memory_bytes=32 << 20
        ),
        load_config=LoadConfig("dummy"),
        **others,
    )


def start(config: VllmConfig) -> UniProcExecutor:
    executor = UniProcExecutor(config, CpuPlatform())
    specs = executor.get_kv_cache_specs()
    memory = executor.determine_available_memory()
    assert memory == [32 << 20]
    executor.initialize_from_config(get_kv_cache_configs(config, specs, memory))
    return executor


def window_table(group_id: int, num_tokens: int, block_size: int, first_id: int) -> WindowTable:
    count = -(-num_tokens // block_size)
    return WindowTable(group_id, 0, list(range(first_id, first_id + count)))


def one_prompt(executor: UniProcExecutor, num_tokens: int, chunk: int) -> list[list[int]]:
    """Serve one greedy request by hand: the first token, then two decode steps."""
    config = executor.get_kv_cache_specs()
    assert config
    prompt = [(7 * i) % 501 for i in range(num_tokens)]
    params = SamplingParams(temperature=0.0)
    total = num_tokens + 2
    tables = (
        window_table(2, total, 32, 20),
        window_table(3, total, 32, 40),
        window_table(4, total, 2, 100),
        window_table(5, total, 8, 60),
    )
    dense = (list(range(1, 4)), [4])
    sampled = []
    computed = 0
    while computed < total:
        num_new = min(chunk, num_tokens - computed) if computed < num_tokens else 1
        out = SchedulerOutput.make_empty()
        if computed == 0:
            blocks = (*dense, [], [], [], [])
            out.scheduled_new_reqs = [
                NewRequestData("r", prompt, [], params, None, blocks, 0, None)
            ]
            out.window_tables = {"r": tables}
        else:
            cached = out.scheduled_cached_reqs
            cached.req_ids.append("r")
            cached.new_token_ids.append([])
            cached.new_block_ids.append(None)
            cached.num_computed_tokens.append(computed)
            cached.num_output_tokens.append(max(0, computed - num_tokens + 1))
        out.num_scheduled_tokens = {"r": num_new}
        out.total_num_scheduled_tokens = num_new
        sampled += executor.execute_model(out).sampled_token_ids
        computed += num_new
    return [tokens for tokens in sampled if tokens]


@pytest.mark.slow
def test_serves_a_prompt_the_same_in_any_chunks() -> None:
    executor: Executor = start(make_config())
    assert isinstance(executor, UniProcExecutor)
    whole = one_prompt(executor, 150, 150)
    assert [len(tokens) for tokens in whole] == [1, 1, 1]
    assert one_prompt(executor, 150, 64) == whole
    assert one_prompt(executor, 150, 33) == whole
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineError):
        executor.execute_model(SchedulerOutput.make_empty())


@pytest.mark.slow
def test_steps_before_the_kv_cache_are_an_error() -> None:
    executor = UniProcExecutor(make_config(), CpuPlatform())
    with pytest.raises(EngineError, match="initialize_from_config"):
        executor.execute_model(SchedulerOutput.make_empty())


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"block_size": 48}, "--block-size 48"), ({"cache_dtype": "fp8"}, "'fp8'")],
)
def test_a_bad_cache_shows_before_weights_load(changes: dict, message: str) -> None:
    config = make_config(**changes)
    config.model_config.path = "/nowhere"
    config.load_config = LoadConfig("auto")
    with pytest.raises(ConfigError, match=message):
        UniProcExecutor(config, CpuPlatform())


class DeviceWithMemory(CpuPlatform):
    """A platform that, as some do, knows its memory only once a device is in use."""

    def __init__(self) -> None:
        self._is_in_use = False

    def make_device(self, local_rank: int) -> torch.device:
        self._is_in_use = True
        return super().make_device(local_rank)

    def total_memory_bytes(self) -> int:
        assert self._is_in_use, "make_device comes first"
        return 1 << 30


def test_specs_are_checked_with_the_device_in_use_and_before_weights_load() -> None:
    config = make_config()
    config.model_config.path = "/nowhere"
    config.load_config = LoadConfig("auto")
    platform = DeviceWithMemory()

    def refuse(
        checked: VllmConfig, specs: list[dict[str, Any]], get_total_bytes: Callable[[], int]
    ) -> None:
        (worker_specs,) = specs
        assert "layers.0.attn.window" in worker_specs
        raise ConfigError(f"{get_total_bytes()} bytes will not do.")

    with pytest.raises(ConfigError, match="1073741824 bytes will not do"):
        UniProcExecutor(config, platform, refuse)


def test_more_workers_than_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 workers"):
        UniProcExecutor(make_config(parallel_config=ParallelConfig(tensor_parallel_size=2)))


def test_unknown_architectures_are_refused_by_name() -> None:
    config = make_config()
    config.model_config.hf_config = {"architectures": ["GptForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match="GptForCausalLM"):
        UniProcExecutor(config, CpuPlatform())


@pytest.mark.slow
def test_kv_cache_that_is_not_the_models_is_refused() -> None:
    config = make_config()
    executor = UniProcExecutor(config, CpuPlatform())
    specs = executor.get_kv_cache_specs()
    specs[0].pop("layers.0.attn.window")
    with pytest.raises(ConfigError, match=r"1 missing: layers\.0\.attn\.window"):
        executor.initialize_from_config(get_kv_cache_configs(config, specs, [32 << 20]))


@pytest.mark.slow
def test_bf16_weights_and_cache_run() -> None:
    config = make_config(cache_dtype="bfloat16")
    config.model_config.dtype = "bfloat16"
    executor = start(config)
    assert len(one_prompt(executor, 40, 40)) == 3
    specs = executor.get_kv_cache_specs()[0]
    assert specs["layers.0.attn.window"].dtype is torch.bfloat16


@pytest.mark.slow
def test_a_drafter_drafts_once_a_step() -> None:
    executor = start(make_config(speculative_config=SpeculativeConfig("mtp", 1, method="mtp")))
    one_prompt(executor, 20, 20)
    drafts = executor.take_draft_token_ids()
    assert drafts is not None
    assert [len(tokens) for tokens in drafts.draft_token_ids] == [1]
    assert executor.take_draft_token_ids() is None
