"""Options of requests. One that is added here goes from a body to the core."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.v1.engine.fakes import build_fake_core, make_config
from vllm.entrypoints.openai.engine_stream import EngineStream, Job
from vllm.entrypoints.openai.protocol.requests import CompletionRequest
from vllm.entrypoints.openai.sampling import read_options
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import UserInputError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.client import ThreadCore
from vllm.v1.engine.questions import AskedCore, Question
from vllm.v1.request_options import NO_OPTIONS, RequestOptions


class WithMood(RequestOptions, frozen=True, kw_only=True):
    """Options with one that a test adds."""

    mood: str = "calm"


class MoodyRequest(CompletionRequest):
    """A body with it."""

    options_type: ClassVar[type[RequestOptions]] = WithMood

    mood: str | None = None


class AskMoods(Question[list[str]], frozen=True):
    """Its use: what the requests in the core say of it."""

    def answer(self, core: AskedCore, tell: Callable[[list[str]], None]) -> None:
        found = [request.options for request in core.scheduler.requests.values()]
        tell([options.mood for options in found if isinstance(options, WithMood)])

    def merge(self, replies: Sequence[list[str]]) -> list[str]:
        return [mood for reply in replies for mood in reply]


def test_nothing_can_be_kept_of_what_leaves_nothing() -> None:
    RequestOptions(skip_cache_insert=True, cache_boundaries=[3]).check_offsets(5)
    with pytest.raises(UserInputError, match="ttl") as refused:
        RequestOptions(skip_cache_insert=True, cache_ttls={3: 60.0}).check_offsets(5)
    assert refused.value.param == "skip_cache_insert"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"priority": 1}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"data_parallel_rank": 2}, "X-data-parallel-rank"),
        ({"data_parallel_rank": -1}, "X-data-parallel-rank"),
    ],
)
def test_what_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserInputError) as raised:
        RequestOptions(**options).check(has_priorities=False, num_cores=2)
    assert raised.value.param == named


def test_priorities_are_32_bits() -> None:
    RequestOptions(priority=-(2**31)).check(has_priorities=True)
    with pytest.raises(UserInputError, match="signed 32-bit"):
        RequestOptions(priority=2**31).check(has_priorities=True)


def test_those_of_the_call_go_before_those_of_the_prompt() -> None:
    prompt = RequestOptions(cache_salt="p", cache_ttls={3: 1.0})
    assert NO_OPTIONS.over(prompt) == prompt
    assert RequestOptions(cache_salt="c", priority=2).over(prompt) == RequestOptions(
        cache_salt="c", priority=2, cache_ttls={3: 1.0}
    )


def test_one_that_is_added_reaches_the_core(tmp_path: Path) -> None:
    async def main() -> None:
        config = make_config(tmp_path, step_s=0.01)
        engine = AsyncLLM(config, ThreadCore(lambda: build_fake_core(config)))
        body = MoodyRequest(prompt="x", mood="merry", cache_salt="s", prompt_cache_key="k")
        options = read_options(body)
        assert options == WithMood(mood="merry", cache_salt="s", prompt_cache_key="k")
        options = options.replace(cache_boundaries=[2])
        params = SamplingParams(max_tokens=200, n=2, temperature=1.0)
        stream = EngineStream(engine, [Job("r", [1, 2, 3], params, options)], ServerState())
        await stream.start()
        assert await engine.ask(AskMoods()) == ["merry"] * 2
        await stream.close()
        engine.shutdown()

    asyncio.run(main())


def test_extra_fields_of_a_body_are_no_options() -> None:
    extra = {"data_parallel_rank": 1, "trace_headers": {"a": "b"}, "cache_ttls": {3: 5}}
    assert read_options(CompletionRequest(prompt="x", **extra)) == NO_OPTIONS
