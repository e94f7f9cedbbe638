"""Compiles grammars beside the step loop, and keeps what it compiled."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend import Backend
    from vllm.v1.structured_output.grammar import CompiledGrammar
    from vllm.v1.structured_output.trial import TrialProcess

_NUM_THREADS = 2
_MAX_CACHED = 256
# Nothing in them is the client's but texts, of bounded size.
_HARMLESS_KINDS = ("choice", "json_object")
_MAX_CACHED_BYTES = 16 << 20


class GrammarCompiler:
    """Turns what requests ask for into compiled grammars, each once.

    Owns: its threads, the backend (made with the first grammar), the latest results, failures
    included. One thread may call it.

    Args:
        make_backend: Reads the vocabulary.
        make_trial: Makes a child that tries grammars first, see ``trial``.
    """

    def __init__(
        self, make_backend: Callable[[], Backend], make_trial: Callable[[], TrialProcess]
    ) -> None:
        self._make_backend = make_backend
        self._backend: Backend | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._results: OrderedDict[bytes, Future[CompiledGrammar]] = OrderedDict()
        self._num_bytes = 0
        self._make_trial = make_trial
        self._local = threading.local()
        self._trials: list[TrialProcess] = []

    @property
    def backend(self) -> Backend:
        """What compiled the first grammar."""
        with self._lock:
            if self._backend is None:
                self._backend = self._make_backend()
            return self._backend

    def submit(self, params: StructuredOutputsParams) -> Future[CompiledGrammar]:
        """Return the compiled grammar when it is ready; the result must be copied, not advanced.

        The future fails with UserInputError for what is no grammar, or too large a one.
        """
        key = msgspec.msgpack.encode(params)
        known = self._results.get(key)
        if known is not None:
            self._results.move_to_end(key)
            return known
        future = self._pool.submit(self._compile, params)
        self._results[key] = future
        self._num_bytes += len(key)
        while len(self._results) > _MAX_CACHED or (
            self._num_bytes > _MAX_CACHED_BYTES and len(self._results) > 1
        ):
            oldest, _ = self._results.popitem(last=False)
            self._num_bytes -= len(oldest)
        return future

    def shutdown(self) -> None:
        """Stop the children and the threads; waits for what was tried and is being compiled."""
        for trial in self._trials:
            trial.kill()
        self._pool.shutdown(cancel_futures=True)
        for trial in self._trials:
            trial.stop()

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        if params.kind not in _HARMLESS_KINDS:
            self._own_trial.check(params)
        return self.backend.compile(params)

    @property
    def _own_trial(self) -> TrialProcess:
        """The child of the thread that asks."""
        trial: TrialProcess | None = getattr(self._local, "trial", None)
        if trial is None:
            trial = self._local.trial = self._make_trial()
            self._trials.append(trial)
        return trial
