"""A step ahead of the device: answers, hits and what is published are those of step by step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.model_executor.models.hf_reference import random_tokens
from tests.v1.core.sched.builders import answer, make_request, outputs_by_request
from tests.v1.core.sched.test_kv_transfer_updates import connected
from tests.v1.engine.fakes import BegunStep, build_fake_core
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError, EngineError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.client import InlineCore
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.step_ahead import StepAhead
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_offload.worker import OffloadWorker
from vllm.v1.messages import EngineCoreRequest, FinishReason
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm.v1.sample.sampler import DeviceSample
from vllm.v1.worker import step_in_flight
from vllm.v1.worker.step_in_flight import TokenCopy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by family."""
    found = {}
    for family in ("llama", "qwen3.5"):
        found[family] = tmp_path_factory.mktemp(family)
        write_checkpoint(family, found[family])
    return found


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariants are checked in every step, in this process."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")


# Whatever the pool gives up is in host memory, and comes back.
HOST_TIER = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"always_restore": True, "cpu_bytes_to_use": "8MiB"},
}


def run(folder: Path, *, is_ahead: bool, num_blocks: int = 200) -> list[Any]:
    """Returns ids, ends and hits of a mixed batch, and of its answers sent again."""
    prompts = [random_tokens(length, length, VOCAB_SIZE - 60) for length in (5, 35, 20, 33, 7, 40)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=23, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=list(range(0, 200, 3))),
        SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(
            temperature=0.0,
            max_tokens=8,
            structured_outputs=StructuredOutputsParams(regex="[ab]{3}c"),
        ),
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1),
    ]
    found: list[Any] = []
    with LLM(
        model=str(folder),
        block_size=16,
        max_model_len=128,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        num_gpu_blocks_override=num_blocks,
        async_scheduling=is_ahead,
    ) as llm:
        first = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        again = [
            [*prompt, *out.outputs[0].token_ids] for prompt, out in zip(prompts, first, strict=True)
        ]
        second = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in again],
            SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
            use_tqdm=False,
        )
        for out in first:
            answer = out.outputs[0]
            found.append((answer.token_ids, answer.finish_reason, answer.text, answer.logprobs))
        found += [out.prompt_logprobs for out in first]
        found += [(out.outputs[0].token_ids, out.num_cached_tokens) for out in second]
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3.5"])
def test_answers_and_hits_are_the_same(
    family: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(folders[family], is_ahead=False)
    waits: list[int] = []
    wait = TokenCopy.wait

    def count(self: TokenCopy) -> torch.Tensor:
        waits.append(1)
        return wait(self)

    monkeypatch.setattr(step_in_flight.TokenCopy, "wait", count)
    assert run(folders[family], is_ahead=True) == expected
    assert waits, "no step was ahead"


def test_with_too_few_blocks_for_all(folders: dict[str, Path]) -> None:
    # Requests are preempted with tokens in flight.
    one_by_one = run(folders["llama"], is_ahead=False, num_blocks=9)
    assert run(folders["llama"], is_ahead=True, num_blocks=9)[:6] == one_by_one[:6]


def run_pairs(folder: Path, *, is_ahead: bool) -> list[Any]:
    """Returns ids and hits of pairs of prompts, twice, of which the pool holds one pair.

    Some answers end before their last step is over, whose rows then go where others' will be.
    """
    prompts = [
        random_tokens(length, length, VOCAB_SIZE - 60) for length in (35, 40, 33, 45, 50, 38)
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=list(range(0, 200, 3))),
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    ]
    with LLM(
        model=str(folder),
        block_size=16,
        max_model_len=128,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=9,
        async_scheduling=is_ahead,
        kv_transfer_config=HOST_TIER,
    ) as llm:
        outs = [
            out
            for first in (0, 2, 4, 0, 2, 4)
            for out in llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts[first : first + 2]],
                params,
                use_tqdm=False,
            )
        ]
    return [(out.outputs[0].token_ids, out.num_cached_tokens) for out in outs]


def test_what_the_pool_gave_up_comes_back_from_host_memory(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[str] = []
    collect = OffloadWorker.collect

    def count(self: OffloadWorker) -> set[str]:
        received = collect(self)
        restored.extend(received)
        return received

    monkeypatch.setattr(OffloadWorker, "collect", count)
    expected = run_pairs(folders["llama"], is_ahead=False)
    assert [tokens for tokens, _ in expected[:6]] == [tokens for tokens, _ in expected[6:]]
    num_restored = len(restored)
    assert run_pairs(folders["llama"], is_ahead=True) == expected
    assert len(restored) - num_restored == num_restored > 2


def test_an_abort_ends_a_request_with_a_step_in_flight(folders: dict[str, Path]) -> None:
    prompt = random_tokens(35, 35, VOCAB_SIZE - 60)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(
        model=str(folders["llama"]),
        block_size=16,
        max_model_len=128,
        num_gpu_blocks_override=40,
        async_scheduling=True,
    ) as llm:
        expected = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        engine = llm.llm_engine
        engine.add_request("gone", {"prompt_token_ids": prompt}, params)
        for _ in range(4):
            engine.step()
        engine.abort_request(["gone"])
        while engine.has_unfinished_requests():
            engine.step()
        after = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert after[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_an_idle_core_is_idle() -> None:
    config = EngineArgs(async_scheduling=True, kv_cache_memory_bytes=8 << 20).create_vllm_config()
    core = EngineCore(config, UniProcExecutor)
    engine = LLMEngine(config, InlineCore(lambda: core))
    for request_id in ("first", "second"):
        engine.add_request(request_id, "Once", SamplingParams(temperature=0.0, max_tokens=3))
        while engine.has_unfinished_requests():
            engine.step()
        # What is left: the step that was begun behind the last token, and the news of the end.
        for _ in range(4):
            core.step()
        assert not core.has_work()
    engine.shutdown()


def test_drafts_turn_it_off(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    args = EngineArgs(model=str(folders["llama"]), async_scheduling=True, speculative_config=drafts)
    assert not args.create_vllm_config().scheduler_config.async_scheduling
    assert "--async-scheduling is off" in caplog.text
    assert "--speculative-config" in caplog.text


@pytest.mark.parametrize(
    "others",
    [
        {"cache_trace": "trace"},
        {"warm_pull_bytes": 1 << 20},
        {"kv_transfer_config": {"kv_connector": "TcpConnector", "kv_role": "kv_consumer"}},
    ],
)
def test_nothing_else_turns_it_off(others: dict[str, Any], folders: dict[str, Path]) -> None:
    args = EngineArgs(model=str(folders["llama"]), async_scheduling=True, **others)
    assert args.create_vllm_config().scheduler_config.async_scheduling


def test_tokens_wait_until_somebody_asks() -> None:
    sample = DeviceSample(torch.tensor([3, 4]), None)
    assert TokenCopy(sample.token_ids).wait().tolist() == [3, 4]


def serve_until_it_dies(config: Callable[..., VllmConfig], **faults: Any) -> tuple[Any, Any]:
    """Returns what clients got of a long and a short answer, and what the core died of."""
    core = build_fake_core(config(**faults))
    for name, max_tokens in (("long", 50), ("short", 2)):
        params = SamplingParams(max_tokens=max_tokens)
        core.add_request(core.make_request(EngineCoreRequest(name, [1, 2, 3], params, 0.0)))
    told: dict[str, list[Any]] = {"long": [], "short": []}
    try:
        for _ in range(20):
            for output in (o for client in core.step()[0].values() for o in client.outputs):
                told[output.request_id] += [*output.new_token_ids, output.finish_reason]
    except (EngineError, RuntimeError) as error:
        return told, error
    finally:
        core.shutdown()
    raise AssertionError("it does not die")


def test_a_step_that_cannot_begin_takes_nothing_of_the_one_before(
    config: Callable[..., VllmConfig],
) -> None:
    expected, _ = serve_until_it_dies(config, crash_at=3)
    assert expected["short"][-1] is FinishReason.LENGTH
    told, error = serve_until_it_dies(config, crash_at=3, async_scheduling=True)
    assert str(error) == "the device is on fire"
    assert told == expected
    # The first step, which nobody waits for one before.
    told, error = serve_until_it_dies(config, crash_at=1, async_scheduling=True)
    assert (told, str(error)) == ({"long": [], "short": []}, "the device is on fire")


def test_a_step_that_is_lost_in_flight_ends_the_core_by_its_error(
    config: Callable[..., VllmConfig],
) -> None:
    first, _ = serve_until_it_dies(config, crash_at=2)
    told, error = serve_until_it_dies(config, lost_at=2, async_scheduling=True)
    assert isinstance(error, EngineDeadError)
    assert told == first
    # The step behind it cannot begin either: that is what went wrong first.
    told, error = serve_until_it_dies(config, lost_at=2, crash_at=3, async_scheduling=True)
    assert str(error) == "the device is on fire"
    assert isinstance(error.__cause__, EngineDeadError)
    assert told == first


class Reporter:
    """An executor whose steps bring what they are told to."""

    def __init__(self) -> None:
        self.report: dict[str, Any] = {}

    def begin_model(self, plan: SchedulerOutput) -> BegunStep:
        result = answer(plan, {name: [1] for name in plan.num_scheduled_tokens})
        result.kv_connector_output, self.report = KVConnectorOutput(**self.report), {}
        return BegunStep(lambda: result)


def test_what_an_empty_step_tells_waits_for_no_other() -> None:
    scheduler = connected(use_async=True, matched=32, is_async=True)
    assert isinstance(scheduler, AsyncScheduler)
    executor = Reporter()
    ahead = StepAhead(scheduler, executor)  # type: ignore[arg-type]
    scheduler.add_request(make_request("loads", 50))
    executor.report = {"finished_recving": {"loads"}}
    ahead.begin(scheduler.schedule(), None)
    assert not ahead.is_in_flight
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"loads": 18}
    assert ahead.begin(step, None) == {}
    assert ahead.take_untold() is None
    scheduler.finish_requests("loads", RequestStatus.FINISHED_ABORTED)
    # Behind one that runs: what clients hear of both takes two turns.
    scheduler.add_request(make_request("next", 49))
    executor.report = {"finished_recving": {"next"}}
    ahead.begin(scheduler.schedule(), ahead.settle_if_needed())
    assert scheduler.schedule().num_scheduled_tokens == {"next": 17}
    assert ahead.take_untold() is not None
    assert not ahead.is_in_flight


def test_a_step_that_reads_what_it_loads_is_waited_for() -> None:
    scheduler = connected("recompute", use_async=True, matched=32)
    assert isinstance(scheduler, AsyncScheduler)
    executor = Reporter()
    ahead = StepAhead(scheduler, executor)  # type: ignore[arg-type]
    scheduler.add_request(make_request("loads", 50))
    step = scheduler.schedule()
    (bad, *_) = scheduler.kv_cache_manager.get_block_ids("loads")[0]
    executor.report = {"invalid_block_ids": {bad}}
    assert not outputs_by_request(dict(ahead.begin(step, ahead.settle_if_needed())))
    # Its client leaves: nobody hits what did not come.
    scheduler.finish_requests("loads", RequestStatus.FINISHED_ABORTED)
    scheduler.connector.matched = 0
    scheduler.add_request(make_request("next", list(step.scheduled_new_reqs[0].prompt_token_ids)))
    assert scheduler.schedule().num_scheduled_tokens == {"next": 50}
