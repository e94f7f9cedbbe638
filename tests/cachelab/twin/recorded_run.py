"""Made-up traffic through a scheduler that records: everything a server's cache goes through."""

import math
import random
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from vllm.cachelab.sim.scored_prompts import ScoredPrompts
from vllm.cachelab.sim.settings import SimSettings
from vllm.cachelab.trace.recorder import RecordedScheduler
from vllm.cachelab.twin.exact import ExactTwin
from vllm.cachelab.twin.trace_file import CacheTrace
from vllm.config.observability import ObservabilityConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.scheduler_choice import make_scheduler
from vllm.v1.engine.step_ahead import StepAhead
from vllm.v1.outputs import DraftTokenIds, FinishedStep, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.request_options import RequestOptions, session_number
from vllm.v1.structured_output import StructuredOutputManager

SMALL_V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
    "index_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 1,
}
# Upper layers of which compute a prompt's end alone: 4 * 31 tokens.
SMALL_V41: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 32,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [1, 4],
    "index_source_layer_ids": [1, 4, 6],
    "index_n_heads": 4,
    "index_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 8192,
}
SMALL_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}


def small_settings(**changes: Any) -> SimSettings:
    """A cache that a few prompts fill."""
    base = SimSettings(
        SMALL_V4,
        block_size=32,
        dtype="float32",
        num_blocks=200,
        max_model_len=2048,
        scheduler={"max_num_batched_tokens": 512, "max_num_seqs": 24},
    )
    return replace(base, **changes)


class RecordedRun:
    """Random traffic, recorded.

    Attributes:
        prompts: Those that later ones may continue.
        cached: Cached tokens by request id, as each client was told.
        num_preemptions: Requests that lost their blocks.
        num_resets: Resets that were done.
        num_ended: Checkpoints that the ends of sessions made spare.
    """

    _SESSIONS = ("one", "two", "three")

    def __init__(
        self,
        path: Path,
        settings: SimSettings,
        seed: int,
        max_bytes: int = 1 << 26,
        *,
        holds: bool = False,
        private_share: float = 0.0,
    ) -> None:
        config = settings.make_config()
        config.observability_config = ObservabilityConfig(
            log_stats=False, cache_trace=str(path), cache_trace_max_bytes=max_bytes
        )
        plan = settings.make_plan(config)
        self.scheduler: Scheduler = make_scheduler(
            config, plan, structured_output_manager=StructuredOutputManager(config)
        )
        if holds:
            # Times pass by calls: traffic is that of its seed on any machine.
            times = count(step=0.0004)
            assert isinstance(self.scheduler, RecordedScheduler)
            self.scheduler.recorder._origin = 0.0
            self.scheduler.recorder._monotonic = lambda: next(times)
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(plan.unit, hash_fn)
        self._rng = random.Random(seed)
        self._scored_prompts = ScoredPrompts()
        self._holds = holds
        self._private_share = private_share
        self.private: list[Request] = []
        self._ahead: StepAhead | None = None
        if isinstance(self.scheduler, AsyncScheduler):
            self._ahead = StepAhead(self.scheduler, self)  # type: ignore[arg-type]
        self._num_drafts = config.usual_drafts
        self.has_drafter = self._num_drafts > 0
        self.prompts: list[list[int]] = []
        self._count = 0
        self.cached: dict[str, int] = {}
        self.num_preemptions = self.num_resets = self.num_aborts = self.num_forgotten = 0
        self.num_ended = 0

    def run(self, num_requests: int) -> None:
        """Serve so many requests, some of them side by side."""
        while self._count < num_requests or self.has_work():
            if self._count < num_requests and self._rng.random() < 0.35:
                for _ in range(self._rng.choice((1, 1, 2, 6))):
                    self._add()
            if self._count < num_requests and self._rng.random() < 0.02:
                # Short prompts with long answers: they enter together, and grow out of the pool.
                for _ in range(16):
                    self._add(is_short=True)
            self._disturb()
            self.step()
        self.scheduler.shutdown()

    def has_work(self) -> bool:
        """Whether requests wait or run, or a step does."""
        is_ahead = self._ahead is not None and self._ahead.is_in_flight
        return is_ahead or self.scheduler.has_unfinished_requests()

    def _add(self, *, is_short: bool = False) -> None:
        rng = self._rng
        prompt: list[int] = []
        if self.prompts and not is_short and rng.random() < 0.75:
            old = rng.choice(self.prompts[-12:])
            prompt = old[: rng.choice((len(old), len(old), rng.randrange(1, len(old) + 1)))]
        num_new = 20 if is_short else rng.choice((1, 40, 300, 700))
        prompt = prompt + [rng.randrange(900) for _ in range(num_new)]
        prompt = prompt[:1500]
        if not is_short:
            self.prompts.append(prompt)
        self.add(
            prompt,
            max_tokens=300 if is_short else rng.choice((1, 5, 100)),
            stop_token_ids=[7],
            prompt_logprobs=rng.choice((0, 1)) if rng.random() < 0.1 else None,
            cache_ttls=self._draw_ttls(len(prompt)) if self._holds else None,
        )

    def _draw_ttls(self, num_tokens: int) -> dict[int, float] | None:
        """Sometimes hold a prefix: for a few steps, for ever, or unpinned."""
        rng = self._rng
        if rng.random() < 0.75:
            return None
        return {rng.randrange(num_tokens) + 1: rng.choice((0.0, 0.003, 0.05, math.inf))}

    def add(
        self, prompt: list[int], *, cache_ttls: dict[int, float] | None = None, **params: Any
    ) -> str:
        """Queue a prompt; returns the request's id, as a server would make it."""
        request_id = f"r-{self._count}-0-0123abcd-0000000a"
        is_private = bool(self._private_share) and self._rng.random() < self._private_share
        request = Request(
            request_id,
            prompt,
            SamplingParams(**params),
            block_hasher=self._hasher,
            arrival_time=0.0,
            cache_boundaries=tuple(cache_ttls or ()),
            cache_ttls=cache_ttls,
            options=self._draw_options(len(prompt), is_private=is_private),
        )
        self.private += [request] * is_private
        self._count += 1
        self.scheduler.add_request(request)
        return request_id

    def _draw_options(self, num_tokens: int, *, is_private: bool) -> RequestOptions:
        """Some of what a client may say, where some requests are private."""
        if is_private or not self._private_share:
            return RequestOptions(skip_cache_insert=is_private)
        rng = self._rng
        end = rng.randrange(num_tokens + 1) if rng.random() < 0.3 else None
        session = rng.choice(self._SESSIONS) if rng.random() < 0.6 else None
        return RequestOptions(cache_insert_end=end, session_id=session)

    def _disturb(self) -> None:
        rng, scheduler = self._rng, self.scheduler
        alive = list(scheduler.requests)
        if alive and rng.random() < 0.02:
            scheduler.finish_requests(rng.choice(alive), RequestStatus.FINISHED_ABORTED)
            self.num_aborts += 1
        if self._holds and rng.random() < 0.05:
            held, _ = scheduler.held_prefixes()
            if held and rng.random() < 0.5:
                self.num_forgotten += scheduler.held_prefixes(rng.choice(held).id)[1]
        if self._private_share and rng.random() < 0.03:
            number = session_number(rng.choice(self._SESSIONS), None, None)
            self.num_ended += scheduler.end_session(number)
        if rng.random() < 0.01:
            self.num_resets += scheduler.reset_prefix_cache(rng.random() < 0.5)

    def _draw_token(self) -> int:
        return 7 if self._rng.random() < 0.001 else self._rng.randrange(100, 400)

    def step(self) -> None:
        """One step, with random tokens; some of them end their answers."""
        scheduler, ahead, settled = self.scheduler, self._ahead, None
        if ahead is not None:
            if ahead.take_untold() is not None:
                return
            settled = ahead.settle_if_needed()
        step = scheduler.schedule()
        self.num_preemptions += len(step.preempted_req_ids or ())
        for new in step.scheduled_new_reqs:
            stats = scheduler.requests[new.req_id].prefill_stats
            if stats is not None and new.req_id not in self.cached:
                self.cached[new.req_id] = stats.num_cached_tokens
        if ahead is not None:
            ahead.begin(step, settled)
            return
        scheduler.update_from_output(step, self._draw_tokens(step))
        if self.has_drafter:
            self._draw_drafts(step)

    def begin_model(self, step: SchedulerOutput) -> FinishedStep:
        """Run a step, as an executor would."""
        return FinishedStep(self._draw_tokens(step))

    def _draw_tokens(self, step: SchedulerOutput) -> ModelRunnerOutput:
        rng, scheduler = self._rng, self.scheduler
        sampled = []
        for request_id in step.num_scheduled_tokens:
            if scheduler.requests[request_id].is_prefill_chunk:
                sampled.append([])
                continue
            drafts = step.scheduled_spec_decode_tokens.get(request_id, [])
            count = 1 + rng.randint(0, len(drafts))
            sampled.append([self._draw_token() for _ in range(count)])
        ids = list(step.num_scheduled_tokens)
        result = ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled)
        result.prompt_logprobs_dict = self._scored_prompts.rows(step, scheduler.requests)
        return result

    def _draw_drafts(self, step: SchedulerOutput) -> None:
        rng, scheduler = self._rng, self.scheduler
        drafted = [
            name
            for name in step.num_scheduled_tokens
            if name in scheduler.requests and not scheduler.requests[name].is_prefill_chunk
        ]
        counts = [rng.choice((self._num_drafts,) * 3 + (0,)) for _ in drafted]
        news = [[rng.randrange(900) for _ in range(n)] for n in counts]
        scheduler.update_draft_token_ids(DraftTokenIds(drafted, news))


def make_prompt(seed: int, length: int) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(900) for _ in range(length)]


class Script:
    """Requests served one after the other, recorded."""

    def __init__(self, path: Path, max_bytes: int = 1 << 26, **changes: Any) -> None:
        self.path = path
        self.run = RecordedRun(path, small_settings(**changes), 0, max_bytes)

    def serve(self, prompt: list[int], **params: Any) -> str:
        """Serve a prompt to its end; returns its id."""
        request_id = self.run.add(prompt, max_tokens=1, **params)
        while self.run.scheduler.has_unfinished_requests():
            self.run.step()
        return request_id


def compare_told(trace: CacheTrace) -> dict[str, int]:
    """Compare the twin with life, request by request; returns tokens by source and reason."""
    result = ExactTwin(trace).run()
    assert result.diverged_at is None
    sums: dict[str, int] = {}
    for number, request in trace.requests.items():
        assert request.told is not None
        stats = result.misses[number]
        assert stats.hit_sources() == request.told.sources
        assert stats.miss_tokens == request.told.misses
        for name, tokens in (*request.told.sources.items(), *request.told.misses.items()):
            sums[name] = sums.get(name, 0) + tokens
    return sums
