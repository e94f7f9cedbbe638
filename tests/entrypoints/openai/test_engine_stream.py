"""Several jobs, one stream."""

import asyncio

import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine
from vllm.entrypoints.openai.engine_stream import EngineStream, Job
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import EngineDeadError, EngineError, QueueFullError, ShuttingDownError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import Tokenizer


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


def _jobs(n: int) -> list[Job]:
    params = SamplingParams(max_tokens=3, output_kind=RequestOutputKind.DELTA)
    return [Job(f"r{i}", [5, 6], params) for i in range(n)]


async def test_outputs_of_all_jobs(engine: FakeEngine) -> None:
    stream = EngineStream(engine, _jobs(3), ServerState())
    await stream.start()
    indices = [item.job_index async for item in stream.outputs()]
    assert sorted(indices) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    await stream.close()
    assert engine.num_left == 0


async def test_jobs_are_handed_in_together(engine: FakeEngine) -> None:
    stream = EngineStream(engine, _jobs(8), ServerState())
    await stream.start()
    assert engine.together == [8]
    await stream.close()


async def test_a_refused_job_ends_the_others(engine: FakeEngine) -> None:
    engine.refuse = QueueFullError("full")
    with pytest.raises(QueueFullError):
        await EngineStream(engine, _jobs(2), ServerState()).start()


async def test_closing_leaves_every_job(engine: FakeEngine) -> None:
    stream = EngineStream(engine, _jobs(2), ServerState())
    await stream.start()
    engine.hold.clear()
    await stream.close()
    await stream.close()
    assert engine.num_left == 2


async def test_the_server_can_end_it(engine: FakeEngine) -> None:
    state = ServerState()
    stream = EngineStream(engine, _jobs(1), state)
    await stream.start()
    engine.hold.clear()
    outputs = stream.outputs()
    await anext(outputs)
    waiting = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0)
    state.end_all(ShuttingDownError("over"))
    with pytest.raises(ShuttingDownError):
        await waiting
    await stream.close()
    with pytest.raises(ShuttingDownError):
        await EngineStream(engine, _jobs(1), state).start()


async def test_death_in_a_request_is_a_failure_and_no_refusal(engine: FakeEngine) -> None:
    engine.fail_at = 1
    stream = EngineStream(engine, _jobs(1), ServerState())
    await stream.start()
    with pytest.raises(EngineError) as caught:
        [item async for item in stream.outputs()]
    assert not isinstance(caught.value, EngineDeadError)
    await stream.close()


async def test_a_slow_reader_gets_merged_outputs(engine: FakeEngine) -> None:
    stream = EngineStream(engine, _jobs(2), ServerState())
    await stream.start()
    while engine.num_running:
        await asyncio.sleep(0)
    items = [item async for item in stream.outputs()]
    told: list[list[int]] = [[], []]
    for item in items:
        told[item.job_index] += item.output.outputs[0].token_ids
    assert told == [list(engine.answer[:3])] * 2
    assert len(items) <= 3  # the one that start waited for, and one per job
    await stream.close()


async def test_log_probabilities_stay_beside_the_text_of_their_step(engine: FakeEngine) -> None:
    params = SamplingParams(max_tokens=3, logprobs=1, output_kind=RequestOutputKind.DELTA)
    stream = EngineStream(engine, [Job("r", [5], params), *_jobs(1)], ServerState())
    await stream.start()
    while engine.num_running:
        await asyncio.sleep(0)
    items = [item async for item in stream.outputs()]
    told = [item.output.outputs[0].token_ids for item in items if item.job_index == 0]
    assert told == [[token] for token in engine.answer[:3]]
    assert [item.job_index for item in items].count(1) == 1
    await stream.close()


async def test_what_came_before_an_error_is_read_first(engine: FakeEngine) -> None:
    engine.fail_at = 2
    stream = EngineStream(engine, _jobs(1), ServerState())
    await stream.start()
    while engine.num_running:
        await asyncio.sleep(0)
    outputs = stream.outputs()
    told = [*(await anext(outputs)).output.outputs[0].token_ids]
    told += (await anext(outputs)).output.outputs[0].token_ids
    assert told == list(engine.answer[:2])
    with pytest.raises(EngineError):
        await anext(outputs)
    await stream.close()


async def test_a_job_refused_after_another_began_leaves_that(engine: FakeEngine) -> None:
    engine.refuse_from = 1
    engine.refuse = QueueFullError("full")
    with pytest.raises(QueueFullError):
        await EngineStream(engine, _jobs(2), ServerState()).start()
    assert engine.num_left == 1


async def test_a_response_may_begin_before_the_first_output(engine: FakeEngine) -> None:
    engine.hold.clear()
    stream = EngineStream(engine, _jobs(1), ServerState(), timeout_s=0.001)
    await asyncio.wait_for(stream.start(), 30)
    engine.hold.set()
    assert len([item async for item in stream.outputs()]) == 3
    await stream.close()


async def test_an_error_after_the_beginning_is_told_by_the_stream(engine: FakeEngine) -> None:
    engine.hold.clear()
    engine.fail_at = 0
    stream = EngineStream(engine, _jobs(1), ServerState(), timeout_s=0.001)
    await asyncio.wait_for(stream.start(), 30)
    engine.hold.set()
    with pytest.raises(EngineError):
        await anext(stream.outputs())
    await stream.close()
