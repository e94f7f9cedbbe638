"""The front end's handles of an engine core, whatever it runs in.

ProcessCore   its own process            the default                     (process_client.py)
ThreadCore    a thread of this process   AsyncLLM without multiprocessing
InlineCore    the caller's own thread    LLM without multiprocessing
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from vllm.exceptions import EngineDeadError, EngineError, VllmError
from vllm.logger import init_logger
from vllm.v1.engine.core_loop import CoreLoop, SteppedCore
from vllm.v1.engine.wire import (
    Dead,
    ErrorInfo,
    FromCore,
    Ready,
    Shutdown,
    StartFailed,
    ToCore,
)

logger = init_logger(__name__)

# Longer than a core takes at its end: its step, up to 4 s of writes to the cache folder, and 3 s
# for each thread that does it. A busy machine makes that several times as long.
STOP_TIMEOUT_S = 20.0

CoreBuilder = Callable[[], SteppedCore]


class EngineCoreHandle(Protocol):
    """An engine core that starts, serves or has died."""

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the core is dead; None while it lives. Any thread may ask."""

    def wait_ready(self) -> Ready:
        """Block until the core serves; further calls give the same answer.

        Raises:
            VllmError: The core cannot start; the same error that it met.
        """

    def send(self, message: ToCore) -> None:
        """Send a message; to a dead core it goes nowhere."""

    def living(self) -> Sequence[int]:
        """Return the data parallel ranks that serve, of several cores behind this handle."""

    def next_message(self) -> FromCore:
        """Block for the core's next message; must not be used after :meth:`subscribe`."""

    def shutdown(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Stop the core, by force after ``timeout`` seconds. Idempotent."""


class AsyncEngineCoreHandle(EngineCoreHandle, Protocol):
    """A handle whose messages come by themselves."""

    def subscribe(self, callback: Callable[[FromCore], None]) -> None:
        """Have every further message given to ``callback``, in the handle's own thread."""


class Mailbox:
    """Messages on their way from a handle's thread to its user: queued, or called back."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[FromCore] = queue.SimpleQueue()
        self._callback: Callable[[FromCore], None] | None = None
        self._lock = threading.Lock()

    def put(self, message: FromCore) -> None:
        """Deliver a message."""
        with self._lock:
            if self._callback is None:
                self._queue.put(message)
            else:
                self._callback(message)

    def get(self) -> FromCore:
        """Block for the next message."""
        return self._queue.get()

    def try_get(self) -> FromCore | None:
        """Return the next message if there is one."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def subscribe(self, callback: Callable[[FromCore], None]) -> None:
        """Deliver by ``callback`` from now on; what is queued goes first."""
        with self._lock:
            self._callback = callback
            while (message := self.try_get()) is not None:
                callback(message)


def expect_ready(message: FromCore) -> Ready:
    """Return the first message of a core if it is Ready.

    Raises:
        VllmError: It says that the core cannot start.
    """
    if isinstance(message, Ready):
        return message
    if isinstance(message, StartFailed):
        raise message.error.to_exception()
    if isinstance(message, Dead):
        raise EngineDeadError(f"The engine core did not start: {message.message}")
    raise EngineError(f"The engine core sent {type(message).__name__} before it was ready.")


class InlineCore:
    """Runs the core in whichever thread asks for the next message.

    Owns: the core.

    Args:
        build: Makes the core; called at once.

    Raises:
        VllmError: The core cannot start.
    """

    def __init__(self, build: CoreBuilder) -> None:
        started = time.monotonic()
        self._messages: queue.SimpleQueue[FromCore] = queue.SimpleQueue()
        self._core = build()
        self._loop = CoreLoop(self._core, self._messages.put)
        self._ready = _make_ready(self._core, started)
        self._dead_error: EngineDeadError | None = None
        self._stopped = False

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the core is dead."""
        return self._dead_error

    def wait_ready(self) -> Ready:
        """Return at once: the constructor waited."""
        return self._ready

    def send(self, message: ToCore) -> None:
        """Queue a message for the next step."""
        if self._dead_error is None and not self._stopped:
            self._loop.submit(message)

    def living(self) -> Sequence[int]:
        """Return the one core's rank, unless it is dead."""
        return (0,) if self._dead_error is None else ()

    def next_message(self) -> FromCore:
        """Step the core until it says something.

        Raises:
            Exception: What the step raised, as it was: there is one thread to tell.
            EngineError: It has nothing to do, so that nothing would ever come.
        """
        while self._messages.empty():
            if self._dead_error is not None:
                return Dead(str(self._dead_error))
            try:
                self._loop.wait()
                self._loop.run_once()
            except BaseException as error:
                self._dead_error = EngineDeadError(f"The engine core died: {error!r}")
                raise
            if self._messages.empty() and not self._core.has_work():
                raise EngineError("The engine core is idle: nothing to wait for.")
        return self._messages.get()

    def shutdown(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Release the device."""
        if not self._stopped:
            self._stopped = True
            self._core.shutdown()


class MailboxHandle:
    """What handles share whose messages wait in a mailbox.

    Owns: the mailbox, and why nobody serves any more.
    """

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        self._dead_error: EngineDeadError | None = None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why nobody serves any more."""
        return self._dead_error

    def living(self) -> Sequence[int]:
        """Return the one core's rank, unless it is dead."""
        return (0,) if self._dead_error is None else ()

    def next_message(self) -> FromCore:
        """Block for the next message."""
        return self._mailbox.get()

    def subscribe(self, callback: Callable[[FromCore], None]) -> None:
        """Have messages given to ``callback``, one at a time."""
        self._mailbox.subscribe(callback)


class ThreadCore(MailboxHandle):
    """Runs the core in a thread of this process. A hung step cannot be told or ended here.

    Owns: the thread.

    Args:
        build: Makes the core; called in the thread.
    """

    def __init__(self, build: CoreBuilder) -> None:
        super().__init__()
        self._ready: Ready | None = None
        self._start_error: VllmError | None = None
        self._loop: CoreLoop | None = None
        self._thread = threading.Thread(
            target=self._run, args=(build,), name="engine-core", daemon=True
        )
        self._thread.start()

    def wait_ready(self) -> Ready:
        """Block until the core serves."""
        if self._start_error is not None:
            raise self._start_error
        if self._ready is None:
            try:
                self._ready = expect_ready(self._mailbox.get())
            except VllmError as error:
                self._start_error = error
                raise
        return self._ready

    def send(self, message: ToCore) -> None:
        """Queue a message for the core's thread."""
        if self._loop is not None and self._dead_error is None:
            self._loop.submit(message)

    def shutdown(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Stop the thread after its current step."""
        if self._loop is not None:
            self._loop.submit(Shutdown())
        if threading.current_thread() is self._thread:
            return  # the engine was collected while its message was handed over
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("The engine core's thread did not stop within %g s.", timeout)

    def _run(self, build: CoreBuilder) -> None:
        started = time.monotonic()
        try:
            core = build()
        except Exception as error:  # a process edge: the thread has nobody above it
            if not isinstance(error, VllmError):
                logger.exception("The engine core failed to start.")
            self._mailbox.put(StartFailed(ErrorInfo.from_exception(error)))
            return
        self._loop = CoreLoop(core, self._mailbox.put)
        self._mailbox.put(_make_ready(core, started))
        try:
            self._loop.run()
        except Exception as error:  # a process edge
            logger.exception("The engine core died: %s.", core.describe_state())
            message = f"The engine core died: {error!r}"
            self._dead_error = EngineDeadError(message)
            self._mailbox.put(Dead(message))
        finally:
            core.shutdown()


def _make_ready(core: SteppedCore, started: float) -> Ready:
    start_s = time.monotonic() - started
    return Ready(os.getpid(), core.get_kv_cache_info(), core.load_s, start_s)
