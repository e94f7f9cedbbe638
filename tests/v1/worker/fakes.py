"""A model whose logits prove what it read from the pages, and a scheduler that plans at random."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.metadata import RequestSlice
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.values.cache_step import WindowTable
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.kv_cache_tensors import KVCachePool, allocate_kv_cache
from vllm.v1.worker.model_runner import ModelRunner, RunnerLimits

VOCAB = 13
WINDOW = 5
BLOCK = 4
WINDOW_BLOCK = 2
_MODULUS = 1_000_003


def mix(token: int, position: int) -> int:
    """What a token leaves in the caches."""
    return ((token + 1) * 7919 + (position + 1) * 104729 + token * position * 31) % _MODULUS


def reference_hash(tokens: Sequence[int], position: int) -> int:
    """What the model must have read at ``position``: all rows, and the window's once more."""
    rows = [mix(t, p) for p, t in enumerate(tokens[: position + 1])]
    return (sum(rows) + 3 * sum(rows[-WINDOW:])) % _MODULUS


def hash_to_logits(hashes: torch.Tensor) -> torch.Tensor:
    """Spread hashes over a vocabulary: fp32 [M, VOCAB]."""
    vocab = torch.arange(1, VOCAB + 1, dtype=torch.float64)
    return (3 * torch.sin(hashes.double()[:, None] * vocab * 0.7131)).float()


def kv_cache_config(num_blocks: int) -> KVCacheConfig:
    """One dense group of two layers and one window group, packed into 64-byte pages."""
    dense = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.int64)
    window = SlidingWindowMLASpec(
        block_size=WINDOW_BLOCK,
        num_kv_heads=1,
        head_size=1,
        dtype=torch.int64,
        sliding_window=WINDOW,
    )
    offsets = {"a": 0, "b": 64, "w": 64}
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[KVCacheTensor(num_blocks * 128, list(offsets), offsets, 128)],
        kv_cache_groups=[KVCacheGroupSpec(["a", "b"], dense), KVCacheGroupSpec(["w"], window)],
    )


class FakeModel:
    """Hashes of everything a token may see, read back from the pages."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.logit_rows: list[int] = []
        self.last_slices: Sequence[RequestSlice] = ()

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: Any,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        self.num_calls += 1
        slices: Sequence[RequestSlice] = meta
        self.last_slices = slices
        assert len(token_ids) == sum(part.num_tokens for part in slices)
        hashes: list[int] = []
        row = 0
        for part in slices:
            tokens = token_ids[row : row + part.num_tokens].tolist()
            expected = list(range(part.start, part.start + part.num_tokens))
            assert positions[row : row + part.num_tokens].tolist() == expected
            own = {p: mix(t, p) for t, p in zip(tokens, expected, strict=True)}
            for p, value in own.items():
                self._write(kv_caches["a"], part, 0, BLOCK, p, value, must=True)
                self._write(kv_caches["b"], part, 0, BLOCK, p, value + 1, must=True)
            # The window rows before the chunk come from pages, the chunk's own from the step.
            window = {
                p: self._read(kv_caches["w"], part, 1, WINDOW_BLOCK, p)
                for p in range(max(0, part.start - WINDOW + 1), part.start)
            }
            window.update(own)
            for p, value in own.items():
                self._write(kv_caches["w"], part, 1, WINDOW_BLOCK, p, value, must=False)
            for p in expected:
                dense = 0
                for q in range(p + 1):
                    a = self._read(kv_caches["a"], part, 0, BLOCK, q)
                    assert self._read(kv_caches["b"], part, 0, BLOCK, q) == a + 1
                    dense += a
                near = sum(window[q] for q in range(max(0, p - WINDOW + 1), p + 1))
                hashes.append((dense + 3 * near) % _MODULUS)
            row += part.num_tokens
        return torch.tensor(hashes, dtype=torch.float64).view(-1, 1, 1)

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        self.logit_rows.append(len(streams))
        return hash_to_logits(streams[:, 0, 0])

    @staticmethod
    def _locate(part: RequestSlice, group: int, block_size: int, p: int) -> tuple[int, int]:
        table = part.tables[group]
        index = p // block_size - table.base
        stored = 0 <= index < len(table.block_ids)
        return (int(table.block_ids[index]) if stored else 0), p % block_size

    def _read(
        self, cache: torch.Tensor, part: RequestSlice, group: int, block_size: int, p: int
    ) -> int:
        block, row = self._locate(part, group, block_size, p)
        assert block > 0, f"position {p} of group {group} is not stored"
        return int(cache[block, row, 0])

    def _write(
        self,
        cache: torch.Tensor,
        part: RequestSlice,
        group: int,
        block_size: int,
        p: int,
        value: int,
        *,
        must: bool,
    ) -> None:
        block, row = self._locate(part, group, block_size, p)
        assert block > 0 or not must
        if block:
            cache[block, row, 0] = value


def make_runner(
    num_blocks: int = 400, *, seed: int = 0
) -> tuple[ModelRunner, FakeModel, KVCachePool]:
    """A runner over the fake model."""
    model = FakeModel()
    config = kv_cache_config(num_blocks)
    device = torch.device("cpu")
    pool = allocate_kv_cache(config, ["a", "b", "w"], CpuPlatform(), device)
    limits = RunnerLimits(2, 64, 256, VOCAB, seed)
    builder: Any = lambda slices: slices  # noqa: E731
    return ModelRunner(model, pool, builder, limits), model, pool


@dataclass
class SimRequest:
    """A request as the scheduler sees it."""

    req_id: str
    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    dense: list[int] = field(default_factory=list)
    window: dict[int, int] = field(default_factory=dict)  # block index -> id
    is_known: bool = False
    is_preempted: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


class RandomScheduler:
    """Random chunks, batches, drafts and preemptions over a small pool, as SchedulerOutputs.

    Window tables follow the private prefill window: blocks for the rows that the next step needs.
    """

    def __init__(self, rng: random.Random, num_blocks: int, *, new_on_resume: bool) -> None:
        self.rng = rng
        self.free = list(range(1, num_blocks))
        self.requests: dict[str, SimRequest] = {}
        self.finished: set[str] = set()
        self.preempted: set[str] = set()
        self.new_on_resume = new_on_resume
        self.last_scheduled: set[str] = set()
        self.oracle_drafts: Any = None  # request -> its true next tokens, to draft from

    def add(self, request: SimRequest) -> None:
        self.requests[request.req_id] = request

    def preempt(self, request: SimRequest) -> None:
        self._release(request)
        request.num_computed = 0
        request.is_preempted = True
        self.preempted.add(request.req_id)

    def finish(self, request: SimRequest) -> None:
        self._release(request)
        del self.requests[request.req_id]
        self.finished.add(request.req_id)

    def _release(self, request: SimRequest) -> None:
        self.free += request.dense + list(request.window.values())
        self.rng.shuffle(self.free)
        request.dense, request.window = [], {}

    def schedule(self, max_chunk: int = 9) -> SchedulerOutput:
        out = SchedulerOutput.make_empty()
        out.finished_req_ids, self.finished = self.finished, set()
        out.preempted_req_ids, self.preempted = self.preempted, set()
        cached = out.scheduled_cached_reqs
        for request in self.rng.sample(list(self.requests.values()), len(self.requests)):
            if self.rng.random() < 0.25 or request.req_id in (out.preempted_req_ids or ()):
                continue
            self._schedule_one(request, out, cached, max_chunk)
        out.total_num_scheduled_tokens = sum(out.num_scheduled_tokens.values())
        self.last_scheduled = set(out.num_scheduled_tokens)
        return out

    def _schedule_one(
        self, request: SimRequest, out: SchedulerOutput, cached: CachedRequestData, max_chunk: int
    ) -> None:
        req_id = request.req_id
        missing = len(request.tokens) - request.num_computed
        num_new = min(missing, self.rng.randint(1, max_chunk))
        drafts: list[int] = []
        if num_new == missing and self.oracle_drafts and self.rng.random() < 0.5:
            drafts = self.oracle_drafts(request)[: self.rng.randint(0, 3)]
            drafts = [d if self.rng.random() < 0.7 else self.rng.randrange(VOCAB) for d in drafts]
        start, end = request.num_computed, request.num_computed + num_new + len(drafts)
        new_dense = [self.free.pop() for _ in range(-(-end // BLOCK) - len(request.dense))]
        request.dense += new_dense
        # Rows below `first` are never needed again; drafts may be rejected, so count accepted only.
        first = max(0, start + num_new - len(drafts) - WINDOW + 1)
        first = min(first, max(0, start - WINDOW + 1)) if drafts else first
        keep_from = min(first, max(0, start - WINDOW + 1)) // WINDOW_BLOCK
        for index in [i for i in request.window if i < keep_from]:
            self.free.append(request.window.pop(index))
        for index in range(first // WINDOW_BLOCK, (end - 1) // WINDOW_BLOCK + 1):
            if index not in request.window:
                request.window[index] = self.free.pop()
        base = min(request.window)
        ids = [request.window.get(i, 0) for i in range(base, max(request.window) + 1)]
        out.window_tables[req_id] = (WindowTable(1, base, ids),)
        out.num_scheduled_tokens[req_id] = num_new + len(drafts)
        if drafts:
            out.scheduled_spec_decode_tokens[req_id] = drafts
        if not request.is_known or (request.is_preempted and self.new_on_resume):
            out.scheduled_new_reqs.append(
                NewRequestData(
                    req_id,
                    request.prompt,
                    [],
                    request.params,
                    None,
                    (list(request.dense), []),
                    start,
                    None,
                    prefill_token_ids=list(request.tokens) if request.is_preempted else None,
                )
            )
        else:
            cached.req_ids.append(req_id)
            cached.new_token_ids.append([])
            cached.num_computed_tokens.append(start)
            cached.num_output_tokens.append(len(request.output))
            if request.is_preempted:
                cached.resumed_req_ids.add(req_id)
                cached.new_block_ids.append((list(request.dense), []))
                cached.all_token_ids[req_id] = list(request.tokens)
            else:
                cached.new_block_ids.append((new_dense, []) if new_dense else None)
        request.is_known, request.is_preempted = True, False
        request.num_computed = end

    def update(self, out: SchedulerOutput, result: ModelRunnerOutput) -> None:
        assert result.req_ids == list(out.num_scheduled_tokens)
        for req_id, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True):
            request = self.requests[req_id]
            drafts = out.scheduled_spec_decode_tokens.get(req_id, [])
            if tokens:
                request.num_computed -= len(drafts) - (len(tokens) - 1)
            request.tokens += tokens


def greedy_oracle(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The fake model's greedy answer, from the tokens alone."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        hashes = torch.tensor([reference_hash(tokens, len(tokens) - 1)])
        tokens.append(int(hash_to_logits(hashes).argmax()))
    return tokens[len(prompt) :]


def as_logprobs(tokens: Sequence[int]) -> np.ndarray:
    """log-softmax at every position of a sequence: float32 [len, VOCAB]."""
    hashes = torch.tensor([reference_hash(tokens, p) for p in range(len(tokens))])
    logprobs: np.ndarray = hash_to_logits(hashes).log_softmax(-1).numpy()
    return logprobs
