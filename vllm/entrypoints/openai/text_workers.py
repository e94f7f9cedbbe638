"""Work on long texts (templates, tokenising) in threads beside the event loop.

    texts of        threads
    < 32,000 ch.       2        a question never waits for a book
    < 500,000          2
    longer             1

Within a lane, the work whose end is due first goes first: due is the lane's clock at its arrival
and its own size, and the clock runs by the sizes of what has begun. So a short text overtakes long
ones that wait, but each waits for a bounded amount of work only.
"""

import asyncio
import contextvars
import heapq
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Characters below which work is a lane's, and the lane's threads.
_LANES = ((32_000, 2), (500_000, 2), (None, 1))
# Nothing is sorted by more than this.
_COUNTED_CHARS = 1_000_000
# An idle thread ends after this long.
_IDLE_S = 10.0


@dataclass(order=True, slots=True)
class _Job(Generic[T]):
    """Work that somebody waits for; ``is_dropped``: nobody does any more.

    Attributes:
        due: Where it stands in its lane's queue.
        number: Tells apart what is due at once.
    """

    due: int
    number: int
    num_chars: int = field(compare=False)
    work: Callable[["_Job[T]"], T] = field(compare=False)
    future: "asyncio.Future[T]" = field(compare=False)
    loop: asyncio.AbstractEventLoop = field(compare=False)
    context: contextvars.Context = field(compare=False)
    is_dropped: bool = field(default=False, compare=False)

    def run(self) -> None:
        """Do the work, unless nobody waits, and tell the event loop what came of it."""
        if self.is_dropped:
            return
        result: T | None = None
        error: BaseException | None = None
        try:
            result = self.context.run(self.work, self)
        except BaseException as raised:  # the edge of a thread: whoever waits gets it
            error = raised
        try:
            self.loop.call_soon_threadsafe(self._tell, result, error)
        except RuntimeError:
            # The event loop has closed: the server is gone, and so is whoever waited.
            return

    def _tell(self, result: T | None, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)  # type: ignore[arg-type]


class _Lane:
    """Threads for texts of one size.

    Owns: its queue, its clock and its threads.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._queue: list[_Job[Any]] = []
        self._clock = 0
        self._num_threads = 0
        self._num_idle = 0
        self._has_work = threading.Condition()

    def due(self, num_chars: int) -> int:
        with self._has_work:
            return self._clock + num_chars

    def add(self, job: _Job[Any]) -> None:
        with self._has_work:
            heapq.heappush(self._queue, job)
            if self._num_idle >= len(self._queue):
                self._has_work.notify()
            elif self._num_threads < self._max_threads:
                self._num_threads += 1
                # A daemon: work that nobody waits for keeps no process from ending.
                threading.Thread(target=self._run, name="texts", daemon=True).start()

    def drop(self, job: _Job[Any]) -> None:
        """Let go of a job; what it holds goes with it if it has not begun."""
        with self._has_work:
            job.is_dropped = True
            if job in self._queue:
                self._queue.remove(job)
                heapq.heapify(self._queue)

    def _run(self) -> None:
        while (job := self._take()) is not None:
            job.run()

    def _take(self) -> _Job[Any] | None:
        """Wait for work; None: there has been none for a while, and this thread has left."""
        with self._has_work:
            self._num_idle += 1
            has_work = self._has_work.wait_for(lambda: self._queue, _IDLE_S)
            self._num_idle -= 1
            if not has_work:
                self._num_threads -= 1
                return None
            job = heapq.heappop(self._queue)
            self._clock += job.num_chars
            return job


class TextWorkers:
    """Does work on texts in threads: bounded, short texts first, and dropped with its client.

    Owns: the threads.
    """

    def __init__(self) -> None:
        self._lanes = [(limit, _Lane(count)) for limit, count in _LANES]
        self._numbers = itertools.count()

    async def run(self, num_chars: int, work: Callable[[Callable[[], bool]], T]) -> T:
        """Return what ``work`` returns, in a thread.

        Cancelled, it is taken out of its queue. If it has begun, it is told by what it is called
        with, and goes on alone until it asks.

        Args:
            num_chars: Of the texts, all together.
            work: Called with a function that says whether somebody still waits.
        """
        lane = next(lane for limit, lane in self._lanes if limit is None or num_chars < limit)
        loop = asyncio.get_running_loop()
        job: _Job[T] = _Job(
            due=lane.due(num_chars),
            number=next(self._numbers),
            num_chars=num_chars,
            work=lambda job: work(lambda: not job.is_dropped),
            future=loop.create_future(),
            loop=loop,
            context=contextvars.copy_context(),
        )
        lane.add(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            lane.drop(job)
            raise


def count_chars(value: Any) -> int:
    """Return about how many characters stand in a JSON value; of very many, not all are counted."""
    total = 0
    waiting = [value]
    while waiting and total < _COUNTED_CHARS:
        total += 1
        item = waiting.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, Sequence):
            waiting += item
    return total
