"""Responses that nobody waits for."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from vllm.entrypoints.openai.responses.background import BackgroundResponse, BackgroundResponses
from vllm.entrypoints.openai.responses.bodies import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseBody,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.builder import ResponseBuilder
from vllm.entrypoints.openai.responses.events import Event
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import QueueFullError
from vllm.parser.pieces import ContentText

USAGE = ResponseUsage(1, InputTokensDetails(0, 0), 1, OutputTokensDetails(0), 2)


class Job:
    """A background response whose model says one word when it may."""

    def __init__(self) -> None:
        self.may_speak = asyncio.Event()
        self.was_closed = False
        self.ended: list[tuple[str, int]] = []
        self.builder = ResponseBuilder(ResponseBody("resp_1", 1, "tiny"))
        self.response = BackgroundResponse(
            self.builder, self._work(), self._end, input_items=[], keeps_events=True
        )

    async def _work(self) -> AsyncIterator[list[Event]]:
        try:
            yield self.builder.start()
            await self.may_speak.wait()
            yield self.builder.add([ContentText("Hi")])
            yield self.builder.finish("stop", USAGE)
        finally:
            self.was_closed = True

    def _end(self, body: ResponseBody, events: Sequence[bytes]) -> None:
        self.ended.append((body.status, len(events)))

    def start(self) -> None:
        """Begin."""
        self.response.start(self.builder.queue(), ServerState())


async def read(response: BackgroundResponse, starting_after: int = -1) -> list[bytes]:
    """All its events."""
    return [event async for event in response.follow(starting_after)]


async def test_followers_get_what_was_and_what_comes() -> None:
    job = Job()
    job.start()
    early = asyncio.create_task(read(job.response))
    await asyncio.sleep(0.01)
    late = asyncio.create_task(read(job.response, 1))
    assert job.ended == []
    job.may_speak.set()
    whole = await early
    assert await late == whole[2:]
    assert await read(job.response) == whole
    assert job.ended == [("completed", len(whole))]
    assert job.was_closed
    names = [event.split(b"\n")[0].removeprefix(b"event: response.") for event in whole]
    assert names[:3] == [b"created", b"queued", b"in_progress"]
    assert names[-1] == b"completed"


async def test_the_end_is_told_when_the_response_is_stored() -> None:
    job = Job()
    stored_at: list[int] = []
    seen: list[bytes] = []

    async def follow() -> None:
        async for event in job.response.follow():
            seen.append(event)
            if b"response.completed" in event:
                stored_at.append(len(job.ended))

    job.start()
    follower = asyncio.create_task(follow())
    job.may_speak.set()
    await follower
    assert stored_at == [1]


@pytest.mark.parametrize("num_turns", [0, 5])
async def test_one_is_stopped_before_its_first_step_or_later(num_turns: int) -> None:
    job = Job()
    job.start()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await job.response.cancel()
    await job.response.cancel()
    assert [status for status, _ in job.ended] == ["cancelled"]
    assert job.was_closed == (num_turns > 0)
    assert (await read(job.response))[-1].startswith(b"event: response.failed")


async def test_their_number_is_bounded() -> None:
    responses = BackgroundResponses(max_running=1)
    responses.check_room()
    job = Job()
    responses.add(job.response)
    assert responses.find("resp_1") is job.response
    with pytest.raises(QueueFullError, match="1 background responses"):
        responses.check_room()
    responses.discard("resp_1")
    responses.check_room()
    assert responses.find("resp_1") is None
