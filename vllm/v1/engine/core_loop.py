"""The engine core's loop: take messages, step, send outputs. The same in a process or a thread."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from vllm.exceptions import EngineError, UserInputError, VllmError
from vllm.logger import init_logger
from vllm.v1.engine.wire import (
    AbortRequests,
    AddRequests,
    Answer,
    Ask,
    CoreStatus,
    ErrorInfo,
    FromCore,
    KVCacheInfo,
    RequestRejected,
    Shutdown,
    StepOutputs,
    TellAll,
    ToCore,
    WithdrawPrefixes,
)
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest

logger = init_logger(__name__)

# Of several front ends the one that counts what the scheduler did; 0 is who started them all.
STATISTICS_CLIENT = 1

# What one request may be refused with; anything else (InvariantError above all) ends the core.
_REFUSALS = (UserInputError, EngineError)


class SteppedCore(Protocol):
    """What the loop drives; ``EngineCore`` in production.

    Attributes:
        load_s: Seconds its model took to load.
    """

    load_s: float

    def warm_up(self) -> None:
        """Begin, beside the loop, what would make a first request of some kind wait."""

    def make_request(self, request: EngineCoreRequest) -> Any:
        """Prepare a request (hash its prompt); any thread may call it."""

    def add_request(self, request: Any) -> None:
        """Queue a prepared request."""

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests and free their blocks."""

    def withdraw_prefixes(self, names: list[str]) -> None:
        """Let go of what is held for other engines."""

    def has_work(self) -> bool:
        """Whether a step has anything to do."""

    def step(self) -> tuple[Mapping[int, EngineCoreOutputs], bool]:
        """Run one step; return outputs by client, and whether anything was done."""

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, when waiting requests may have come on."""

    def bind_updates(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called, by the step loop, when there are updates of the cache in a step."""

    def find_wait_s(self) -> float:
        """Return for how long nothing need be looked at, after a step that found nothing to do."""

    def take_refusals(self) -> list[tuple[str, VllmError]]:
        """Drain the queued requests that turned out to be wrong, and what is wrong with them."""

    def take_status(self) -> CoreStatus | None:
        """Drain what front ends must hear to share requests out; None: there is nothing new."""

    def tell_all(self) -> None:
        """Let the next status say all there is."""

    def answer(self, message: Ask, tell: Callable[[Answer], None]) -> None:
        """Answer a question, now or in a later step."""

    def get_kv_cache_info(self) -> KVCacheInfo:
        """Describe the KV cache."""

    def find_fault(self) -> str | None:
        """Return what is wrong with the workers; None: nothing. Any thread may ask."""

    def describe_state(self) -> str:
        """Say what the core was at, for the log of its death."""

    def shutdown(self) -> None:
        """Release the device."""


_Handler = Callable[[Any, int], None]
_Item = tuple[_Handler, Any, int]


class Progress:
    """How far the step loop got, for a watcher in another thread.

    Owns: ``count`` and ``busy``, written by the loop's thread only.
    """

    def __init__(self) -> None:
        self.count = 0
        self.busy = False

    def tick(self) -> None:
        """Note that the loop got on."""
        self.count += 1


class CoreLoop:
    """Feeds a core with messages and steps it until told to stop.

    Args:
        core: The engine core; only :meth:`run`'s thread touches it (``make_request`` excepted).
        emit: Takes every message to the front end, or to all of several.
        progress: Where to note progress.
        emit_to: Takes a message to one of several front ends; None: there is one.
    """

    def __init__(
        self,
        core: SteppedCore,
        emit: Callable[[FromCore], None],
        progress: Progress | None = None,
        emit_to: Callable[[int, FromCore], None] | None = None,
    ) -> None:
        self._core = core
        self._emit = emit
        self._several_clients = emit_to is not None
        self._emit_to = emit_to or (lambda _client, message: emit(message))
        self._progress = progress or Progress()
        # (handler, its argument, whose it is): prompts are hashed by the submitting thread, beside
        # the steps.
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._stopped = False
        self._did_work = True
        # Answers that are told next, and whom.
        self._answers: list[tuple[int, Answer]] = []
        self._handlers: dict[type, _Handler] = {
            AbortRequests: self._abort,
            WithdrawPrefixes: self._withdraw,
            Ask: self._ask,
            TellAll: self._tell_all,
            Shutdown: self._stop,
        }
        core.bind_wake(self.wake)
        core.bind_updates(self._publish_updates)

    def submit(self, message: ToCore, client: int = 0) -> None:
        """Hand in a message of a front end, from one thread for each."""
        if not isinstance(message, AddRequests):
            self._inbox.put((self._handlers[type(message)], message, client))
            return
        made: list[Any] = []
        for request in message.requests:
            try:
                made.append(self._core.make_request(request))
            except _REFUSALS as error:
                self._reject(request.request_id, error)
        if made:
            self._inbox.put((self._add, made, client))

    def submit_warm_up(self, delay_s: float) -> None:
        """Have the core warm up after a delay, or after one more while it has work; any thread may.

        Steps would share the processors with what nobody waits for yet.
        """
        timer = threading.Timer(delay_s, self._inbox.put, [(self._warm_up, delay_s, 0)])
        timer.daemon = True
        timer.start()

    def wake(self) -> None:
        """Have a step tried at once if the loop waits; any thread may ask."""
        self._inbox.put((lambda _message, _client: None, None, 0))

    def run(self) -> None:
        """Serve until a Shutdown message.

        Raises:
            Exception: Whatever a step raises; the core is beyond use then.
        """
        while True:
            self._take_messages()
            if self._stopped:
                return
            if self._core.has_work():
                self._step()

    def run_once(self) -> None:
        """Handle what has been submitted and run one step, if there is work."""
        self._take_submitted()
        if not self._stopped and self._core.has_work():
            self._step()

    def wait(self) -> None:
        """Wait for a message, if the last step found nothing to do, for as long as that is safe."""
        if self._did_work:
            return
        try:
            self._handle(self._inbox.get(timeout=self._core.find_wait_s()))
        except queue.Empty:
            return

    def _step(self) -> None:
        self._progress.busy = True
        self._progress.tick()
        outputs, self._did_work = self._core.step()
        # First: who reads an answer and goes on must find its prefix known.
        self._publish_updates()
        self._emit_answers()
        for request_id, error in self._core.take_refusals():
            # To all: those that do not know it pass over it.
            self._reject(request_id, error)
        if self._several_clients:
            outputs = _with_statistics_for(STATISTICS_CLIENT, outputs)
        for client, client_outputs in outputs.items():
            self._emit_to(client, StepOutputs(client_outputs))

    def _publish_updates(self) -> None:
        changes = self._core.take_status()
        if changes is not None:
            self._emit(changes)

    def _take_messages(self) -> None:
        """Handle what has come; wait for a message when there is no work."""
        self._progress.tick()
        if not self._core.has_work():
            self._progress.busy = False
            self._handle(self._inbox.get())
        else:
            self.wait()
        self._take_submitted()

    def _take_submitted(self) -> None:
        while not self._stopped:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._handle(item)

    def _handle(self, item: _Item) -> None:
        self._progress.busy = True
        handler, argument, client = item
        handler(argument, client)
        self._did_work = True

    def _add(self, requests: Sequence[Any], _client: int) -> None:
        for request in requests:
            try:
                self._core.add_request(request)
            except _REFUSALS as error:
                self._reject(request.request_id, error)

    def _reject(self, request_id: str, error: VllmError) -> None:
        logger.warning("Request %s is refused: %s", request_id, error)
        self._emit(RequestRejected(request_id, ErrorInfo.from_exception(error)))

    def _abort(self, message: AbortRequests, _client: int) -> None:
        self._core.abort_requests(message.request_ids)

    def _withdraw(self, message: WithdrawPrefixes, _client: int) -> None:
        self._core.withdraw_prefixes(message.names)

    def _ask(self, message: Ask, client: int) -> None:
        self._core.answer(message, lambda answer: self._answers.append((client, answer)))
        self._publish_updates()
        self._emit_answers()

    def _emit_answers(self) -> None:
        answers, self._answers = self._answers, []
        for client, answer in answers:
            self._emit_to(client, answer)

    def _tell_all(self, _message: TellAll, _client: int) -> None:
        self._core.tell_all()
        self._publish_updates()

    def _warm_up(self, delay_s: float, _client: int) -> None:
        if self._core.has_work():
            self.submit_warm_up(delay_s)
        else:
            self._core.warm_up()

    def _stop(self, _message: Shutdown, _client: int) -> None:
        self._stopped = True


def _with_statistics_for(
    client: int, outputs: Mapping[int, EngineCoreOutputs]
) -> Mapping[int, EngineCoreOutputs]:
    """Return a step's outputs with its statistics in one client's: they count once."""
    held = next((bundle for bundle in outputs.values() if bundle.scheduler_stats), None)
    if held is None:
        return outputs
    stats, held.scheduler_stats = held.scheduler_stats, None
    moved = dict(outputs)
    moved.setdefault(client, EngineCoreOutputs()).scheduler_stats = stats
    return moved
