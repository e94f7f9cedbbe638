"""Reads the model behind prompts: the shared beginning is computed once, by the first of them.

    first prompt   [ input ...... | question 1 ]                      alone, until it is answered
    all others                    [ question 2 ] [ question 3 ] ...   in waves, each hits the input

Labels of several tokens make further reads behind a prompt, which hit all of it but its end.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.entrypoints.decisions.labels import TokenPath
from vllm.entrypoints.decisions.prompts import PromptSet
from vllm.entrypoints.decisions.question_format import Prompt
from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.engine_stream import EngineStream, Job
from vllm.exceptions import EngineError, ShuttingDownError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.submission import CallPart
from vllm.v1.request_options import RequestOptions

# Reads handed to the engine at a time: enough for any step, and few enough prompts in memory.
_WAVE = 128


@dataclass(frozen=True, slots=True)
class _Read:
    """One look at what may follow a prompt and a label's first tokens."""

    prompt: int
    path: TokenPath
    token_ids: Sequence[int]


@dataclass(slots=True)
class Readings:
    """What came of prompts.

    Attributes:
        logprobs: By prompt, of its labels in their order.
        num_cached: By prompt, tokens that were read from the prefix cache.
    """

    logprobs: list[list[float]]
    num_cached: list[int]


@dataclass(slots=True)
class PromptReader:
    """Asks the engine.

    Args:
        name: Begins the requests' ids.
        context: The server's.
        options: Of every read.
    """

    name: str
    context: ServingContext
    options: RequestOptions
    _unique: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    async def read(self, given: PromptSet) -> Readings:
        """Return what the model would say behind prompts. Cancelled, it ends what runs.

        Raises:
            VllmError: The engine refuses the first of them, or fails.
        """
        reads = [
            _Read(i, path, prompt.trie.branches[path])
            for i, prompt in enumerate(given.prompts)
            for path in prompt.trie.branches
        ]
        found: dict[int, dict[TokenPath, Mapping[int, float]]] = {}
        num_cached = [0] * len(given.prompts)
        # Others find what the first has published: they need not wait for each other.
        waves = [reads[:1], *(reads[i : i + _WAVE] for i in range(1, len(reads), _WAVE))]
        for number, wave in enumerate(waves):
            part = CallPart(0, 0) if number else self._whole(given, len(reads))
            jobs = [self._job(read, given, part) for read in wave]
            for index, logprobs, cached in await self._run(jobs):
                read = wave[index]
                found.setdefault(read.prompt, {})[read.path] = logprobs
                if not read.path:
                    num_cached[read.prompt] = cached
        labels = [p.trie.label_logprobs(found[i]) for i, p in enumerate(given.prompts)]
        return Readings(labels, num_cached)

    def _whole(self, given: PromptSet, num_reads: int) -> CallPart:
        """What the call counts for: its requests, and the tokens that differ."""
        shared = 0 if self.options.skip_cache_insert else given.num_shared
        if (end := self.options.cache_insert_end) is not None:
            shared = min(shared, end)
        own = sum(len(prompt.token_ids) - shared for prompt in given.prompts)
        return CallPart(num_reads, shared + own)

    def _job(self, read: _Read, given: PromptSet, part: CallPart) -> Job:
        prompt: Prompt = given.prompts[read.prompt]
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            logprob_token_ids=list(read.token_ids),
        )
        path = "-".join(map(str, read.path))
        suffix = f"{prompt.question}.{prompt.turn}{'.' if path else ''}{path}"
        token_ids = [*prompt.token_ids, *read.path]
        return Job(f"{self.name}-{suffix}-{self._unique}", token_ids, params, self.options, part)

    async def _run(self, jobs: Sequence[Job]) -> list[tuple[int, dict[int, float], int]]:
        stream = EngineStream(self.context.engine, jobs, self.context.state)
        found: list[tuple[int, dict[int, float], int]] = []
        try:
            await stream.start()
            async for item in stream.outputs():
                (answer,) = item.output.outputs
                if answer.finish_reason == "abort":
                    raise ShuttingDownError("The server ended this request before it was answered.")
                if not answer.logprobs:
                    raise EngineError("The engine gave no log probabilities for a question.")
                wanted = jobs[item.job_index].params.logprob_token_ids or ()
                row = answer.logprobs[0]
                logprobs = {token_id: row[token_id].logprob for token_id in wanted}
                found.append((item.job_index, logprobs, item.output.num_cached_tokens or 0))
        finally:
            await stream.close()
        return found
