"""``/cache/events``: its gate, and its stream."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from vllm.entrypoints.openai.cache_feed import CacheFeed
from vllm.exceptions import EngineDeadError
from vllm.v1.engine.questions import CacheSnapshot, ViewCache


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Viewed:
    """An engine whose cache changes with every look."""

    def __init__(self, took_s: float = 0.0) -> None:
        self.took_s = took_s
        self.looks = 0

    async def ask(self, question: ViewCache) -> CacheSnapshot:
        self.looks += 1
        return CacheSnapshot(b'{"look":%d}' % self.looks, self.took_s)


@pytest.fixture
def dev(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Any]) -> Callable[..., Any]:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    return serve


async def test_there_is_none_without_development_mode(
    monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Any]
) -> None:
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    served = serve()
    for path in ("/cache/events", "/v1/cache/explain/x"):
        assert (await served.client.get(path)).status_code == 404


async def test_a_key_guards_what_it_shows(dev: Callable[..., Any]) -> None:
    served = dev(api_keys=("k",))
    for path in ("/cache/events", "/v1/cache/explain/x"):
        assert (await served.client.get(path)).status_code == 401
        wrong = await served.client.get(path, headers={"Authorization": "Bearer no"})
        assert wrong.status_code == 401


async def test_a_stream_ends_when_the_server_drains(dev: Callable[..., Any]) -> None:
    served = dev()
    served.engine.on_view = served.state.start_drain
    response = await served.client.get("/cache/events")
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    first, last = response.text.rstrip("\n").split("\n\n")
    assert json.loads(first.removeprefix("data: ")) == {"look": 1}
    assert last == "data: [DONE]"


async def test_a_dead_engine_is_an_event(dev: Callable[..., Any]) -> None:
    served = dev()

    def die() -> None:
        raise EngineDeadError("gone")

    served.engine.on_view = die
    events = (await served.client.get("/cache/events")).text.rstrip("\n").split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["error"]["message"] == "gone"
    assert events[1:] == ["data: [DONE]"]


async def test_all_who_watch_share_a_look() -> None:
    clock, engine = Clock(), Viewed()
    feed = CacheFeed(clock, timeout_s=0.0)
    seen = await asyncio.gather(*(feed.after(0, engine) for _ in range(5)))
    assert seen == [(1, b'{"look":1}')] * 5
    assert await feed.after(1, engine) is None
    clock.now = 1.0
    assert await feed.after(1, engine) == (2, b'{"look":2}')
    assert engine.looks == 2


async def test_a_look_that_takes_long_is_taken_seldom() -> None:
    clock, engine = Clock(), Viewed(took_s=0.5)
    feed = CacheFeed(clock, timeout_s=0.0)
    await feed.after(0, engine)
    clock.now = 24.0
    assert await feed.after(1, engine) is None
    clock.now = 25.0
    assert await feed.after(1, engine) is not None


async def test_who_leaves_while_waiting_keeps_nobody() -> None:
    clock, engine = Clock(), Viewed()
    feed = CacheFeed(clock, timeout_s=1000.0)
    await feed.after(0, engine)
    waiting = asyncio.create_task(feed.after(1, engine))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    clock.now = 1.0
    assert await feed.after(1, engine) == (2, b'{"look":2}')
