"""The engine's side of one HTTP request: several prompts, one stream of outputs."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm.entrypoints.openai.field_names import NO_NAMES, fields_named, name_fields
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import EngineDeadError, EngineError
from vllm.inputs import TokensPrompt
from vllm.multimodal.inputs import ImageFeature
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.data_parallel.predictions import Prediction
from vllm.v1.engine.questions import Question, Reply
from vllm.v1.engine.submission import CallPart, Submission
from vllm.v1.messages import PrefillStats
from vllm.v1.request_options import NO_OPTIONS, RequestOptions


class EngineClient(Protocol):
    """What the server needs of an engine; ``AsyncLLM`` is one."""

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""

    @property
    def living_ranks(self) -> Sequence[int]:
        """The engine cores that serve, by data parallel rank."""

    async def submit_all(self, submissions: Sequence[Submission]) -> list[Callable[[], None]]:
        """Run requests, begun together; return what aborts each. One is refused: none runs."""

    async def ask(self, question: Question[Reply]) -> Reply:
        """Ask the engine core, or all of several, between two steps."""

    def find_owner(self, cache_salt: str | None) -> tuple[str | None, str | None]:
        """Return in whose name, and under which salt, a request runs that comes in this call."""

    def withdraw_prefixes(self, names: Sequence[str]) -> None:
        """Let go of prompts held for other engines; unknown names are ignored."""

    def find_prediction(self, request_id: str) -> Prediction | None:
        """Return what a router foretold of a request, by its response's id; None: nothing."""

    def find_admission(self, request_id: str) -> PrefillStats | None:
        """Return how a request was admitted, by its response's id; None: it is unknown here."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and how to answer it; ``part``: what it counts for in a call of many."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    options: RequestOptions = NO_OPTIONS
    part: CallPart | None = None
    images: tuple[ImageFeature, ...] = ()


@dataclass(frozen=True, slots=True)
class JobOutput:
    """News of one job."""

    job_index: int
    output: RequestOutput


class EngineStream:
    """The merged outputs of some jobs, in order of arrival.

    The engine puts outputs straight in; what a slow client has not fetched is merged, job by job.
    Not so with log probabilities: clients read a token's text beside them, and how much text each
    of several tokens has given nobody can tell.

    Owns: what nobody has read yet, one output per job or one per step, what the prompts hit, and
    the error that ends the stream. ``close`` must be called; it aborts what still runs.

    Args:
        engine: What answers.
        jobs: What to answer.
        state: Can end the stream.
        timeout_s: How long ``start`` waits for the first output; None: as long as it takes.
        field_names: From names in the engine's errors to the request's own.
    """

    def __init__(
        self,
        engine: EngineClient,
        jobs: Sequence[Job],
        state: ServerState,
        timeout_s: float | None = None,
        field_names: Mapping[str, str] = NO_NAMES,
    ) -> None:
        self._engine = engine
        self._jobs = jobs
        self._state = state
        self._timeout_s = timeout_s
        self._field_names = field_names
        self._waiting: dict[int, deque[RequestOutput]] = {}
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        # What aborts a job, for those that have not finished.
        self._leaves: dict[int, Callable[[], None]] = {}
        self._num_unfinished = len(jobs)
        self._first: JobOutput | None = None
        # Of each job whose output has come.
        self._num_cached: dict[int, int] = {}

    async def start(self) -> None:
        """Hand the jobs to the engine and wait for the first output.

        Errors that come before it can still be told by an HTTP status. When patience ends first,
        the response may begin: a proxy would cut a connection that stays silent for a long prompt.

        Raises:
            VllmError: The engine refuses a job, or fails.
        """
        self._state.add_running(self)
        try:
            with fields_named(self._field_names):
                given = [self._submission(index) for index in range(len(self._jobs))]
                self._leaves = dict(enumerate(await self._engine.submit_all(given)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    self._first = await self._next()
        except BaseException:
            await self.close()
            raise

    @property
    def cache_status(self) -> dict[str, str]:
        """The header that says what the prompts hit (RFC 9211); none until all is known."""
        if len(self._num_cached) < len(self._jobs):
            return {}
        num_cached = sum(self._num_cached.values())
        num_tokens = sum(len(job.token_ids) for job in self._jobs)
        found = "hit" if num_cached else "fwd=miss"
        return {"Cache-Status": f'vllm; {found}; detail="{num_cached} of {num_tokens}"'}

    def _submission(self, index: int) -> Submission:
        job = self._jobs[index]
        prompt = TokensPrompt(prompt_token_ids=job.token_ids, images=job.images)
        return Submission(
            job.request_id, prompt, job.params, _JobSink(self, index), job.options, job.part
        )

    def put(self, index: int, output: RequestOutput) -> None:
        """Take in an output of a job."""
        if output.num_cached_tokens is not None:
            self._num_cached[index] = output.num_cached_tokens
        params = self._jobs[index].params
        deltas = params.output_kind == RequestOutputKind.DELTA
        waiting = self._waiting.setdefault(index, deque())
        if waiting and not (deltas and params.logprobs is not None):
            waiting[-1].merge(output, deltas=deltas)
        else:
            waiting.append(output)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the stream: the consumer gets ``error`` after what has come before it."""
        if isinstance(error, EngineDeadError):
            # It was alive when it took the request: this is a failure (500), not a refusal (503).
            error = EngineError(f"The engine died while it answered this request: {error}")
        if self._error is None:
            self._error = name_fields(error, self._field_names)
        self._ready.set()

    async def _next(self) -> JobOutput | None:
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._num_unfinished == 0:
                return None
            await self._ready.wait()
            self._ready.clear()
        index = next(iter(self._waiting))
        output = self._waiting[index].popleft()
        if not self._waiting[index]:
            del self._waiting[index]
        if output.finished:
            self._num_unfinished -= 1
            self._leaves.pop(index, None)
        return JobOutput(index, output)

    async def outputs(self) -> AsyncIterator[JobOutput]:
        """Yield every output, the one that ``start`` waited for included.

        Raises:
            VllmError: The engine failed, or the server ended the stream.
        """
        item, self._first = self._first, None
        if item is None:
            item = await self._next()
        while item is not None:
            _raise_engine_error(item)
            yield item
            item = await self._next()

    async def close(self) -> None:
        """Abort what still runs. May be called twice."""
        self._state.discard_running(self)
        leaves, self._leaves = self._leaves, {}
        for leave in leaves.values():
            leave()


@dataclass(frozen=True, slots=True)
class _JobSink:
    """Where the engine puts the outputs of one job; see OutputSink."""

    stream: EngineStream
    index: int

    def put(self, output: RequestOutput) -> None:
        self.stream.put(self.index, output)

    def fail(self, error: Exception) -> None:
        self.stream.fail(error)


def _raise_engine_error(item: JobOutput) -> None:
    """Turn an answer that the engine ended with an error into one."""
    if any(answer.finish_reason == "error" for answer in item.output.outputs):
        raise EngineError("The engine failed while it answered this request.")
