"""Real ranks in processes: the tokens of one process; a rank that dies or hangs ends them all."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.cachelab.twin.recorded_run import compare_told
from tests.model_executor.models.decoder.checkpoints import (
    VOCAB_SIZE,
    write_checkpoint,
    write_model,
)
from tests.model_executor.models.decoder.drafting import DRAFTING_MODELS, write_drafting_model
from tests.model_executor.models.decoder.reference import (
    gemma4_moe,
    glm5_next,
    kimi_linear,
    qwen3_5,
)
from tests.model_executor.models.decoder.test_gated_delta import OTHERS
from tests.model_executor.models.hf_reference import random_tokens
from tests.tokenizers.family_tokenizers import byte_level
from tests.v1.executor.rank_engines import LentRanks, run_engine
from vllm.cachelab.twin.rebuild import check_rebuilt, environment_of, settings_of
from vllm.cachelab.twin.trace_file import read_trace
from vllm.exceptions import ConfigError, EngineDeadError
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.messages import (
    BeginStep,
    Failure,
    Order,
    RunStep,
    TakeStep,
    rebuild_failure,
)
from vllm.v1.executor.process_ranks import ProcessRanks

pytestmark = pytest.mark.slow

_MTP = {"method": "mtp", "num_speculative_tokens": 2}
# Longer than any step here takes on a busy machine.
_TIMEOUT_S = 120.0


@pytest.fixture(autouse=True)
def _one_process_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_NATIVE", "0")
    monkeypatch.setenv("VLLM_ASCEND_REFERENCE", "0")
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessRanks]:
    """Two ranks that every test here uses; the last one ends them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_ASCEND_REFERENCE", "0")
        processes = ProcessRanks(2, _TIMEOUT_S)
    yield processes
    processes.close()


@pytest.fixture
def lend(ranks: ProcessRanks, tmp_path: Path) -> Callable[[], LentRanks]:
    """Lend the ranks out."""
    taken = iter(range(100))
    return lambda: LentRanks(ranks, tmp_path / f"meeting{next(taken)}")


def _check(lend: Callable[[], LentRanks], vocab_size: int, **arguments: Any) -> None:
    """Compare two ranks, with and without whole experts, with one process."""
    long = random_tokens(200, 5, vocab_size)
    prompts = [long, [*long, 7, 9], long[:150], random_tokens(5, 6, vocab_size)]
    spread = arguments.pop("spread", False)
    arguments |= {"kv_cache_memory_bytes": 8 << 20, "max_model_len": 1024, "block_size": 32}
    expected, hits = run_engine(prompts, **arguments)
    assert hits[1] >= 96
    for enable_expert_parallel in {False, spread}:
        found = run_engine(
            prompts, lend(), enable_expert_parallel=enable_expert_parallel, **arguments
        )
        assert found == (expected, hits)


def test_deepseek_v4(lend: Callable[[], LentRanks]) -> None:
    _check(lend, 500, model="deepseek-v4", speculative_config=_MTP, spread=True)


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen3-moe"])
def test_decoders(family: str, lend: Callable[[], LentRanks], tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path / "checkpoint")
    model = str(tmp_path / "checkpoint")
    _check(lend, VOCAB_SIZE, model=model, spread=family == "qwen3-moe")


def test_experts_beside_the_mlp(lend: Callable[[], LentRanks], tmp_path: Path) -> None:
    # One product for keys and values, of fewer heads than ranks in full layers.
    raw = gemma4_moe(vocab_size=VOCAB_SIZE)
    write_model(raw, tmp_path / "checkpoint", byte_level())
    _check(lend, VOCAB_SIZE, model=str(tmp_path / "checkpoint"), spread=True)


RECURRENT = {
    "qwen 3.5": qwen3_5(vocab_size=VOCAB_SIZE),
    "qwen3-next": {**OTHERS["qwen3-next"], "vocab_size": VOCAB_SIZE},
    "kimi": kimi_linear(vocab_size=VOCAB_SIZE),
    "glm": glm5_next(vocab_size=VOCAB_SIZE),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str, lend: Callable[[], LentRanks], tmp_path: Path) -> None:
    """With drafts of their own block where they have one."""
    folder = tmp_path / "checkpoint"
    drafts: dict[str, Any] = {}
    if name in DRAFTING_MODELS:
        write_drafting_model(name, folder)
        drafts = {"speculative_config": _MTP}
    else:
        write_model(RECURRENT[name], folder, byte_level())
    _check(lend, VOCAB_SIZE, model=str(folder), spread=name == "kimi", **drafts)


def test_a_step_is_begun_before_the_last_ones_tokens_are_taken(
    lend: Callable[[], LentRanks], tmp_path: Path
) -> None:
    write_checkpoint("qwen3-moe", tmp_path / "checkpoint")
    long = random_tokens(70, 5, VOCAB_SIZE)
    prompts = [long, [*long, 7, 9], random_tokens(5, 6, VOCAB_SIZE)]
    arguments: dict[str, Any] = {
        "model": str(tmp_path / "checkpoint"),
        "kv_cache_memory_bytes": 8 << 20,
        "max_model_len": 128,
        "max_num_batched_tokens": 32,
        "block_size": 16,
    }
    expected = run_engine(prompts, **arguments)
    assert expected[1][1] == 64
    for together in (False, True):
        ranks, kinds = lend(), []
        order = ranks.order

        def note(orders: Sequence[Order], kinds: Any = kinds, order: Any = order) -> list[Any]:
            kinds.append(type(orders[0]))
            return order(orders)  # type: ignore[no-any-return]

        ranks.order = note  # type: ignore[method-assign]
        found = run_engine(prompts, ranks, together=together, async_scheduling=True, **arguments)
        assert found[0] == expected[0]
        if not together:
            assert found[1] == expected[1]
        assert RunStep not in kinds
        steps = [kind for kind in kinds if kind in (BeginStep, TakeStep)]
        # The engine may end with the last step begun, which nobody waits for.
        assert steps.count(BeginStep) - steps.count(TakeStep) in (0, 1)
        # A step is begun beside another one, and never a third.
        assert (BeginStep, BeginStep) in pairwise(steps)
        assert (BeginStep, BeginStep, BeginStep) not in zip(
            steps, steps[1:], steps[2:], strict=False
        )


def test_an_error_keeps_its_class() -> None:
    error = rebuild_failure(1, Failure("ConfigError", "--block-size 48 is wrong."))
    assert isinstance(error, ConfigError)
    assert str(error) == "--block-size 48 is wrong."
    assert str(rebuild_failure(1, Failure("EngineError", "KeyError: 3"))) == "rank 1: KeyError: 3"


@pytest.mark.parametrize("name", ["deepseek-v4", "qwen 3.5"])
def test_a_tier_of_two_ranks(name: str, lend: Callable[[], LentRanks], tmp_path: Path) -> None:
    """Each rank writes its rows, an object is there when both have; a record's twin agrees."""
    model = name
    if name in RECURRENT:
        model = str(tmp_path / "checkpoint")
        write_model(RECURRENT[name], Path(model), byte_level())
    prompts = [random_tokens(length, length, VOCAB_SIZE) for length in (300, 150)]
    arguments: dict[str, Any] = {"model": model, "kv_cache_memory_bytes": 8 << 20}
    arguments |= {"max_model_len": 1024, "block_size": 32}
    expected, _ = run_engine(prompts, **arguments)
    tier = {"type": "fs", "root_dir": str(tmp_path / "cache"), "max_size": "64MiB"}
    extra = {"secondary_tiers": [tier], "cpu_bytes_to_use": "16MiB", "always_restore": True}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    transfer |= {"kv_connector_extra_config": {**extra, "warm": 0}}
    record = tmp_path / "record"
    arguments |= {"kv_transfer_config": transfer, "cache_trace": str(record)}
    for hits in ([0, 0], [288 if name in RECURRENT else 256, 128]):
        found = run_engine(prompts, lend(), **arguments)
        assert found == (expected, hits)
        trace = read_trace(record, is_strict=True)
        with environment_of(trace.header):
            check_rebuilt(trace.header, settings_of(trace.header))
        sums = compare_told(trace)
        assert sums.get("disk", 0) == sum(hits)
    assert len(list((tmp_path / "cache").glob("*/rows.*"))) == 2


def test_a_rank_that_hangs_is_named_and_all_end(ranks: ProcessRanks) -> None:
    # The last test here: it ends the ranks, whose workers the tests before have left.
    step = RunStep(SchedulerOutput.make_empty())
    assert ranks.order([step, step])[1] is None
    assert ranks.find_fault() is None
    pids = ranks.pids
    os.kill(pids[1], signal.SIGSTOP)
    ranks.timeout_s = 4.0
    with pytest.raises(EngineDeadError, match="rank 1 gave no sign of life for 3 s"):
        ranks.order([step, step])
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
