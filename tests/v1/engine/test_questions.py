"""Questions to an engine core. Those that are added here reach one core and several."""

import asyncio
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from tests.v1.engine.data_parallel.test_cores import ask, build, in_threads  # noqa: F401
from tests.v1.engine.fakes import build_fake_core
from vllm.exceptions import EngineError, ShuttingDownError, UserInputError
from vllm.v1.engine.client import InlineCore
from vllm.v1.engine.core_loop import CoreLoop
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.questions import AskedCore, AskHeld, Question, ResetCache
from vllm.v1.engine.wire import Answer, Ask, Shutdown


class CountHeld(Question[dict[str, int]], frozen=True):
    """How many blocks are in use, and how many there are; a test adds it."""

    scale: int = 1

    def answer(self, core: AskedCore, tell: Callable[[dict[str, int]], None]) -> None:
        if self.scale < 1:
            raise UserInputError("scale must be 1 or more.", "scale")
        pool = core.scheduler.kv_cache_manager.block_pool
        tell({"blocks": pool.num_gpu_blocks * self.scale})

    def merge(self, replies: Sequence[dict[str, int]]) -> dict[str, int]:
        return {"blocks": sum(reply["blocks"] for reply in replies)}


class CountOne(Question[dict[str, int]], frozen=True):
    """The same of one core."""

    is_for_one: ClassVar[bool] = True

    def answer(self, core: AskedCore, tell: Callable[[dict[str, int]], None]) -> None:
        CountHeld().answer(core, tell)

    def merge(self, replies: Sequence[dict[str, int]]) -> dict[str, int]:
        return CountHeld().merge(replies)


def test_one_core_in_the_callers_thread(config: Any) -> None:
    engine = LLMEngine(config(), InlineCore(lambda: build_fake_core(config())))
    assert engine.ask(CountHeld(3)) == {"blocks": 3 * 64}
    with pytest.raises(UserInputError, match="scale must be 1") as raised:
        engine.ask(CountHeld(0))
    assert raised.value.param == "scale"
    # It lives on.
    assert engine.ask(CountHeld()) == {"blocks": 64}
    engine.shutdown()


@pytest.mark.usefixtures("in_threads")
def test_several_cores(build: Callable[..., Any]) -> None:  # noqa: F811
    async def main() -> None:
        engine = build()
        assert await engine.ask(CountHeld(2)) == {"blocks": 2 * 128}
        assert await engine.ask(CountOne()) == {"blocks": 64}
        # Many at a time, of several kinds, each get their own.
        replies = await asyncio.gather(
            *(engine.ask(question) for _ in range(20) for question in (CountHeld(), AskHeld())),
            ask(engine, "meanwhile", range(40)),
        )
        assert replies[:40:2] == [{"blocks": 128}] * 20
        with pytest.raises(UserInputError, match="scale must be 1"):
            await engine.ask(CountHeld(0))
        assert await engine.ask(ResetCache())

    asyncio.run(main())


class AskForNothing(Question[int], frozen=True):
    """Gets no answer."""

    def answer(self, core: AskedCore, tell: Callable[[int], None]) -> None:
        return

    def merge(self, replies: Sequence[int]) -> int:
        return sum(replies)


@pytest.mark.usefixtures("in_threads")
def test_nobody_waits_for_an_engine_that_was_shut_down(build: Callable[..., Any]) -> None:  # noqa: F811
    async def main() -> None:
        engine = build()
        asked = asyncio.create_task(engine.ask(AskForNothing()))
        # One that is given up harms no other.
        given_up = asyncio.create_task(engine.ask(AskForNothing()))
        assert await engine.ask(CountOne()) == {"blocks": 64}
        given_up.cancel()
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(ShuttingDownError, match="before it answered"):
            await asked

    asyncio.run(main())


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (Ask(4, "AskTheStars", b"\x80"), "Nobody knows the question 'AskTheStars'"),
        (Ask(4, "AskHeld", b"\x81\xa6forget\x05"), "AskHeld is another one here"),
        (Ask(4, "OfferPopular", b"\x80"), "OfferPopular is another one here"),
        (Ask(4, "AskHeld", b"\xc1"), "AskHeld is another one here"),
    ],
)
def test_a_question_that_a_core_does_not_know_is_refused(
    config: Any, message: Ask, match: str
) -> None:
    told: list[Any] = []
    loop = CoreLoop(build_fake_core(config()), told.append)
    loop.submit(message)
    loop.run_once()
    (answer,) = told
    assert isinstance(answer, Answer)
    assert answer.call_id == 4
    with pytest.raises(EngineError, match=match):
        AskHeld().read(answer)
    loop.submit(Shutdown())


def test_a_name_is_taken_once() -> None:
    with pytest.raises(TypeError, match="question ResetCache already"):
        types.new_class("ResetCache", (Question[int],))
