"""Reference mode end to end: the embedded checkpoint, in process, beside the CPU platform."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.v1.engine.test_cache_keeps_outputs import (
    Session,
    count_compared,
    drive,
    random_tokens,
)
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.worker import Worker
from vllm_ascend.core.coordinator import AscendHybridKVCacheCoordinator
from vllm_ascend.envs import COMPRESSED_BLOCK_VARIABLE
from vllm_ascend.ops.pages import dequantise_rows, quantise_rows
from vllm_ascend.platform import ReferencePlatform

MAX_LEN = 1024


def make_core(platform: Platform, unit: int = 32, *, cache_dtype: str = "auto") -> EngineCore:
    checkpoint = resolve_checkpoint("deepseek-v4")
    model = ModelConfig(
        "deepseek-v4",
        path=str(checkpoint.path),
        is_embedded=True,
        hf_config=read_hf_config(checkpoint.path),
        max_model_len=MAX_LEN,
    )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(
            block_size=unit, num_gpu_blocks_override=400, cache_dtype=cache_dtype
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_LEN, max_num_batched_tokens=256, max_num_seqs=16
        ),
    )
    return EngineCore(config, partial(UniProcExecutor, platform=platform))


def run_alone(core: EngineCore, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    """Return the answer and the hit tokens."""
    session = Session(core)
    # Request ids restart with each session; the engine has forgotten the last one's.
    request = session.add(prompt, num_tokens)
    session.run()
    stats = session.answers[request].stats
    assert stats is not None
    return session.answers[request].tokens, stats.num_cached_tokens


@pytest.mark.slow
@pytest.mark.parametrize("unit", [32, 128])
def test_fp32_pages_say_what_the_cpu_says(unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    sessions = []
    for platform in (CpuPlatform(), ReferencePlatform()):
        session = Session(make_core(platform, unit))
        drive(session, random.Random(4), 10, 500)
        sessions.append(session)
    expected, actual = sessions
    is_ascend = isinstance(
        actual.core.scheduler.kv_cache_manager.coordinator, AscendHybridKVCacheCoordinator
    )
    assert is_ascend
    assert expected.prompts == actual.prompts
    compared = sum(
        count_compared(expected.answers[name], answer) for name, answer in actual.answers.items()
    )
    total = sum(len(answer.tokens) for answer in expected.answers.values())
    assert compared > 0.9 * total > 0


@pytest.mark.slow
@pytest.mark.parametrize("unit", [32, 64, 128])
@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16"])
def test_hits_at_one_unit(unit: int, cache_dtype: str) -> None:
    """Prompts of one unit and a token hit that unit, in fp32 and in the device's pages."""
    core = make_core(ReferencePlatform(), unit, cache_dtype=cache_dtype)
    prompt = random_tokens(random.Random(unit), unit + 1)
    first, no_hit = run_alone(core, prompt, 8)
    again, hit = run_alone(core, prompt, 8)
    assert (no_hit, hit) == (0, unit)
    assert first == again
    core.shutdown()


@pytest.mark.slow
def test_the_front_end_and_the_core_see_one_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPRESSED_BLOCK_VARIABLE, "64")
    with pytest.raises(ConfigError, match=f"--block-size 32.*{COMPRESSED_BLOCK_VARIABLE}=64"):
        make_core(ReferencePlatform(), 32)
    core = make_core(ReferencePlatform(), 64)
    assert core.kv_cache_info.block_size == core.kv_cache_info.hit_unit == 64
    core.shutdown()


class RoundingWorker(Worker):
    """The core's worker with fp32 pages for index keys, so that rounded ones are kept exactly."""

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {
            name: replace(spec, dtype=torch.float32) if name.endswith(".indexer") else spec
            for name, spec in super().get_kv_cache_specs().items()
        }


class RoundingCpu(CpuPlatform):
    """The CPU platform, rounding index keys as int8 rows with an fp16 scale would."""

    worker_class_path = f"{__name__}.RoundingWorker"

    def get_op(self, name: str) -> Callable[..., Any]:
        op = super().get_op(name)
        if name != "write_rows":
            return op

        def write_rounded(
            cache: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, values: torch.Tensor
        ) -> None:
            # 32 is the embedded model's index_head_dim; no state row is that narrow.
            if cache.dtype is torch.float32 and cache.shape[-1] == 32:
                values = dequantise_rows(quantise_rows(values), torch.float32)
            op(cache, blocks, rows, values)

        return write_rounded


def largest_gap(one: Session, other: Session) -> float:
    """How far two runs' margins between the two best tokens are apart at most."""
    return max(
        abs(a - b)
        for name, answer in one.answers.items()
        for a, b in zip(answer.margins, other.answers[name].margins, strict=True)
    )


@pytest.mark.slow
def test_device_pages_equal_a_reference_that_rounds_the_same_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured: margins 6e-4 apart (bf16 flips of other sums), 2e-2 without int8 rounding."""
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    sessions = []
    for platform in (RoundingCpu(), ReferencePlatform(), CpuPlatform()):
        session = Session(make_core(platform, cache_dtype="bfloat16"))
        drive(session, random.Random(9), 10, 500)
        sessions.append(session)
    expected, actual, plain = sessions
    compared = sum(
        count_compared(expected.answers[name], answer) for name, answer in actual.answers.items()
    )
    total = sum(len(answer.tokens) for answer in expected.answers.values())
    assert compared > 0.9 * total > 0
    assert largest_gap(expected, actual) < 3e-3 < largest_gap(plain, actual)
