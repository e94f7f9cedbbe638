"""Responses that are made while nobody waits for them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from vllm.entrypoints.openai.errors import describe_late_exception
from vllm.entrypoints.openai.responses.bodies import ResponseBody
from vllm.entrypoints.openai.responses.builder import ResponseBuilder
from vllm.entrypoints.openai.responses.events import Event, encode_events
from vllm.entrypoints.openai.responses.store import Item
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import QueueFullError

MAX_RUNNING = 1024


class BackgroundResponse:
    """One of them.

    Owns: its task and the events so far.

    Args:
        builder: Of the response, queued.
        work: Yields its events; ends with the response.
        on_end: Called with the response and its events when it has ended.
        input_items: What its request brought.
        keeps_events: Whether its events may be asked for again.
    """

    def __init__(
        self,
        builder: ResponseBuilder,
        work: AsyncIterator[list[Event]],
        on_end: Callable[[ResponseBody, Sequence[bytes]], None],
        *,
        input_items: Sequence[Item],
        keeps_events: bool,
    ) -> None:
        self._builder = builder
        self._work = work
        self._on_end = on_end
        self._input_items = input_items
        self._keeps_events = keeps_events
        self._events: list[bytes] = []
        self._has_more = asyncio.Event()
        self._has_ended = False
        self._task: asyncio.Task[None] | None = None

    @property
    def body(self) -> ResponseBody:
        """The response as it is."""
        return self._builder.body

    @property
    def input_items(self) -> Sequence[Item]:
        """What its request brought."""
        return self._input_items

    @property
    def keeps_events(self) -> bool:
        """Whether ``follow`` may be called."""
        return self._keeps_events

    def start(self, queued: list[Event], state: ServerState) -> None:
        """Begin; a drain of the server waits for it.

        Args:
            queued: The events told already.
            state: The server's.
        """
        self._tell(queued)
        self._task = asyncio.create_task(self._run(state))

    async def _run(self, state: ServerState) -> None:
        last: list[Event] = []
        try:
            with state.open_request():
                async for events in self._work:
                    # The last ones are told when the response is stored: it may be continued then.
                    self._tell(last)
                    last = events
        except asyncio.CancelledError:
            last = [*last, *self._builder.cancel()]
        except Exception as error:  # the edge of a response: nothing above could still answer
            described = describe_late_exception(error, f"Background response {self.body.id}")
            last = [*last, *self._builder.fail(described)]
        self._end(last)

    def _end(self, last: list[Event]) -> None:
        encoded = self._encode(last)
        self._on_end(self.body, [*self._events, *encoded])
        self._events += encoded
        self._has_ended = True
        self._wake()

    def _tell(self, events: list[Event]) -> None:
        self._events += self._encode(events)
        self._wake()

    def _encode(self, events: list[Event]) -> list[bytes]:
        return encode_events(events) if self._keeps_events else []

    def _wake(self) -> None:
        delta, self._has_more = self._has_more, asyncio.Event()
        delta.set()

    async def follow(self, starting_after: int = -1) -> AsyncIterator[bytes]:
        """Yield the encoded events behind a number: those told, then those to come."""
        position = starting_after + 1
        while True:
            has_more = self._has_more
            while position < len(self._events):
                yield self._events[position]
                position += 1
            if self._has_ended:
                return
            await has_more.wait()

    async def cancel(self) -> None:
        """Stop it and wait until that is done; nothing if it has ended."""
        if self._task is None or self._has_ended:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._has_ended:  # it was stopped before its first step
            self._end(self._builder.cancel())


class BackgroundResponses:
    """Those that have not ended.

    Owns: them, by id.

    Args:
        max_running: How many may be at a time.
    """

    def __init__(self, max_running: int = MAX_RUNNING) -> None:
        self._max_running = max_running
        self._running: dict[str, BackgroundResponse] = {}

    def check_room(self) -> None:
        """Refuse another one where too many run.

        Raises:
            QueueFullError: They do.
        """
        if len(self._running) >= self._max_running:
            raise QueueFullError(
                f"{self._max_running} background responses run already: wait for some, or "
                "cancel them."
            )

    def add(self, response: BackgroundResponse) -> None:
        """Keep one until it is discarded."""
        self._running[response.body.id] = response

    def discard(self, response_id: str) -> None:
        """Forget one that has ended."""
        self._running.pop(response_id, None)

    def find(self, response_id: str) -> BackgroundResponse | None:
        """Return one that runs; None if there is none by this id."""
        return self._running.get(response_id)
