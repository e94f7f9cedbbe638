import asyncio
import gc
import logging
import os
import signal
import weakref

import psutil
import pytest

from tests.v1.engine.fakes import FAKE_CORE, make_tokenizer, scripted_token
from vllm.exceptions import (
    CheckpointError,
    EngineDeadError,
    QueueFullError,
    ShuttingDownError,
    UserInputError,
)
from vllm.logger import current_request_id
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.launch import launch_engine_core
from vllm.v1.engine.output_queue import OutputQueue
from vllm.v1.engine.submission import Submission
from vllm.v1.engine.wire import AddRequests

TOKENIZER = make_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size


class Recorder:
    """A statistics sink that remembers."""

    def __init__(self) -> None:
        self.finished = []
        self.scheduler_stats = None
        self.num_logs = 0
        self.logged_for: set[str] = set()

    def record(self, scheduler_stats, iteration_stats) -> None:
        if scheduler_stats is not None:
            self.scheduler_stats = scheduler_stats
        if iteration_stats is not None:
            self.finished.extend(iteration_stats.finished_requests)

    def log(self) -> None:
        self.num_logs += 1
        self.logged_for.add(current_request_id.get())


@pytest.fixture
def build_anywhere(config):
    engines = []

    def make(**fake):
        vllm_config = config(**fake)
        handle = launch_engine_core(vllm_config, core_factory=FAKE_CORE)
        recorder = Recorder()
        engines.append(AsyncLLM(vllm_config, handle, stat_loggers=[recorder]))
        engines[-1].recorder = recorder
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture(params=["thread", "process"])
def build(request, build_anywhere, monkeypatch):
    """Build engines whose core runs in a thread, then in a process."""
    if request.param == "thread":
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return build_anywhere


@pytest.fixture
def build_in_thread(build_anywhere, monkeypatch):
    """Build engines whose core runs in a thread."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return build_anywhere


def params(kind=RequestOutputKind.DELTA, **kwargs) -> SamplingParams:
    kwargs.setdefault("max_tokens", 5)
    return SamplingParams(output_kind=kind, **kwargs)


async def collect(engine, prompt=(1, 2, 3), request_id="r", **kwargs):
    """Return token ids, text and the last output of a request."""
    ids, text = [], ""
    async for output in engine.generate(list(prompt), params(**kwargs), request_id):
        (answer,) = output.outputs
        ids.extend(answer.token_ids)
        text += answer.text
    return ids, text, output


async def wait_for_idle_pool(engine) -> None:
    """Wait until the core holds no block."""
    for _ in range(6000):
        stats = engine.recorder.scheduler_stats
        if stats is not None and stats.num_running_reqs == 0 and stats.kv_cache_usage == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"blocks are held: {engine.recorder.scheduler_stats}")


async def test_requests_run_together_and_end_whole(build):
    engine = build()
    prompts = [[i, i + 1] for i in range(12)]
    results = await asyncio.gather(*(collect(engine, p, f"r{i}") for i, p in enumerate(prompts)))
    for prompt, (ids, text, last) in zip(prompts, results, strict=True):
        assert ids == [scripted_token(prompt, i, None, VOCAB_SIZE) for i in range(5)]
        assert text == TOKENIZER.decode(ids, skip_special_tokens=True)
        assert last.finished
        assert last.outputs[0].finish_reason == "length"
        assert last.prompt_token_ids == prompt
        assert last.num_cached_tokens == 0
        assert last.metrics.num_generation_tokens == 5
    assert [r.finish_reason for r in engine.recorder.finished] == [FinishReason.LENGTH] * 12
    assert engine.num_unfinished_requests == 0


async def test_text_prompts_and_cumulative_outputs(build_in_thread):
    engine = build_in_thread()
    texts = []
    kind = RequestOutputKind.CUMULATIVE
    async for output in engine.generate("hello world", params(kind, max_tokens=6), "r"):
        texts.append(output.outputs[0].text)
        ids = output.outputs[0].token_ids
    assert output.prompt == "hello world"
    assert output.prompt_token_ids == TOKENIZER.encode("hello world")
    assert len(ids) == 6
    assert texts == sorted(texts, key=len)
    assert texts[-1] == TOKENIZER.decode(ids, skip_special_tokens=True)


async def test_a_reader_that_leaves_frees_the_blocks(build):
    engine = build(step_s=0.005)
    stream = engine.generate([1] * 50, params(max_tokens=200), "r")
    await anext(stream)
    await stream.aclose()
    assert engine.num_unfinished_requests == 0
    await wait_for_idle_pool(engine)
    assert [r.finish_reason for r in engine.recorder.finished] == [FinishReason.ABORT]
    assert engine.recorder.finished[0].num_generation_tokens >= 1


async def test_a_cancelled_task_frees_the_blocks(build):
    engine = build(step_s=0.005)
    task = asyncio.create_task(collect(engine, [1] * 50, max_tokens=200))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.num_unfinished_requests == 0
    await wait_for_idle_pool(engine)
    assert (await collect(engine))[2].finished


async def test_a_stream_that_is_dropped_is_aborted(build_in_thread):
    engine = build_in_thread(step_s=0.005)
    stream = await engine.add_request("r", [1, 2], params(max_tokens=200))
    await anext(stream)
    del stream
    gc.collect()
    assert engine.num_unfinished_requests == 0
    await wait_for_idle_pool(engine)


async def test_abort_by_id_ends_the_stream_with_what_there_is(build):
    engine = build(step_s=0.005)
    outputs = []
    async for output in engine.generate([1, 2], params(max_tokens=200), "r"):
        outputs.append(output)
        if len(outputs) == 3:
            await engine.abort("r")
            await engine.abort("unknown")
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    await wait_for_idle_pool(engine)


async def test_two_callers_may_use_one_id(build_in_thread):
    engine = build_in_thread(step_s=0.01)
    results = await asyncio.gather(collect(engine, [1], "same"), collect(engine, [2], "same"))
    assert [len(ids) for ids, _, _ in results] == [5, 5]
    assert {output.request_id for _, _, output in results} == {"same"}
    tasks = [asyncio.create_task(collect(engine, [i], "same", max_tokens=250)) for i in (1, 2)]
    await asyncio.sleep(0.05)
    await engine.abort("same")
    ends = [(await task)[2].outputs[0].finish_reason for task in tasks]
    assert ends == ["abort", "abort"]


async def test_a_stop_string_ends_the_request_in_the_core_too(build):
    letters = [TOKENIZER.encode(c)[0] for c in "abcdefgh"]
    engine = build(script=letters, step_s=0.002)
    _, text, last = await collect(engine, stop=["def"], max_tokens=200)
    assert text == "abc"
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", "def")
    assert last.metrics.num_generation_tokens == 6
    await wait_for_idle_pool(engine)
    assert [r.finish_reason for r in engine.recorder.finished] == [FinishReason.STOP]


async def test_the_end_token_stops_without_text(build_in_thread):
    letters = [*TOKENIZER.encode("ab"), TOKENIZER.eos_token_id]
    engine = build_in_thread(script=letters)
    ids, text, last = await collect(engine, max_tokens=50)
    assert (ids, text, last.outputs[0].finish_reason) == (letters, "ab", "stop")
    assert last.outputs[0].stop_reason is None
    ids, _, _ = await collect(engine, max_tokens=7, ignore_eos=True)
    assert len(ids) == 7


async def test_n_answers_have_their_own_seeds_and_share_the_prompt(build_in_thread):
    engine = build_in_thread()
    prompt = [3] * 40

    async def answers(seed: int) -> dict[int, list[int]]:
        found = {}
        request = params(RequestOutputKind.DELTA, n=3, seed=seed)
        async for output in engine.generate(prompt, request, "r"):
            for answer in output.outputs:
                found.setdefault(answer.index, []).extend(answer.token_ids)
        assert output.finished
        assert output.num_cached_tokens in (0, 32)
        return found

    first = await answers(10)
    expected = {
        i: [scripted_token(prompt, k, 10 + i, VOCAB_SIZE) for k in range(5)] for i in range(3)
    }
    assert first == expected == await answers(10)
    assert (await answers(11))[0] == expected[1]


async def test_n_answers_come_together_when_only_the_end_counts(build_in_thread):
    engine = build_in_thread()
    kind = RequestOutputKind.FINAL_ONLY
    outputs = [o async for o in engine.generate([1], params(kind, n=3, seed=1), "r")]
    (output,) = outputs
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert all(len(answer.token_ids) == 5 for answer in output.outputs)


async def test_logprobs_of_answer_and_prompt(build_in_thread):
    engine = build_in_thread(max_num_batched_tokens=16)
    prompt = list(range(40))
    outputs = [
        o
        async for o in engine.generate(
            prompt, params(logprobs=1, prompt_logprobs=0, max_tokens=3), "r"
        )
    ]
    # A reader that comes late gets several tokens in one output.
    has_prompt = [o.prompt_logprobs is not None for o in outputs]
    assert has_prompt == [True] + [False] * (len(outputs) - 1)
    prompt_logprobs = outputs[0].prompt_logprobs
    assert prompt_logprobs[0] is None
    assert [next(iter(p)) for p in prompt_logprobs[1:]] == prompt[1:]
    assert outputs[-1].outputs[0].cumulative_logprob == pytest.approx(-1.5)
    for output in outputs:
        (answer,) = output.outputs
        for position, token_id in zip(answer.logprobs, answer.token_ids, strict=True):
            assert list(position) == [token_id, (token_id + 1) % VOCAB_SIZE][: len(position)]
            entry = position[token_id]
            assert (entry.logprob, entry.rank) == (-0.5, 1)
            assert entry.token_bytes == TOKENIZER.token_bytes(token_id)
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 3


async def test_a_second_time_the_prompt_is_cached(build_in_thread):
    engine = build_in_thread()
    prompt = [7] * 40
    first, second = (await collect(engine, prompt))[2], (await collect(engine, prompt))[2]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert second.num_cache_creation_tokens == 8
    assert second.prefill_stats.num_prompt_tokens == 40
    assert await engine.reset_prefix_cache()
    assert (await collect(engine, prompt))[2].num_cached_tokens == 0


async def test_wrong_requests_are_told_at_once(build_in_thread):
    engine = build_in_thread()
    with pytest.raises(UserInputError, match="empty"):
        await engine.add_request("r", "", params())
    with pytest.raises(UserInputError, match="256") as error:
        await collect(engine, [1] * 256)
    assert error.value.param == "input_tokens"
    assert engine.num_unfinished_requests == 0


async def test_long_texts_are_tokenized_beside_the_event_loop(build_in_thread):
    engine = build_in_thread()
    with pytest.raises(
        UserInputError, match=r"maximum context length is 256 tokens.*\(20000 in the prompt"
    ):
        await engine.add_request("r", "z" * 20_000, params())


async def test_a_full_queue_refuses(build_in_thread):
    engine = build_in_thread(max_num_seqs=2, max_num_queued_reqs=1, step_s=0.02)
    streams = [await engine.add_request(f"r{i}", [i], params(max_tokens=50)) for i in range(3)]
    with pytest.raises(QueueFullError, match="at most 1 may") as error:
        await engine.add_request("late", [9], params())
    assert error.value.retry_after_s >= 1
    await streams[0].aclose()
    streams.append(await engine.add_request("later", [9], params()))
    for stream in streams:
        await stream.aclose()


async def test_together_all_are_taken_or_none(build_in_thread, monkeypatch):
    engine = build_in_thread()
    sent: list[list[str]] = []
    send = engine._core.send

    def watched(message):
        if isinstance(message, AddRequests):
            sent.append([request.request_id[:2] for request in message.requests])
        send(message)

    monkeypatch.setattr(engine._core, "send", watched)
    params = SamplingParams(max_tokens=1, n=2, temperature=1.0)
    prompts = [{"prompt_token_ids": [1, 2, i]} for i in (3, 4)]
    good = [
        Submission(f"r{i}", prompt, params, OutputQueue(deltas=False))
        for i, prompt in enumerate(prompts)
    ]
    leaves = await engine.submit_all(good)
    assert sent == [["r0", "r0", "r1", "r1"]]
    for leave in leaves:
        leave()
    bad = Submission("r2", {"prompt_token_ids": []}, params, OutputQueue(deltas=False))
    with pytest.raises(UserInputError, match="empty"):
        await engine.submit_all([*good, bad])
    assert len(sent) == 1
    assert engine.num_unfinished_requests == 0


async def test_a_queue_full_of_tokens_refuses(build_in_thread):
    engine = build_in_thread(max_num_seqs=1, max_num_queued_tokens=60, step_s=0.02)
    begun = await engine.add_request("begun", [1] * 50, params(max_tokens=100))
    await anext(begun)  # has a token: its prompt waits no more
    waiting = await engine.add_request("waiting", [2] * 50, params(n=2, temperature=1.0))
    with pytest.raises(QueueFullError, match="61 tokens would wait, at most 60"):
        await engine.add_request("late", [3] * 11, params())
    last = await engine.add_request("last", [3] * 10, params())
    for stream in (begun, waiting, last):
        await stream.aclose()


async def test_draining_lets_running_requests_finish(build):
    engine = build(step_s=0.005)
    task = asyncio.create_task(collect(engine, max_tokens=30))
    await asyncio.sleep(0.05)
    drain = asyncio.create_task(engine.drain(20))
    await asyncio.sleep(0)
    assert engine.is_draining
    with pytest.raises(ShuttingDownError):
        await engine.add_request("late", [1], params())
    assert await drain
    ids, _, last = await task
    assert len(ids) == 30
    assert last.outputs[0].finish_reason == "length"


async def test_draining_has_an_end(build_in_thread):
    engine = build_in_thread(step_s=0.02)
    task = asyncio.create_task(collect(engine, max_tokens=200))
    await asyncio.sleep(0.05)
    assert not await engine.drain(0.1)
    assert (await task)[2].outputs[0].finish_reason == "abort"
    assert engine.num_unfinished_requests == 0


async def test_shutdown_ends_every_stream(build):
    engine = build(step_s=0.02)
    task = asyncio.create_task(collect(engine, max_tokens=200))
    await asyncio.sleep(0.1)
    engine.shutdown()
    assert (await asyncio.wait_for(task, 60))[2].outputs[0].finish_reason == "abort"
    assert not engine.is_running
    assert not engine.errored
    with pytest.raises(ShuttingDownError):
        await engine.add_request("late", [1], params())
    engine.shutdown()


async def test_a_step_that_raises_fails_every_stream(build):
    engine = build(crash_at=4, step_s=0.005)
    tasks = [asyncio.create_task(collect(engine, [i], max_tokens=99)) for i in range(3)]
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert engine.errored
    assert not engine.is_running
    assert "on fire" in str(engine.dead_error)
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    with pytest.raises(EngineDeadError):
        await engine.add_request("late", [1], params())
    with pytest.raises(EngineDeadError):
        await engine.reset_prefix_cache()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "hang"])
async def test_a_dead_core_process_fails_every_stream(config, monkeypatch, end):
    monkeypatch.setenv("VLLM_ENGINE_HEARTBEAT_TIMEOUT", "1")
    vllm_config = config(step_s=0.005, hang_at=10 if end == "hang" else None)
    handle = launch_engine_core(vllm_config, core_factory=FAKE_CORE)
    engine = AsyncLLM(vllm_config, handle)
    tasks = [asyncio.create_task(collect(engine, [i], max_tokens=200)) for i in range(3)]
    await asyncio.sleep(0.02)
    await engine.check_health()
    if end == "kill":
        os.kill(handle.pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert engine.errored
    engine.shutdown()
    assert not psutil.pid_exists(handle.pid)


@pytest.mark.slow
def test_start_errors_come_out_of_the_constructor(config):
    vllm_config = config(start_error="checkpoint")
    handle = launch_engine_core(vllm_config, core_factory=FAKE_CORE)
    with pytest.raises(CheckpointError, match=r"embed\.weight"):
        AsyncLLM(vllm_config, handle)
    assert not psutil.pid_exists(handle.pid)


@pytest.mark.slow
def test_a_missing_tokenizer_does_not_leave_a_core_behind(config, tmp_path):
    vllm_config = config()
    handle = launch_engine_core(vllm_config, core_factory=FAKE_CORE)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        AsyncLLM(vllm_config, handle)
    assert not psutil.pid_exists(handle.pid)


async def test_an_engine_nobody_holds_stops_its_core(config, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    vllm_config = config()
    handle = launch_engine_core(vllm_config, core_factory=FAKE_CORE)
    engine = AsyncLLM(vllm_config, handle)
    await collect(engine)
    gone = weakref.ref(engine)
    del engine
    # A last message may still be on its way through the event loop, and hold the engine.
    for _ in range(3000):
        gc.collect()
        if gone() is None:
            break
        await asyncio.sleep(0.01)
    assert gone() is None
    handle._thread.join(60)
    assert not handle._thread.is_alive()


async def test_statistics_are_logged_at_the_interval(build_in_thread, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.1")
    caplog.set_level(logging.INFO, logger="vllm")
    engine = build_in_thread(step_s=0.01)
    current_request_id.set("first")
    task = asyncio.create_task(collect(engine, max_tokens=200))
    while engine.recorder.num_logs < 2 or "Running: 1 reqs, Waiting: 0 reqs" not in caplog.text:
        assert not task.done()
        await asyncio.sleep(0.01)
    task.cancel()
    assert engine.recorder.logged_for == {""}, "they are no part of a request"
    assert "Avg prompt throughput" in caplog.text


def test_one_engine_serves_one_event_loop_after_another(build_in_thread):
    engine = build_in_thread()
    assert len(asyncio.run(collect(engine))[0]) == 5
    assert len(asyncio.run(collect(engine))[0]) == 5
