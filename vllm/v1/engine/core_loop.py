"""The engine core's loop: take messages, step, send outputs. The same in a process or a thread."""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from vllm.exceptions import EngineError, UserInputError, VllmError
from vllm.logger import init_logger
from vllm.v1.engine.wire import (
    AbortRequests,
    AddRequest,
    AskCacheView,
    AskHeldPrefixes,
    CacheSnapshot,
    ErrorInfo,
    FromCore,
    HeldPrefixes,
    KVCacheInfo,
    PrefixCacheReset,
    RequestRejected,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
    ToCore,
)
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest, HeldPrefix

logger = init_logger(__name__)

# With requests that cannot be scheduled yet, the loop looks again after this long.
_NOTHING_TO_DO_WAIT_S = 0.002

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

    def has_work(self) -> bool:
        """Whether a step has anything to do."""

    def step(self) -> tuple[Mapping[int, EngineCoreOutputs], bool]:
        """Run one step; return outputs by client, and whether anything was done."""

    def take_refusals(self) -> list[tuple[str, VllmError]]:
        """Drain the queued requests that turned out to be wrong, and what is wrong with them."""

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes; return whether that was possible."""

    def get_held_prefixes(self, forget: str = "") -> tuple[Sequence[HeldPrefix], bool]:
        """Let go of one prefix, if asked to; return those that are held, and whether it was."""

    def view_cache(self) -> bytes:
        """Return what the cache holds, as JSON; empty where nobody watches."""

    def get_kv_cache_info(self) -> KVCacheInfo:
        """Describe the KV cache."""

    def find_fault(self) -> str | None:
        """Return what is wrong with the workers; None: nothing. Any thread may ask."""

    def describe_state(self) -> str:
        """Say what the core was at, for the log of its death."""

    def shutdown(self) -> None:
        """Release the device."""


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
        emit: Takes every message to the front end.
        progress: Where to note progress.
    """

    def __init__(
        self,
        core: SteppedCore,
        emit: Callable[[FromCore], None],
        progress: Progress | None = None,
    ) -> None:
        self._core = core
        self._emit = emit
        self._progress = progress or Progress()
        # (handler, its argument): prompts are hashed by the submitting thread, beside the steps.
        self._inbox: queue.SimpleQueue[tuple[Callable[[Any], None], Any]] = queue.SimpleQueue()
        self._stopped = False
        self._did_work = True
        self._handlers: dict[type, Callable[[Any], None]] = {
            AbortRequests: self._abort,
            ResetPrefixCache: self._reset,
            AskHeldPrefixes: self._tell_held,
            AskCacheView: self._tell_view,
            Shutdown: self._stop,
        }

    def submit(self, message: ToCore) -> None:
        """Hand in a message, from any one thread."""
        if not isinstance(message, AddRequest):
            self._inbox.put((self._handlers[type(message)], message))
            return
        try:
            request = self._core.make_request(message.request)
        except _REFUSALS as error:
            self._reject(message.request.request_id, error)
            return
        self._inbox.put((self._add, request))

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

    def _step(self) -> None:
        self._progress.busy = True
        self._progress.tick()
        outputs, self._did_work = self._core.step()
        for request_id, error in self._core.take_refusals():
            self._reject(request_id, error)
        for client_outputs in outputs.values():
            self._emit(StepOutputs(client_outputs))

    def _take_messages(self) -> None:
        """Handle what has come; wait for a message when there is no work."""
        self._progress.tick()
        if not self._core.has_work():
            self._progress.busy = False
            self._handle(self._inbox.get())
        elif not self._did_work:
            try:
                self._handle(self._inbox.get(timeout=_NOTHING_TO_DO_WAIT_S))
            except queue.Empty:
                return
        self._take_submitted()

    def _take_submitted(self) -> None:
        while not self._stopped:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._handle(item)

    def _handle(self, item: tuple[Callable[[Any], None], Any]) -> None:
        self._progress.busy = True
        handler, argument = item
        handler(argument)
        self._did_work = True

    def _add(self, request: Any) -> None:
        try:
            self._core.add_request(request)
        except _REFUSALS as error:
            self._reject(request.request_id, error)

    def _reject(self, request_id: str, error: VllmError) -> None:
        logger.warning("Request %s is refused: %s", request_id, error)
        self._emit(RequestRejected(request_id, ErrorInfo.from_exception(error)))

    def _abort(self, message: AbortRequests) -> None:
        self._core.abort_requests(message.request_ids)

    def _reset(self, message: ResetPrefixCache) -> None:
        success = self._core.reset_prefix_cache(
            message.reset_running_requests, message.reset_connector
        )
        self._emit(PrefixCacheReset(message.call_id, success))

    def _tell_held(self, message: AskHeldPrefixes) -> None:
        prefixes, forgotten = self._core.get_held_prefixes(message.forget)
        self._emit(HeldPrefixes(message.call_id, list(prefixes), forgotten))

    def _tell_view(self, message: AskCacheView) -> None:
        began = time.perf_counter()
        body = self._core.view_cache()
        self._emit(CacheSnapshot(message.call_id, body, time.perf_counter() - began))

    def _stop(self, _: Shutdown) -> None:
        self._stopped = True
