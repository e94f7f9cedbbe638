"""Several fake cores behind one engine: tokens, questions to all, deaths and returns."""

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest

from tests.v1.engine.fakes import FAKE_CORE, make_tokenizer, scripted_token
from tests.v1.engine.test_async_llm import Recorder
from vllm.config.parallel import ParallelConfig
from vllm.exceptions import ConfigError, EngineCoreLostError, EngineDeadError, UserInputError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.launch import launch_engine_core
from vllm.v1.engine.questions import AskHeld, HeldReply

VOCAB_SIZE = make_tokenizer().vocab_size
_DEADLINE_S = 60.0


@pytest.fixture
def build(config):
    """Build engines over two fake cores; all are shut down at the end."""
    engines = []

    def make(parallel=None, **fake):
        vllm_config = replace(
            config(**fake), parallel_config=ParallelConfig(data_parallel_size=2, **(parallel or {}))
        )
        handle = launch_engine_core(vllm_config, core_factory=FAKE_CORE)
        recorders = [Recorder(), Recorder()]
        engines.append(
            AsyncLLM(
                vllm_config,
                handle,
                stat_loggers=[recorders[0]],
                further_stat_loggers=[[recorders[1]]],
            )
        )
        engines[-1].recorders = recorders
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def in_threads(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


async def ask(engine, name, prompt, rank=None, **params):
    """Return the tokens of an answer and how many of the prompt's were cached."""
    params.setdefault("max_tokens", 4)
    wanted = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **params)
    async for output in engine.generate(list(prompt), wanted, name, data_parallel_rank=rank):
        final = output
    return list(final.outputs[0].token_ids), final.num_cached_tokens


def told(prompt, count=4):
    return [scripted_token(list(prompt), i, None, VOCAB_SIZE) for i in range(count)]


async def until(condition) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_answers_are_those_of_one_core_wherever_they_run(in_threads, build):
    async def main():
        engine = build()
        prompts = [range(i, i + 40) for i in range(6)]
        answers = await asyncio.gather(*(ask(engine, f"r{i}", p) for i, p in enumerate(prompts)))
        assert [tokens for tokens, _ in answers] == [told(p) for p in prompts]
        assert all(recorder.finished for recorder in engine.recorders)

    asyncio.run(main())


def test_a_next_turn_goes_where_its_beginning_is_cached(in_threads, build):
    async def main():
        engine = build()
        turns = [list(range(i, i + 64)) for i in (0, 50)]
        for number, turn in enumerate(turns):
            assert (await ask(engine, f"first{number}", turn))[1] == 0
        # Each core got one, and so each next turn hits, in either order.
        assert [len(recorder.finished) for recorder in engine.recorders] == [1, 1]
        for number in (1, 0):
            assert (await ask(engine, f"next{number}", [*turns[number], 7, 8]))[1] == 64
        assert [len(recorder.finished) for recorder in engine.recorders] == [2, 2]
        assert await engine.reset_prefix_cache()
        assert (await ask(engine, "again", [*turns[0], 7]))[1] == 0

    asyncio.run(main())


def test_every_core_is_told_what_to_let_go_of(in_threads, build, monkeypatch):
    told = []
    monkeypatch.setattr(EngineCore, "withdraw_prefixes", lambda _core, names: told.append(names))

    async def main():
        build().withdraw_prefixes(["a", "b"])
        await until(lambda: told == [["a", "b"]] * 2)

    asyncio.run(main())


def test_round_robin_takes_turns(in_threads, build):
    async def main():
        engine = build({"data_parallel_routing": "round-robin"})
        for number in range(4):
            await ask(engine, str(number), range(40))
        assert [len(recorder.finished) for recorder in engine.recorders] == [2, 2]

    asyncio.run(main())


def test_a_rank_can_be_chosen_and_a_wrong_one_is_refused(in_threads, build):
    async def main():
        engine = build()
        for number in range(3):
            await ask(engine, str(number), range(8), rank=1)
        assert [len(recorder.finished) for recorder in engine.recorders] == [0, 3]
        with pytest.raises(UserInputError, match=r"2 is out of range: .* engine cores 0 to 1"):
            await ask(engine, "wrong", range(8), rank=2)

    asyncio.run(main())


def test_salts_keep_prefixes_apart(in_threads, build):
    async def main():
        engine = build()
        wanted = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)

        async def cached(name, salt):
            async for output in engine.generate(list(range(40)), wanted, name, cache_salt=salt):
                final = output
            return final.num_cached_tokens

        assert [await cached("a", "one"), await cached("b", "two"), await cached("c", "one")] == [
            0,
            0,
            32,
        ]
        # The stranger's request went to the core that had computed less.
        assert [len(recorder.finished) for recorder in engine.recorders] == [2, 1]

    asyncio.run(main())


def test_held_prefixes_are_those_of_all_cores(in_threads, build):
    async def main():
        engine = build()
        assert await engine.ask(AskHeld("nobody")) == HeldReply([], False)

    asyncio.run(main())


@pytest.mark.slow
def test_without_tolerance_the_first_death_ends_everything(build):
    async def main():
        engine = build(step_s=0.01)
        pids = [handle.pid for handle in engine._core._handles]
        asked = [
            asyncio.create_task(ask(engine, f"r{rank}", range(8), rank=rank, max_tokens=240))
            for rank in (0, 1)
        ]
        await until(lambda: all(recorder.scheduler_stats for recorder in engine.recorders))
        os.kill(pids[1], signal.SIGKILL)
        for task in asked:
            with pytest.raises(EngineDeadError, match=r"rank 1: .*signal 9"):
                await task
        assert engine.errored

    asyncio.run(main())


@pytest.mark.slow
def test_with_tolerance_only_the_dead_cores_requests_fail_and_it_comes_back(build):
    async def main():
        engine = build(
            {"data_parallel_fault_tolerance": True, "data_parallel_restarts": 1}, step_s=0.01
        )
        pids = [handle.pid for handle in engine._core._handles]
        asked = [
            asyncio.create_task(ask(engine, f"r{rank}", range(8), rank=rank, max_tokens=150))
            for rank in (0, 1)
        ]
        await until(lambda: all(recorder.scheduler_stats for recorder in engine.recorders))
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineCoreLostError, match="rank 1 died while it answered"):
            await asked[1]
        # Those that come meanwhile are answered, and so is what the other core had.
        assert (await ask(engine, "meanwhile", range(9)))[0] == told(range(9))
        assert (await asked[0])[0] == told(range(8), 150)
        assert not engine.errored
        lost = engine.recorders[1].scheduler_stats
        assert lost.is_lost or lost.num_running_reqs == 0
        assert engine.recorders[0].scheduler_stats.is_lost is False
        await until(lambda: engine._core._router.num_alive() == 2)
        assert (await ask(engine, "back", range(8), rank=1))[0] == told(range(8))
        # Nothing is left to start it with: the next death is for good, and the last one the end.
        os.kill(engine._core._handles[1].pid, signal.SIGKILL)
        await until(lambda: engine._core._router.num_alive() == 1)
        with pytest.raises(EngineCoreLostError, match="rank 1 is dead"):
            await ask(engine, "gone", range(8), rank=1)
        assert await engine.reset_prefix_cache()

    asyncio.run(main())


def test_a_core_that_cannot_be_started_again_leaves_nothing_waiting(build):
    """Where cores come from a cluster, starting one may fail: there is no room for it."""

    def fail(rank):
        raise ConfigError("no room")

    async def main():
        engine = build(
            {"data_parallel_fault_tolerance": True, "data_parallel_restarts": 1}, step_s=0.01
        )
        cores = engine._core
        cores._launch = fail
        os.kill(cores._handles[1].pid, signal.SIGKILL)
        await until(lambda: cores._router.num_alive() == 1)
        assert (await ask(engine, "meanwhile", range(9)))[0] == told(range(9))
        os.kill(cores._handles[0].pid, signal.SIGKILL)
        await until(lambda: engine.errored)
        with pytest.raises(EngineDeadError, match="no room"):
            await ask(engine, "gone", range(8))

    asyncio.run(main())
