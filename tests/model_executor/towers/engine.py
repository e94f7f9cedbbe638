"""An engine core that is given prompts with pictures by hand, whatever the interfaces do."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from tests.model_executor.towers.checkpoints import IMAGE_ID
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_factory import build_engine_core
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.request import Request


@dataclass
class Answer:
    """What came of a request.

    Attributes:
        tokens: Sampled.
        logprobs: Of each.
        num_cached: Prompt tokens found in the cache.
        num_rebuilt: Of those, hit because window rows are made again.
        chunks: Tokens of each of its steps.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_cached: int = 0
    num_rebuilt: int = 0
    chunks: list[int] = field(default_factory=list)


@dataclass
class Prompt:
    """Text and pictures in order.

    Attributes:
        parts: Token ids, or pixels with their grid.
        salt: Of the cache.
    """

    parts: Sequence[Any]
    salt: str | None = None

    @property
    def pictures(self) -> list[np.ndarray]:
        """Their pixels."""
        return [part[0] for part in self.parts if isinstance(part, tuple)]

    def lay_out(self) -> tuple[list[int], list[MultiModalFeatureSpec]]:
        """Return the prompt's ids, and its pictures."""
        ids: list[int] = []
        features = []
        for part in self.parts:
            if not isinstance(part, tuple):
                ids += part
                continue
            pixels, (rows, columns) = part
            identifier = sha256(pixels.tobytes() + bytes([rows, columns])).hexdigest()
            data = MultiModalKwargsItem({"pixels": pixels, "grid": (rows, columns)})
            place = PlaceholderRange(len(ids), rows * columns)
            features.append(MultiModalFeatureSpec(data, "image", identifier, place))
            ids += [IMAGE_ID] * (rows * columns)
        return ids, features


class PictureEngine:
    """One engine core.

    Args:
        folder: The checkpoint.
        chunk: Most tokens of a prompt in a step; 0: as many as there is room for.
        has_eyes: Whether the tower is there.
        settings: Of ``EngineArgs``.
    """

    def __init__(
        self, folder: Path, chunk: int = 0, *, has_eyes: bool = True, **settings: Any
    ) -> None:
        args = {
            "block_size": 32,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 24,
            **settings,
        }
        config = EngineArgs(str(folder), **args).create_vllm_config()
        if not has_eyes:
            config.model_config.image_family = None
            config.model_config.pictures_are_whole = False
        config.scheduler_config.long_prefill_token_threshold = chunk
        self.core: EngineCore = build_engine_core(config)
        self._num_requests = 0

    def run(self, *prompts: Prompt, max_tokens: int = 6) -> list[Answer]:
        """Return the answers of prompts that come together."""
        answers: dict[str, Answer] = {}
        for prompt in prompts:
            name = f"r{self._num_requests}"
            self._num_requests += 1
            ids, features = prompt.lay_out()
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=1)
            params.ignore_eos = True
            request = Request(
                name,
                ids,
                params,
                mm_features=features,
                cache_salt=prompt.salt,
                block_hasher=self.core._block_hasher,
            )
            answers[name] = Answer()
            self.core.add_request(request)
        left = set(answers)
        for _ in range(5000):
            if not left:
                return list(answers.values())
            self._step(answers, left)
        raise AssertionError("requests do not end")

    def _step(self, answers: dict[str, Answer], left: set[str]) -> None:
        schedule = self.core.scheduler.schedule

        def watch() -> Any:
            output = schedule()
            for name, count in output.num_scheduled_tokens.items():
                answers[name].chunks.append(count)
            return output

        self.core.scheduler.schedule = watch  # type: ignore[method-assign]
        try:
            outputs, has_orders = self.core.step()
        finally:
            self.core.scheduler.schedule = schedule  # type: ignore[method-assign]
        if not has_orders:
            time.sleep(0.002)
        for bundle in outputs.values():
            for item in bundle.outputs:
                answer = answers[item.request_id]
                answer.tokens += item.new_token_ids
                if item.new_logprobs is not None:
                    answer.logprobs += [float(row[0]) for row in item.new_logprobs.logprobs]
                if item.prefill_stats is not None:
                    answer.num_cached = item.prefill_stats.num_cached_tokens
                    answer.num_rebuilt = item.prefill_stats.rebuild_saved_tokens
                if item.finish_reason is not None:
                    left.discard(item.request_id)

    def close(self) -> None:
        """Shut the core down."""
        self.core.shutdown()
