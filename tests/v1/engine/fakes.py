"""A scripted executor under the real scheduler, and a tiny byte-level tokenizer."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from vllm.config import (
    CacheConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.exceptions import CheckpointError, EngineDeadError
from vllm.tokenizers import Tokenizer
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

FAKE_CORE = "tests.v1.engine.fakes:build_fake_core"
EOS = "<eos>"
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("l", "d")]


def make_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE: all 256 bytes, a few merges, one special token."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in MERGES]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    return backend


def make_tokenizer() -> Tokenizer:
    return Tokenizer(make_backend(), {"eos_token": EOS})


def make_config(folder: Path, **fake: Any) -> VllmConfig:
    """A configuration for the fake core.

    Args:
        folder: Gets the tokenizer.
        fake: The executor's script, see FakeExecutor; and max_model_len, max_num_seqs,
            max_num_queued_reqs, max_num_queued_tokens, policy, num_blocks, async_scheduling.
    """
    make_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    max_model_len = fake.pop("max_model_len", 256)
    scheduler = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=fake.pop("max_num_batched_tokens", 64),
        max_num_seqs=fake.pop("max_num_seqs", 8),
        max_num_queued_reqs=fake.pop("max_num_queued_reqs", None),
        max_num_queued_tokens=fake.pop("max_num_queued_tokens", None),
        policy=fake.pop("policy", "fcfs"),
        async_scheduling=fake.pop("async_scheduling", None),
    )
    cache = CacheConfig(block_size=16, num_gpu_blocks_override=fake.pop("num_blocks", 64))
    model = ModelConfig(
        "fake-model",
        path=str(folder),
        max_model_len=max_model_len,
        hf_config={
            "vocab_size": make_tokenizer().vocab_size,
            "max_position_embeddings": 1024,
            "architectures": ["Fake"],
        },
        generation_config=fake.pop("generation_config", {}),
        hf_overrides=fake,
    )
    return VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=scheduler,
        load_config=LoadConfig(),
        observability_config=ObservabilityConfig(log_stats=True),
    )


def build_fake_core(vllm_config: VllmConfig) -> EngineCore:
    return EngineCore(vllm_config, FakeExecutor)


def scripted_token(prompt: list[int], index: int, seed: int | None, vocab_size: int) -> int:
    """The fake model: a token that depends on everything it should."""
    return (sum(prompt) + 7 * index + 31 * (seed or 0)) % (vocab_size - 1)


@dataclass(frozen=True)
class Float32:
    """Stands for torch's: importing torch would cost every core process a second."""

    itemsize: int = 4


@dataclass(frozen=True)
class BegunStep:
    """A step whose results can be taken; the worker's own imports torch."""

    take: Callable[[], ModelRunnerOutput]

    def wait(self) -> ModelRunnerOutput:
        return self.take()


class FakeExecutor:
    """Plays a model whose next token follows a rule.

    Script (``hf_overrides``): script: the tokens of every answer, in turn; step_s: seconds a step
    takes; hang_at, crash_at, exit_at: the step that never ends, raises, or ends the process;
    lost_at: the step that begins and brings nothing; fault: what is wrong with the workers;
    start_error: raise at start ("checkpoint" or "bug"); start_s: seconds to start.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._script: dict[str, Any] = vllm_config.model_config.hf_overrides
        self._vocab_size = vllm_config.model_config.hf_config["vocab_size"]
        self._prompts: dict[str, list[int]] = {}
        self._params: dict[str, Any] = {}
        self._num_computed: dict[str, int] = {}
        self.num_steps = 0
        self.finished: list[str] = []
        time.sleep(self._script.get("start_s", 0))
        if self._script.get("start_error") == "checkpoint":
            raise CheckpointError("tensor embed.weight is missing from model.safetensors.")
        if self._script.get("start_error") == "bug":
            raise RuntimeError("a bug")

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        spec = FullAttentionSpec(
            block_size=16,
            num_kv_heads=1,
            head_size=4,
            dtype=Float32(),  # type: ignore[arg-type]
        )
        return [{"layer.0": spec}]

    def determine_available_memory(self) -> list[int]:
        return [1 << 20]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        self.kv_cache_config = kv_cache_configs[0]

    def bind_wake(self, wake: Any) -> bool:
        return False

    def find_fault(self) -> str | None:
        return self._script.get("fault")

    def shutdown(self) -> None:
        self._prompts.clear()

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        self._misbehave()
        self.finished.extend(plan.finished_req_ids)
        for req_id in plan.finished_req_ids:
            self._prompts.pop(req_id, None)
        for new in plan.scheduled_new_reqs:
            self._prompts[new.req_id] = list(new.prompt_token_ids or [])
            self._params[new.req_id] = new.sampling_params
            self._num_computed[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._num_computed[req_id] = num_computed
        req_ids = list(plan.num_scheduled_tokens)
        sampled = [self._sample(r, plan.num_scheduled_tokens[r]) for r in req_ids]
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={r: i for i, r in enumerate(req_ids)},
            sampled_token_ids=sampled,
            logprobs=self._make_logprobs(sampled),
            prompt_logprobs_dict={
                r: rows
                for r in req_ids
                if (rows := self._prompt_rows(r, plan.num_scheduled_tokens[r])) is not None
            },
        )

    def begin_model(self, plan: SchedulerOutput) -> BegunStep:
        result, step = self.execute_model(plan), self.num_steps

        def take() -> ModelRunnerOutput:
            if step == self._script.get("lost_at"):
                raise EngineDeadError("rank 0 was ended by signal 9")
            return result

        return BegunStep(take)

    def _misbehave(self) -> None:
        step = self.num_steps
        time.sleep(self._script.get("step_s", 0))
        if step == self._script.get("hang_at"):
            threading.Event().wait()
        if step == self._script.get("crash_at"):
            raise RuntimeError("the device is on fire")
        if step == self._script.get("exit_at"):
            os._exit(7)

    def _sample(self, req_id: str, num_scheduled: int) -> list[int]:
        prompt = self._prompts[req_id]
        index = self._num_computed[req_id] + num_scheduled - len(prompt)
        if index < 0:
            return []
        script = self._script.get("script")
        if script:
            return [script[index % len(script)]]
        seed = self._params[req_id].seed
        return [scripted_token(prompt, index, seed, self._vocab_size)]

    def _make_logprobs(self, sampled: list[list[int]]) -> LogprobsLists | None:
        """Two alternatives a token: itself (rank 1), its successor (rank 2)."""
        tokens = np.array([t for ids in sampled for t in ids], dtype=np.int64)
        if not len(tokens):
            return None
        ids = np.stack([tokens, tokens, (tokens + 1) % self._vocab_size], axis=1)
        values = np.tile(np.array([-0.5, -0.5, -1.5], dtype=np.float32), (len(tokens), 1))
        starts = np.cumsum([0, *map(len, sampled)]).tolist()
        return LogprobsLists(ids, values, np.ones(len(tokens), dtype=np.int64), starts)

    def _prompt_rows(self, req_id: str, num_scheduled: int) -> Any:
        if self._params[req_id].prompt_logprobs is None:
            return None
        prompt, start = self._prompts[req_id], self._num_computed[req_id]
        targets = prompt[start + 1 : start + num_scheduled + 1]
        if not targets:
            return None
        ids = np.array([[t, t] for t in targets], dtype=np.int64)
        values = np.full(ids.shape, -2.0, dtype=np.float32)
        return ids, values, np.ones(len(targets), dtype=np.int64)
