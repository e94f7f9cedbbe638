"""Real engines on a tiny checkpoint whose MTP block is right most of the time."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.tiny_checkpoint import make_tensors, tiny_config, write_checkpoint
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest
from vllm.v1.metrics.stats import SpecDecodingStats
from vllm.v1.worker.model_runner import ModelRunner

NOISE = 0.45
"""At this scale three drafts of four are right, and every length of acceptance comes up."""


def write_tiny(folder: Path, **overrides: Any) -> Path:
    """Write the checkpoint, of a config that differs so; returns its folder."""
    config = tiny_config(**overrides)
    write_checkpoint(folder, config, make_tensors(config, noise=NOISE, mtp_noise=NOISE))
    return folder


def mtp(k: int, **more: Any) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": k, **more}


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


def make_config(
    folder: Path,
    raw: dict[str, Any] | None,
    *,
    unit: int = 32,
    num_blocks: int = 800,
    budget: int = 512,
    caching: bool = True,
    max_len: int = 600,
) -> VllmConfig:
    """Configure an engine on the tiny checkpoint."""
    return VllmConfig(
        model_config=ModelConfig(
            "tiny", path=str(folder), hf_config=tiny_config(), max_model_len=max_len
        ),
        cache_config=CacheConfig(
            block_size=unit, num_gpu_blocks_override=num_blocks, enable_prefix_caching=caching
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=max_len, max_num_batched_tokens=budget, max_num_seqs=16
        ),
        speculative_config=SpeculativeConfig.from_dict(raw) if raw else None,
    )


def make_core(folder: Path, raw: dict[str, Any] | None, **options: Any) -> EngineCore:
    """Build an engine core that gathers statistics."""
    core = EngineCore(make_config(folder, raw, **options), UniProcExecutor)
    core.scheduler.log_stats = True
    return core


def get_runner(core: EngineCore) -> ModelRunner:
    assert isinstance(core.executor, UniProcExecutor)
    runner = core.executor._worker._runner
    assert isinstance(runner, ModelRunner)
    return runner


@dataclass
class Answer:
    """What came of one request.

    Attributes:
        margins: Per token the log probability of the best token less that of the second.
        sizes: Tokens of each step.
        num_cached: Tokens of its hits, over all admissions.
        miss_tokens: Tokens by reason, of its last admission.
        num_preemptions: Times it was set back.
    """

    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    finish: str | None = None
    num_cached: int = 0
    miss_tokens: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def add(self, output: EngineCoreOutput) -> None:
        self.tokens += output.new_token_ids
        if output.new_token_ids:
            self.sizes.append(len(output.new_token_ids))
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs
        if output.prefill_stats is not None:
            self.num_cached += output.prefill_stats.num_cached_tokens
            self.miss_tokens = dict(output.prefill_stats.miss_tokens)
        if output.finish_reason is not None:
            self.finish = str(output.finish_reason)
        self.num_draft_tokens += output.num_draft_tokens
        self.num_accepted_tokens += output.num_accepted_tokens
        self.num_preemptions = max(self.num_preemptions, output.num_preemptions)

    @property
    def margins(self) -> list[float]:
        return [row[1] - row[2] for row in self.logprobs]


class Session:
    """Feeds a core, gathers answers and statistics."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.answers: dict[str, Answer] = {}
        self.stats = SpecDecodingStats.new(32)

    def add(self, prompt: Sequence[int], params: SamplingParams, name: str | None = None) -> str:
        request_id = name or f"r{len(self.answers)}"
        self.answers[request_id] = Answer(list(prompt), params)
        message = EngineCoreRequest(request_id, list(prompt), params, time.time())
        self.core.add_request(self.core.make_request(message))
        return request_id

    def step(self) -> None:
        for batch in self.core.step()[0].values():
            for output in batch.outputs:
                self.answers[output.request_id].add(output)
            stats = batch.scheduler_stats
            drafted = stats.spec_decoding_stats if stats is not None else None
            if drafted is not None:
                self.stats.num_drafts += drafted.num_drafts
                self.stats.num_draft_tokens += drafted.num_draft_tokens
                self.stats.num_accepted_tokens += drafted.num_accepted_tokens
                for i, count in enumerate(drafted.num_accepted_tokens_per_pos):
                    self.stats.num_accepted_tokens_per_pos[i] += count

    def run(self) -> None:
        while self.core.has_work():
            self.step()

    def serve(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        request_id = self.add(prompt, params)
        self.run()
        return self.answers[request_id]
