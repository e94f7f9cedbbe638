import gc

import psutil
import pytest

from tests.v1.engine.fakes import FAKE_CORE, make_tokenizer, scripted_token
from tests.v1.metrics.values import values_of
from vllm.exceptions import EngineDeadError, EngineError, UserInputError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.launch import launch_sync_engine_core
from vllm.v1.engine.llm_engine import LLMEngine

VOCAB_SIZE = make_tokenizer().vocab_size


@pytest.fixture(params=["inline", "process"])
def build(request, config, monkeypatch):
    if request.param == "inline":
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engines = []

    def make(**fake):
        vllm_config = config(**fake)
        handle = launch_sync_engine_core(vllm_config, core_factory=FAKE_CORE)
        engines.append(LLMEngine(vllm_config, handle))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


def run(engine) -> dict[str, list]:
    found: dict[str, list] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def test_requests_are_stepped_to_their_end(build):
    engine = build()
    for i in range(3):
        engine.add_request(f"r{i}", [i], SamplingParams(max_tokens=4))
    assert engine.get_num_unfinished_requests() == 3
    found = run(engine)
    for i in range(3):
        last = found[f"r{i}"][-1]
        assert last.finished
        assert list(last.outputs[0].token_ids) == [
            scripted_token([i], k, None, VOCAB_SIZE) for k in range(4)
        ]
    assert engine.step() == []
    metrics = values_of(engine.get_metrics())
    assert metrics["vllm:generation_tokens"] == 12
    assert metrics["vllm:request_success:length"] == 3


def test_an_abort_returns_what_there_is(build):
    engine = build()
    engine.add_request("r", [1], SamplingParams(max_tokens=200))
    engine.add_request("other", [2], SamplingParams(max_tokens=3))
    engine.step()
    engine.abort_request(["r"])
    found = run(engine)
    assert found["r"][-1].outputs[0].finish_reason == "abort"
    assert found["other"][-1].outputs[0].finish_reason == "length"
    assert values_of(engine.get_metrics())["vllm:request_success:abort"] == 1


def test_the_prefix_cache_can_be_reset_between_requests(build):
    engine = build()

    def cached() -> int:
        engine.add_request("r", [7] * 40, SamplingParams(max_tokens=2))
        return run(engine)["r"][-1].num_cached_tokens

    assert [cached(), cached()] == [0, 32]
    assert engine.reset_prefix_cache()
    assert cached() == 0


def test_a_reset_in_mid_flight_loses_no_output(build):
    engine = build(step_s=1.0)  # a process would be done by the reset
    engine.add_request("r", [7] * 40, SamplingParams(max_tokens=3))
    engine.step()
    assert not engine.reset_prefix_cache()
    assert len(run(engine)["r"][-1].outputs[0].token_ids) == 3


def test_a_wrong_request_changes_nothing(build):
    engine = build()
    with pytest.raises(UserInputError):
        engine.add_request("r", "", SamplingParams())
    assert not engine.has_unfinished_requests()


def test_a_core_that_dies_is_told(build):
    engine = build(crash_at=2)
    engine.add_request("r", [1], SamplingParams(max_tokens=9))
    with pytest.raises((EngineDeadError, RuntimeError), match="on fire"):
        run(engine)
    with pytest.raises(EngineDeadError):
        engine.add_request("late", [1], SamplingParams())


def test_after_shutdown_requests_are_refused(build):
    engine = build()
    engine.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        engine.add_request("r", [1], SamplingParams())


@pytest.mark.slow
def test_an_engine_that_is_collected_ends_its_process(config):
    vllm_config = config()
    handle = launch_sync_engine_core(vllm_config, core_factory=FAKE_CORE)
    engine = LLMEngine(vllm_config, handle)
    engine.add_request("r", [1], SamplingParams(max_tokens=2))
    del engine
    gc.collect()
    assert not psutil.pid_exists(handle.pid)
