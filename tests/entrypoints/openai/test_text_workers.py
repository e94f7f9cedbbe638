"""Work in threads: bounded, short texts first, dropped with whoever waited. Events, no clocks."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from vllm.entrypoints.openai.text_workers import TextWorkers, count_chars

SMALL, MEDIUM, LARGE = 10, 100_000, 1_000_000


class Gate:
    """Work that begins, and ends when it is let."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        self.begun, self.opened, self.ended = (threading.Event() for _ in range(3))
        self.was_wanted: bool | None = None

    def __call__(self, is_wanted: Callable[[], bool]) -> str:
        self._log.append(self._name)
        self.begun.set()
        assert self.opened.wait(30)
        self.was_wanted = is_wanted()
        self.ended.set()
        return self._name


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


async def start(workers: TextWorkers, size: int, work: Gate) -> asyncio.Task[str]:
    """Hand in work; it stands in its queue, or runs, when this returns."""
    task = asyncio.create_task(workers.run(size, work))
    await asyncio.sleep(0)
    return task


async def test_results_and_errors_come_back() -> None:
    workers = TextWorkers()
    assert await workers.run(SMALL, lambda _: 7) == 7

    def fail(_: Callable[[], bool]) -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        await workers.run(LARGE, fail)


async def test_short_texts_do_not_wait_for_long_ones() -> None:
    workers, log = TextWorkers(), []
    gates = [Gate(log, f"long {i}") for i in range(8)]
    tasks = [await start(workers, LARGE, gate) for gate in gates]
    await until(gates[0].begun)
    assert await workers.run(SMALL, lambda _: "short") == "short"
    assert await workers.run(MEDIUM, lambda _: "middle") == "middle"
    assert log == ["long 0"]  # and one at a time
    for gate in gates:
        gate.opened.set()
    assert await asyncio.gather(*tasks) == [f"long {i}" for i in range(8)]


async def test_order_is_by_what_is_due() -> None:
    workers, log = TextWorkers(), []
    first = Gate(log, "first")
    tasks = [await start(workers, LARGE, first)]
    await until(first.begun)
    for name, size in (("long", 10), ("short 0", 4), ("short 1", 4)):
        gate = Gate(log, name)
        gate.opened.set()
        tasks.append(await start(workers, size * LARGE, gate))
    first.opened.set()
    await asyncio.gather(*tasks)
    assert log == ["first", "short 0", "short 1", "long"]


async def test_a_long_text_waits_for_so_much_only() -> None:
    workers, log = TextWorkers(), []
    gate = Gate(log, "0")
    running = await start(workers, LARGE, gate)
    await until(gate.begun)
    long = Gate(log, "long")
    long.opened.set()
    waiting = await start(workers, 5 * LARGE, long)
    # One shorter text after another, each there before the one before it has ended.
    for i in range(1, 9):
        after = Gate(log, str(i))
        following = await start(workers, 2 * LARGE, after)
        gate.opened.set()
        await running
        gate, running = after, following
    gate.opened.set()
    await asyncio.gather(running, waiting)
    # The clock has passed 5 when the second of them begins.
    assert log.index("long") <= 3


async def test_what_nobody_waits_for_never_begins() -> None:
    workers, log = TextWorkers(), []
    first = Gate(log, "first")
    running = await start(workers, LARGE, first)
    await until(first.begun)
    left = [await start(workers, LARGE, Gate(log, f"left {i}")) for i in range(20)]
    last = Gate(log, "last")
    last.opened.set()
    staying = await start(workers, LARGE, last)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    first.opened.set()
    assert await running == "first"
    assert await staying == "last"
    assert log == ["first", "last"]


async def test_what_has_begun_is_told_that_nobody_waits() -> None:
    workers, log = TextWorkers(), []
    gate = Gate(log, "left")
    task = await start(workers, LARGE, gate)
    await until(gate.begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.opened.set()
    await until(gate.ended)
    assert gate.was_wanted is False


async def test_threads_are_few() -> None:
    workers, log = TextWorkers(), []
    gates = [Gate(log, str(i)) for i in range(40)]
    before = threading.active_count()
    tasks = [await start(workers, SMALL, gate) for gate in gates]
    await until(gates[0].begun)
    await until(gates[1].begun)
    # Besides ours, what waits for events here.
    assert threading.active_count() - before <= 2 + 2
    assert len(log) == 2
    for gate in gates:
        gate.opened.set()
    await asyncio.gather(*tasks)
    assert sorted(log, key=int) == [str(i) for i in range(40)]


def test_chars_are_counted_in_whatever_holds_them() -> None:
    assert count_chars("abc") == 4
    assert 6 <= count_chars([{"a": "abc", "b": [None, 1, "de"]}, ("f",)]) < 20
    assert count_chars([["x"]] * 5_000_000) <= 1_000_001
