"""An engine without a model: it answers with the tokens it was told to."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from vllm.exceptions import EngineDeadError
from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.data_parallel.predictions import Prediction
from vllm.v1.engine.questions import (
    AskHeld,
    CacheSnapshot,
    HeldReply,
    Question,
    Reply,
    ResetCache,
    ViewCache,
)
from vllm.v1.engine.submission import Submission
from vllm.v1.messages import HeldPrefix, PooledRows, PrefillStats
from vllm.v1.request_options import PoolingParams, RequestOptions

# A step takes longer than a response needs to send a token: else tokens would be merged.
_TURNS_PER_TOKEN = 10


class FakeEngine:
    """Answers every prompt with ``answer``, one token every few turns of the event loop.

    Attributes:
        jobs: What it was asked, in order.
        num_left: Answers that were left before their end.
        refuse: Raised when a request comes, from the ``refuse_from``-th on.
        fail_at: Tokens after which ``failure`` is raised.
        hold: Cleared: tokens wait.
        prefill_stats: Where every prompt's tokens come from.
        resets: What its cache was reset with.
        withdrawn: Held prompts that it was told to let go of.
        together: How many requests came together each time.
        tokens_per_step: That one output of a stream brings, as drafts do.
        can_reset: What resets answer.
        stop_reason: What it says of an answer's end besides.
        on_view: Called when its cache is looked at.
    """

    def __init__(self, tokenizer: Tokenizer, answer: str = "One two, three.") -> None:
        self._tokenizer = tokenizer
        self.answer = tokenizer.encode(answer, add_special_tokens=False)
        self.jobs: list[tuple[list[int], SamplingParams, str, int, str | None]] = []
        self.num_left = 0
        self.refuse: Exception | None = None
        self.refuse_from = 0
        self.fail_at: int | None = None
        self.failure: Exception = EngineDeadError("it stopped")
        self.hold = asyncio.Event()
        self.hold.set()
        self.num_cached_tokens = 0
        self.prefill_stats: PrefillStats | None = None
        self.errored = False
        self.resets: list[tuple[bool, bool]] = []
        self.withdrawn: list[str] = []
        self.boundaries: list[list[int]] = []
        self.ranks: list[int | None] = []
        self.keys: list[str | None] = []
        self.options: list[RequestOptions] = []
        self.together: list[int] = []
        self.living_ranks: list[int] = [0]
        self.held: list[HeldPrefix] = []
        self.keeps = True
        self.tokens_per_step = 1
        self.can_reset = True
        self.stop_reason: str | None = None
        self.predictions: dict[str, Prediction] = {}
        self.admissions: dict[str, PrefillStats] = {}
        self.on_view: Callable[[], object] = lambda: None
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit_all(self, submissions: Sequence[Submission]) -> list[Callable[[], None]]:
        """Put the scripted answer into the sinks."""
        self.together.append(len(submissions))
        leaves: list[Callable[[], None]] = []
        try:
            for given in submissions:
                leaves.append(self._submit(given))
        except BaseException:
            for leave in leaves:
                leave()
            raise
        return leaves

    def _submit(self, given: Submission) -> Callable[[], None]:
        request_id, sampling_params, sink = given.request_id, given.params, given.sink
        options = given.options
        assert sink is not None
        assert isinstance(given.prompt, dict)
        token_ids = given.prompt["prompt_token_ids"]
        self.ranks.append(options.data_parallel_rank)
        self.keys.append(options.prompt_cache_key)
        self.boundaries.append(options.cache_boundaries)
        for offset, seconds in options.cache_ttls.items():
            expires_in = None if seconds in (0.0, float("inf")) else seconds
            name = f"{request_id}-00000001"
            held = HeldPrefix(name, offset, 3, seconds > 0, expires_in, 0)
            self.held += [held] * self.keeps
        self.options.append(options)
        job = (token_ids, sampling_params, request_id, options.priority, options.cache_salt)
        self.jobs.append(job)
        if self.refuse is not None and len(self.jobs) > self.refuse_from:
            raise self.refuse

        async def answer() -> None:
            try:
                if options.pooling is not None:
                    if self.fail_at == 0:
                        raise self.failure
                    sink.put(self._pool(token_ids, options.pooling, request_id))
                    return
                async for output in self._answer(token_ids, sampling_params, request_id):
                    sink.put(output)
            except Exception as error:  # as an engine tells of one
                sink.fail(error)

        task = asyncio.create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def leave() -> None:
            self.num_left += not task.done()
            task.cancel()

        return leave

    @property
    def num_running(self) -> int:
        """Answers that are being given."""
        return len(self._tasks)

    async def ask(self, question: Question[Reply]) -> Reply:
        """Answer with what there is."""
        told: Any = None
        match question:
            case ResetCache(reset_running_requests, reset_connector):
                self.resets.append((reset_running_requests, reset_connector))
                told = self.can_reset
            case AskHeld(forget):
                was_there = forget in {held.id for held in self.held}
                self.held = [held for held in self.held if held.id != forget]
                told = HeldReply(list(self.held), was_there)
            case ViewCache():
                self.on_view()
                told = CacheSnapshot(b'{"look":1}', 0.0)
        reply: Reply = told
        return reply

    def find_owner(self, cache_salt: str | None) -> tuple[str | None, str | None]:
        return None, cache_salt

    def withdraw_prefixes(self, names: Sequence[str]) -> None:
        """Note the call."""
        self.withdrawn += names

    def find_prediction(self, request_id: str) -> Prediction | None:
        """What was foretold of a request."""
        return self.predictions.get(request_id)

    def find_admission(self, request_id: str) -> PrefillStats | None:
        """How a request was admitted."""
        return self.admissions.get(request_id)

    def _pool(self, ids: list[int], wanted: PoolingParams, request_id: str) -> RequestOutput:
        """Rows of eight numbers that tell a row's token and the one before it."""
        angles = np.array(ids)[:, None] * np.arange(1, 9) + np.array([0, *ids[:-1]])[:, None]
        rows = np.cos(angles).astype(np.float32)
        if not wanted.all_rows:
            rows = rows[-1:]
        if wanted.logit_ids:
            rows = np.array([[ids[-1], 1.0]], dtype=np.float32)
        return RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=ids,
            prompt_logprobs=None,
            outputs=[self._output(0, [], SamplingParams(), "stop")],
            finished=True,
            num_cached_tokens=self.num_cached_tokens,
            pooled=PooledRows(len(rows), rows.tobytes()),
        )

    async def _answer(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        assert params.max_tokens is not None
        answer = self.answer[: params.max_tokens]
        reason = "stop" if len(answer) == len(self.answer) else "length"
        stream = params.output_kind == RequestOutputKind.DELTA
        for i in range(0, len(answer), self.tokens_per_step):
            for _ in range(_TURNS_PER_TOKEN):
                await asyncio.sleep(0)
            await self.hold.wait()
            if self.fail_at == i:
                raise self.failure
            is_last = i + self.tokens_per_step >= len(answer)
            if not stream and not is_last:
                continue
            ids = answer[i : i + self.tokens_per_step] if stream else answer
            outputs = [
                self._output(k, ids, params, reason if is_last else None) for k in range(params.n)
            ]
            yield RequestOutput(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=prompt_ids,
                prompt_logprobs=self._prompt_logprobs(prompt_ids, params),
                outputs=outputs,
                finished=is_last,
                num_cached_tokens=self.num_cached_tokens,
                prefill_stats=self.prefill_stats,
            )

    def _output(
        self, index: int, ids: Sequence[int], params: SamplingParams, reason: str | None
    ) -> CompletionOutput:
        rows = None if params.logprobs is None else [self._row(i, params.logprobs) for i in ids]
        named = params.logprob_token_ids
        if named is not None:
            # The first of them is the most likely one.
            row = {i: self._logprob(i, -1.0 - place, None) for place, i in enumerate(named)}
            rows = [row for _ in ids]
        return CompletionOutput(
            index=index,
            text=self._tokenizer.decode([i for i in ids if i != self._tokenizer.eos_token_id]),
            token_ids=list(ids),
            logprobs=rows,
            finish_reason=reason,
            stop_reason=None if reason is None else self.stop_reason,
        )

    def _prompt_logprobs(
        self, prompt_ids: list[int], params: SamplingParams
    ) -> list[dict[int, Logprob] | None] | None:
        num_top = params.prompt_logprobs
        if num_top is None:
            return None
        return [None, *(self._row(token_id, num_top) for token_id in prompt_ids[1:])]

    def _row(self, token_id: int, num_top: int) -> dict[int, Logprob]:
        """The token itself, third most likely, and the most likely ones."""
        others = [i for i in range(40, 40 + max(num_top, 0)) if i != token_id]
        row = {token_id: self._logprob(token_id, -2.5, 3)}
        for rank, other in enumerate(others[:num_top], start=1):
            row[other] = self._logprob(other, -0.5 * rank, rank)
        return row

    def _logprob(self, token_id: int, logprob: float, rank: int | None) -> Logprob:
        piece = self._tokenizer.token_bytes(token_id)
        return Logprob(logprob, rank, piece.decode(errors="replace"), piece)
