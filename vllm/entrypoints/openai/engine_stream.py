"""The engine's side of one HTTP request: several prompts, one stream of outputs."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import EngineDeadError, EngineError
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.messages import HeldPrefix


class EngineClient(Protocol):
    """What the server needs of an engine; ``AsyncLLM`` is one."""

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""

    def generate(
        self,
        prompt: TokensPrompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Run a request; leaving the iterator early aborts it."""

    async def get_held_prefixes(self, forget: str = "") -> tuple[list[HeldPrefix], bool]:
        """Let go of one kept prefix, if asked to; return the others, and whether it was there."""

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget every cached prefix; False, with nothing forgotten, while requests use it."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and how to answer it."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    cache_boundaries: Sequence[int] = ()
    cache_ttls: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobOutput:
    """News of one job."""

    job_index: int
    output: RequestOutput


_JOB_ENDED = object()


class EngineStream:
    """The merged outputs of some jobs, in order of arrival.

    Owns: one task per job that feeds the queue, and the queue. ``close`` must be called; it aborts
    what still runs.
    """

    def __init__(self, engine: EngineClient, jobs: Sequence[Job], state: ServerState) -> None:
        self._engine = engine
        self._jobs = jobs
        self._state = state
        self._queue: asyncio.Queue[object] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._num_unfinished = len(jobs)
        self._first: JobOutput | None = None

    async def start(self) -> None:
        """Hand the jobs to the engine and wait for the first output.

        Errors that come before it can still be told by an HTTP status.

        Raises:
            VllmError: The engine refuses a job, or fails.
        """
        self._state.add_running(self)
        self._tasks = [asyncio.create_task(self._feed(i)) for i in range(len(self._jobs))]
        try:
            self._first = await self._next()
        except BaseException:
            await self.close()
            raise

    async def _feed(self, job_index: int) -> None:
        job = self._jobs[job_index]
        prompt = TokensPrompt(prompt_token_ids=job.token_ids)
        if job.cache_boundaries:
            prompt["cache_boundaries"] = list(job.cache_boundaries)
        if job.cache_ttls:
            prompt["cache_ttls"] = dict(job.cache_ttls)
        outputs = self._engine.generate(
            prompt,
            job.params,
            job.request_id,
            priority=job.priority,
            cache_salt=job.cache_salt,
        )
        try:
            async for output in outputs:
                self._queue.put_nowait(JobOutput(job_index, output))
        except EngineDeadError as error:
            # It was alive when it took the request: this is a failure (500), not a refusal (503).
            self.fail(EngineError(f"The engine died while it answered this request: {error}"))
        except Exception as error:  # carried to the consumer, which raises it
            self.fail(error)
        else:
            self._queue.put_nowait(_JOB_ENDED)

    def fail(self, error: Exception) -> None:
        """End the stream: the consumer gets ``error``."""
        self._queue.put_nowait(error)

    async def _next(self) -> JobOutput | None:
        while self._num_unfinished:
            item = await self._queue.get()
            if isinstance(item, JobOutput):
                return item
            if isinstance(item, Exception):
                raise item
            self._num_unfinished -= 1
        return None

    async def outputs(self) -> AsyncIterator[JobOutput]:
        """Yield every output, the one that ``start`` waited for included.

        Raises:
            VllmError: The engine failed, or the server ended the stream.
        """
        item, self._first = self._first, None
        while item is not None:
            _raise_engine_error(item)
            yield item
            item = await self._next()

    async def close(self) -> None:
        """Abort what still runs and wait until that is done. May be called twice."""
        self._state.discard_running(self)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _raise_engine_error(item: JobOutput) -> None:
    """Turn an answer that the engine ended with an error into one."""
    if any(answer.finish_reason == "error" for answer in item.output.outputs):
        raise EngineError("The engine failed while it answered this request.")
