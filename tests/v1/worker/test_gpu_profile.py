"""The profile run of a GPU's worker, on a CPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import tiny_checkpoint
from tests.model_executor.models.decoder.building import build_model
from tests.model_executor.models.decoder.reference import (
    build_hf_model,
    config_as_saved,
    gpt_oss,
    kimi_linear,
    published_tensors,
    qwen3_5,
)
from vllm.model_executor.models.registry import resolve_model
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.ops.registry import get_reference_op
from vllm.v1.attention.step_model import StepModel, make_torch_step_model
from vllm.v1.attention.step_tables import RequestSlice
from vllm.v1.sample.metadata import RandomRows
from vllm.v1.sample.sampler import draw_tokens
from vllm.v1.worker.gpu_profile import run_largest_step

CPU = torch.device("cpu")


def make_decoder(raw: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns a decoder's config.json and our model of it."""
    reference = build_hf_model(raw, seed=1)
    saved = {**config_as_saved(reference), "architectures": raw["architectures"]}
    return saved, build_model(saved, published_tensors(reference))


def make_v4() -> tuple[dict[str, Any], Any]:
    """Returns DeepSeek-V4's, of zeros."""
    raw = tiny_checkpoint.tiny_config()
    entry = resolve_model(raw["architectures"])
    model = entry.load_model_class()(
        entry.parse_config(raw), ops=get_reference_op, dtype=torch.float32, device="cpu"
    )
    for slot in model.weight_slots().values():
        slot.zero_()
    return raw, model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: make_decoder(gpt_oss()), 16),
        (lambda: make_decoder(qwen3_5()), 16),
        (lambda: make_decoder(kimi_linear()), 16),
        (make_v4, 32),
    ],
    ids=["gpt-oss", "qwen3.5", "kimi", "deepseek-v4"],
)
def test_the_largest_step_runs_over_pages_of_its_own(
    make: Callable[[], tuple[dict[str, Any], Any]], size: int
) -> None:
    raw, model = make()
    specs = resolve_model(raw["architectures"]).load_kv_cache_specs()(
        model.config, size, torch.float32, torch.float32
    )
    sizes: list[int] = []
    drawn: list[int] = []
    settled: list[tuple[list[int], list[int]]] = []

    def make_steps(model: Any, layout: Any, caches: Any, device: torch.device) -> StepModel:
        steps = make_torch_step_model(model, device, layout, caches)

        def settle(slices: Sequence[RequestSlice], num_accepted: Sequence[int]) -> None:
            settled.append(([item.num_drafts for item in slices], list(num_accepted)))
            if steps.settle_drafts is not None:
                steps.settle_drafts(slices, num_accepted)

        seen = Seen(model, sizes)
        return replace(steps, model=seen, draw_tokens=draw, settle_drafts=settle)

    def draw(logits: torch.Tensor, random: RandomRows, uniforms: np.ndarray) -> torch.Tensor:
        drawn.append(len(uniforms))
        return draw_tokens(logits, random, uniforms)

    run_largest_step(
        model, specs, CpuPlatform(), CPU, make_steps, num_tokens=300, num_logit_rows=7, num_drafts=3
    )
    assert sizes == [300, 7, 5, 5, 1, 1]
    assert drawn == [7, 6]
    # What settles drafts is compiled too.
    assert settled == [([3], [3])]


class Seen:
    """A model that notes the sizes it runs at."""

    def __init__(self, model: Any, sizes: list[int]) -> None:
        self._model, self._sizes = model, sizes

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, meta: Any, caches: Mapping[str, Any]
    ) -> Any:
        self._sizes.append(len(tokens))
        return self._model(tokens, positions, meta, caches)

    def compute_logits(self, streams: torch.Tensor) -> Any:
        self._sizes.append(len(streams))
        return self._model.compute_logits(streams)
