"""A lean, deterministic scheduler over the real ``KVCacheManager``: no model, no clock.

First come, first served, chunked prefill, preemption of the youngest when the pool is full. Used by
the prefix-cache benchmarks; decode may advance several tokens a step, because only the blocks and
keys it leaves behind matter there.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.cachelab.sim.requests import Hasher
from vllm.sampling_params import SamplingParams
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.retention.pinning import PinSettings
from vllm.v1.core.retention.policy import RetentionPolicy
from vllm.v1.core.values.cache_settings import CacheSettings, StaleRow
from vllm.v1.core.values.cache_step import Lookup
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request


class PoolTooSmall(RuntimeError):
    """Not even one request alone can go on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the cache did for one request, at its first admission.

    Attributes:
        request_id: The request.
        num_tokens: Tokens of its prompt.
        hit_tokens: Of those, not computed.
        dense_match: How far the dense groups alone matched.
        miss_tokens: Tokens by reason.
    """

    request_id: str
    num_tokens: int
    hit_tokens: int
    dense_match: int
    miss_tokens: dict[str, int]


@dataclass(slots=True)
class DriverStats:
    """Totals over all requests that were admitted."""

    num_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    miss_tokens: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count one request."""
        self.num_requests += 1
        self.prompt_tokens += outcome.num_tokens
        self.hit_tokens += outcome.hit_tokens
        for reason, tokens in outcome.miss_tokens.items():
            self.miss_tokens[reason] = self.miss_tokens.get(reason, 0) + tokens

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that hit."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class PrefixDriver:
    """Serves requests to their end.

    Owns: the manager, waiting and running requests, totals.

    Args:
        config: With ``hit_unit`` set.
        max_model_len: Longest request, answer included.
        policy: Which checkpoints are kept; None: as the config says.
        pinning: What long steps pin.
        chunk: Tokens of one step, over all requests.
        max_running: Requests that run side by side.
        waits: Whether a request waits for a running donor of its prefix.
        decode_stride: Tokens a decode step appends.
        num_drafts: Draft tokens a decode step verifies besides.
        acceptance: Chance of each draft that the one before it stands.
        stale_row: What becomes of a drafter's row that another next token made.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        max_model_len: int,
        *,
        policy: RetentionPolicy | None = None,
        pinning: PinSettings | None = None,
        chunk: int = 8192,
        max_running: int = 1,
        waits: bool = False,
        decode_stride: int = 1,
        num_drafts: int = 0,
        acceptance: float = 0.7,
        stale_row: StaleRow = StaleRow.REBUILD,
    ) -> None:
        assert config.hit_unit is not None
        self.geometry = CacheGeometry.from_config(config)
        self.manager = KVCacheManager.from_settings(
            CacheSettings(
                kv_cache_config=config,
                max_model_len=max_model_len,
                max_num_batched_tokens=max_model_len,
                scheduler_block_size=config.hit_unit,
                hash_block_size=config.hit_unit,
                num_lookahead_tokens=num_drafts,
                stale_row=stale_row,
                policy=policy,
                pinning=pinning,
            )
        )
        self.chunk = chunk
        self.max_running = max_running
        self.waits = waits
        self.decode_stride = decode_stride
        self.num_drafts = num_drafts
        self.acceptance = acceptance
        self._rng = random.Random(0)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats = DriverStats()
        self.outcomes: list[Outcome] = []
        self._params: dict[int, SamplingParams] = {}

    def add(
        self, request_id: str, tokens: Sequence[int], hasher: Hasher, max_tokens: int = 1
    ) -> Request:
        """Queue a request of a prompt, to generate ``max_tokens`` tokens of id 0."""
        params = self._params.get(max_tokens)
        if params is None:
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            self._params[max_tokens] = params
        request = Request(request_id, list(tokens), params, arrival_time=0.0, block_hasher=hasher)
        self.waiting.append(request)
        return request

    def serve(
        self, request_id: str, tokens: Sequence[int], hasher: Hasher, max_tokens: int = 1
    ) -> Outcome:
        """Serve one request alone and return what hit."""
        self.add(request_id, tokens, hasher, max_tokens)
        self.run_all()
        return self.outcomes[-1]

    def run_all(self) -> None:
        """Step until nothing waits and nothing runs."""
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Schedule and finish one step."""
        manager = self.manager
        manager.new_step_starts()
        self.stats.num_steps += 1
        scheduled: dict[str, int] = {}
        budget = self._schedule_running(scheduled)
        self._admit(scheduled, budget)
        if not scheduled:
            first = [*self.running, *self.waiting][0]
            raise PoolTooSmall(
                f"{manager.block_pool.num_gpu_blocks} blocks cannot hold a chunk of request "
                f"{first.request_id} ({first.num_tokens} tokens, {self.chunk} a step)"
            )
        manager.coordinator.commit_step()
        manager.take_step_work()
        for request in list(self.running):
            num_new = scheduled.get(request.request_id)
            if num_new is not None:
                self._advance(request, num_new)

    def _schedule_running(self, scheduled: dict[str, int]) -> int:
        budget = self.chunk
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            num_new = self.manager.coordinator.chunk_end(request, num_new)
            if request.num_computed_tokens + num_new == request.num_tokens:
                num_new += self.num_drafts
            while (
                self.manager.allocate_slots(request, num_new, num_lookahead_tokens=self.num_drafts)
                is None
            ):
                victim = self.running[-1]
                budget += scheduled.pop(victim.request_id, 0)
                self._preempt(victim)
                if victim is request:
                    break
            else:
                scheduled[request.request_id] = num_new
                budget -= num_new
        return budget

    def _admit(self, scheduled: dict[str, int], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            request = self.waiting[0]
            lookup: Lookup | None = self.manager.look_up(request)
            assert lookup is not None
            if self.waits and self.running and self.manager.should_wait(request, lookup):
                return
            hit = lookup.num_tokens
            num_new = self._first_chunk(request, hit, budget)
            admitted = self.manager.allocate_slots(
                request, num_new, hit, lookup.blocks, full_sequence_must_fit=True
            )
            if admitted is None and not self.running and hit:
                # Alone and still too big: what the hit holds may be what is missing.
                hit, lookup = 0, None
                num_new = self._first_chunk(request, 0, budget)
                admitted = self.manager.allocate_slots(request, num_new)
            if admitted is None:
                return
            self.waiting.popleft()
            request.start_running(hit)
            self.running.append(request)
            scheduled[request.request_id] = num_new
            budget -= num_new
            self._record(request, lookup, hit)

    def _first_chunk(self, request: Request, hit: int, budget: int) -> int:
        num_new = min(request.num_tokens - hit, budget)
        end = self.geometry.chunk_end(hit, hit + num_new, request.num_tokens)
        return end - hit

    def _record(self, request: Request, lookup: Lookup | None, hit: int) -> None:
        record = self.manager.record_admission(request, lookup, hit)
        if request.num_preemptions:
            return
        outcome = Outcome(
            request.request_id,
            record.num_prompt_tokens,
            record.num_cached_tokens,
            record.dense_match_tokens,
            record.miss_tokens,
        )
        self.outcomes.append(outcome)
        self.stats.add(outcome)

    def _preempt(self, request: Request) -> None:
        self.manager.free(request)
        self.running.remove(request)
        request.preempt()
        self.stats.num_preemptions += 1
        self.waiting.appendleft(request)

    def _advance(self, request: Request, num_new: int) -> None:
        request.advance(num_new)
        if request.num_computed_tokens < request.num_tokens:
            return
        num_drafts = request.num_computed_tokens - request.num_tokens
        num_accepted = 0
        while num_accepted < num_drafts and self._rng.random() < self.acceptance:
            num_accepted += 1
        request.reject_drafts(num_drafts - num_accepted)
        left = request.max_tokens - request.num_output_tokens
        request.append_output_token_ids([0] * min(left, self.decode_stride + num_accepted))
        if request.num_output_tokens >= request.max_tokens:
            self.manager.free(request)
            self.running.remove(request)
