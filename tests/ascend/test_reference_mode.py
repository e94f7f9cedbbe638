"""Reference mode end to end: the embedded checkpoint, in process, beside the CPU platform."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ascend.rounding import round_index_key, round_int8_key, round_key
from tests.v1.engine.test_cache_keeps_outputs import (
    Session,
    count_compared,
    drive,
    random_tokens,
)
from tests.v1.engine.test_cache_keeps_outputs import make_core as make_embedded_core
from vllm import platforms
from vllm.config import KVTransferConfig, SpeculativeConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform
from vllm.v1.core.kv_cache_coordinator import CheckpointCoordinator
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.worker import Worker
from vllm_ascend.core.geometry import Generation
from vllm_ascend.core.kv_cache_coordinator import AscendHybridKVCacheCoordinator
from vllm_ascend.core.specs import CompressAttentionSpec
from vllm_ascend.platform import ReferencePlatform

NUM_BLOCKS = 400


def make_core(platform: Platform, unit: int = 32, **kwargs: Any) -> EngineCore:
    """Build an engine whose process runs on a platform: the worker, and what is asked of it."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(platforms, "current_platform", platform, raising=False)
        return make_embedded_core(
            unit, num_blocks=NUM_BLOCKS, budget=256, platform=platform, **kwargs
        )


def run_alone(core: EngineCore, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    """Return the answer and the hit tokens."""
    session = Session(core)
    # Request ids restart with each session; the engine has forgotten the last one's.
    request = session.add(prompt, num_tokens)
    session.run()
    stats = session.answers[request].stats
    assert stats is not None
    return session.answers[request].tokens, stats.num_cached_tokens


class A5Reference(ReferencePlatform):
    """Reference mode standing for an A5."""

    def generation(self) -> Generation:
        return Generation.A5


def drive_all(
    platforms: Mapping[Platform, str], unit: int = 32, seed: int = 4, first_len: int = 400
) -> list[Session]:
    """Run the same traffic on each platform, with its cache dtype."""
    sessions = []
    for platform, cache_dtype in platforms.items():
        session = Session(make_core(platform, unit, cache_dtype=cache_dtype))
        drive(session, random.Random(seed), 10, first_len + 100, first_len)
        sessions.append(session)
    return sessions


def share_compared(expected: Session, actual: Session) -> float:
    """Check that two runs say the same; the share of tokens that no near-tie left out."""
    assert expected.prompts == actual.prompts
    compared = sum(
        count_compared(expected.answers[name], answer) for name, answer in actual.answers.items()
    )
    return compared / sum(len(answer.tokens) for answer in expected.answers.values())


@pytest.mark.slow
@pytest.mark.parametrize("unit", [32, 128])
def test_fp32_pages_say_what_the_cpu_says(unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    expected, actual = drive_all({CpuPlatform(): "auto", ReferencePlatform(): "auto"}, unit)
    groups = actual.core.scheduler.kv_cache_config.kv_cache_groups
    assert any(isinstance(group.kv_cache_spec, CompressAttentionSpec) for group in groups)
    for session, own in (
        (expected, CheckpointCoordinator),
        (actual, AscendHybridKVCacheCoordinator),
    ):
        assert type(session.core.scheduler.kv_cache_manager.coordinator) is own
    assert share_compared(expected, actual) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("unit", [32, 64, 128])
@pytest.mark.parametrize(
    ("platform", "cache_dtype"),
    [(ReferencePlatform(), "auto"), (ReferencePlatform(), "bfloat16"), (A5Reference(), "fp8")],
    ids=["fp32", "A3", "A5"],
)
def test_hits_at_one_unit(unit: int, platform: Platform, cache_dtype: str) -> None:
    """Prompts of one unit and a token hit that unit, in fp32 and in the devices' pages."""
    core = make_core(platform, unit, cache_dtype=cache_dtype)
    prompt = random_tokens(random.Random(unit), unit + 1)
    first, no_hit = run_alone(core, prompt, 8)
    again, hit = run_alone(core, prompt, 8)
    assert (no_hit, hit) == (0, unit)
    assert first == again
    core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "cache_dtype"),
    [(ReferencePlatform(), "bfloat16"), (A5Reference(), "fp8")],
    ids=["A3", "A5"],
)
def test_drafts_change_nothing_in_the_devices_pages(platform: Platform, cache_dtype: str) -> None:
    """The MTP block's window rows are quantised too; hits with it are at one unit."""
    drafting = SpeculativeConfig.from_dict({"method": "mtp", "num_speculative_tokens": 1})
    plain = make_core(platform, cache_dtype=cache_dtype)
    drafted = make_core(platform, cache_dtype=cache_dtype, speculative=drafting)
    rng = random.Random(5)
    for length in (33, 200, 450):
        prompt = random_tokens(rng, length)
        expected, _ = run_alone(plain, prompt, 12)
        for num_hit in (0, (length - 1) // 32 * 32):
            assert run_alone(drafted, prompt, 12) == (expected, num_hit)
    plain.shutdown()
    drafted.shutdown()


Rounding = Callable[[torch.Tensor], torch.Tensor]
# Of the embedded model: no compressor row is as narrow.
KEY_WIDTH, ROPE_WIDTH, INDEX_WIDTH = 64, 16, 32


class FloatIndexWorker(Worker):
    """The core's worker with fp32 pages for index keys, so that rounded ones are kept exactly."""

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {
            name: replace(spec, dtype=torch.float32) if name.endswith(".indexer") else spec
            for name, spec in super().get_kv_cache_specs().items()
        }


class RoundingCpu(CpuPlatform):
    """The CPU platform; rows of some widths are rounded, number by number, before they are kept.

    Args:
        roundings: From the width of a row to what rounds it; other rows are kept as they are.
    """

    worker_class_path = f"{__name__}.FloatIndexWorker"

    def __init__(self, roundings: Mapping[int, Rounding]) -> None:
        self._roundings = roundings

    def _round(self, cache: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rounding = self._roundings.get(cache.shape[-1])
        if rounding is None or not len(values):
            return values
        assert cache.dtype is torch.float32, "the pages must keep what was rounded"
        return rounding(values).to(values.dtype)

    def get_op(self, name: str) -> Callable[..., Any]:
        op = super().get_op(name)
        if name == "round_rows":
            return lambda cache, values: op(cache, self._round(cache, values))
        if name == "write_rows":
            return lambda cache, blocks, rows, values: op(
                cache, blocks, rows, self._round(cache, values)
            )
        return op


def largest_gap(one: Session, other: Session) -> float:
    """How far two runs' margins between the two best tokens are apart at most."""
    return max(
        abs(a - b)
        for name, answer in one.answers.items()
        for a, b in zip(answer.margins, other.answers[name].margins, strict=True)
    )


@pytest.mark.slow
def test_a3_pages_equal_a_reference_that_rounds_the_same_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured: margins up to 1.3e-3 apart (bf16 flips of other sums), 2e-2 without int8 rounding.

    With this seed no choice of index keys is so close that the order of a processor's sums decides:
    the figures are those of AMX, AVX-512, AVX2 and plain kernels (``ONEDNN_MAX_CPU_ISA``,
    ``ATEN_CPU_CAPABILITY``).
    """
    # The rounding stands in torch ops.
    monkeypatch.setenv("VLLM_NATIVE", "0")
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    platforms = (RoundingCpu({INDEX_WIDTH: round_int8_key}), ReferencePlatform(), CpuPlatform())
    # Index keys choose among rows only where there are more than `index_topk`: past 512 tokens.
    expected, actual, plain = drive_all(dict.fromkeys(platforms, "bfloat16"), seed=2, first_len=900)
    assert share_compared(expected, actual) > 0.9
    assert largest_gap(expected, actual) < 3e-3 < largest_gap(plain, actual)


@pytest.mark.slow
def test_a5_pages_equal_a_reference_that_rounds_the_same_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured: margins 8e-5 apart; without rounding most answers are others."""
    # The rounding stands in torch ops.
    monkeypatch.setenv("VLLM_NATIVE", "0")
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    rounding = RoundingCpu(
        {KEY_WIDTH: partial(round_key, rope_dim=ROPE_WIDTH), INDEX_WIDTH: round_index_key}
    )
    platforms = {rounding: "auto", A5Reference(): "fp8", CpuPlatform(): "auto"}
    expected, actual, plain = drive_all(platforms, seed=6)
    assert share_compared(expected, actual) > 0.9
    assert largest_gap(expected, actual) < 3e-3 < largest_gap(plain, actual)


@pytest.mark.slow
def test_tiers_keep_pages_of_the_device(tmp_path: Path) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path / "cache"), "max_size": "64MiB"}
    extra = {"secondary_tiers": [tier], "cpu_bytes_to_use": "16MiB", "always_restore": True}
    raw = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    raw |= {"kv_connector_extra_config": {**extra, "warm": 0}}
    prompt = random_tokens(random.Random(3), 300)
    answers = []
    for _ in range(2):
        transfer = KVTransferConfig.from_dict(raw)
        core = make_core(ReferencePlatform(), transfer=transfer)
        keeper = core.scheduler.connector._tier.stores.keeper
        while keeper.is_opening:
            core.step()
        answers.append(run_alone(core, prompt, 8))
        # Out of host memory when the pool has forgotten it.
        core.reset_prefix_cache()
        answers.append(run_alone(core, prompt, 8))
        core.shutdown()
    assert [hit for _, hit in answers] == [0, 256, 256, 256]
    assert all(tokens == answers[0][0] for tokens, _ in answers)
