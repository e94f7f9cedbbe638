"""Real engines: who computes window rows again is answered as if nothing had been lost."""

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_checkpoint import make_tensors, tiny_config, write_checkpoint
from tests.v1.core.unit_cache_driver import coordinator_of
from tests.v1.spec_decode.tiny_engine import NOISE, Answer, Session, mtp
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor

pytestmark = pytest.mark.slow

WINDOW = 16
# Three layers and the drafter's.
SPAN = 4 * (WINDOW - 1) + 1
MARGIN = 1e-4
RAW = tiny_config(sliding_window=WINDOW)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short_windows")
    write_checkpoint(folder, RAW, make_tensors(RAW, noise=NOISE, mtp_noise=NOISE))
    return folder


def make_core(
    folder: Path, drafts: dict[str, Any] | None, *, budget: int, num_blocks: int, caching: bool
) -> EngineCore:
    config = VllmConfig(
        model_config=ModelConfig("tiny", path=str(folder), hf_config=RAW, max_model_len=900),
        cache_config=CacheConfig(
            block_size=32, num_gpu_blocks_override=num_blocks, enable_prefix_caching=caching
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=900, max_num_batched_tokens=budget, max_num_seqs=8
        ),
        speculative_config=SpeculativeConfig.from_dict(drafts) if drafts else None,
    )
    return EngineCore(config, UniProcExecutor)


def count_compared(expected: Answer, actual: Answer) -> int:
    """Check two answers up to the first near-tie; return how many tokens that were."""
    for i, (want, margin) in enumerate(zip(expected.tokens, expected.margins, strict=True)):
        if margin < MARGIN:
            return i
        assert actual.tokens[i] == want, f"token {i}: {actual.tokens[i]} != {want}, {margin=}"
    assert len(actual.tokens) == len(expected.tokens)
    return len(expected.tokens)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)


def lose_checkpoints(session: Session) -> None:
    """Take all checkpoints away, wherever a step left one; dense rows stay."""
    coordinator = coordinator_of(session.core.scheduler.kv_cache_manager)
    for record in list(coordinator.index.checkpoints.values()):
        coordinator.store.dissolve(record)


def serve_alone(folder: Path, session: Session) -> list[Answer]:
    """Answer all prompts of a session one by one, without a cache."""
    alone = Session(make_core(folder, None, budget=900, num_blocks=800, caching=False))
    return [alone.serve(a.prompt, a.params) for a in session.answers.values()]


@pytest.mark.parametrize("drafts", [None, mtp(3)], ids=["plain", "drafts"])
@pytest.mark.parametrize("budget", [40, 512], ids=["chunked", "whole"])
def test_same_answers(
    checkpoint: Path,
    drafts: dict[str, Any] | None,
    budget: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    session = Session(make_core(checkpoint, drafts, budget=budget, num_blocks=800, caching=True))
    rng = random.Random(budget)
    shared = [rng.randrange(3, 260) for _ in range(620)]
    session.serve([*shared, 7, 8, 9], greedy(4))
    lose_checkpoints(session)
    # Parts where there is no checkpoint; dense rows reach up to there.
    cuts = [330, 500, 399, 257]
    for cut in cuts:
        session.add([*shared[:cut], *[rng.randrange(3, 260) for _ in range(70)]], greedy(24))
    session.run()
    rebuilt = [a.miss_tokens.get("window_rebuilt", 0) for a in session.answers.values()][1:]
    assert sum(count > 0 for count in rebuilt) >= 2
    assert {count for count in rebuilt if count} == {-(-SPAN // 32) * 32}
    expected = serve_alone(checkpoint, session)
    compared = sum(map(count_compared, expected, session.answers.values()))
    assert compared >= 0.7 * sum(len(a.tokens) for a in expected)
