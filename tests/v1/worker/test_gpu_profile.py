"""The profile run of a GPU's worker, on a CPU."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from benchmarks import tiny_checkpoint
from tests.model_executor.models.decoder.building import build_model
from tests.model_executor.models.decoder.reference import (
    build_hf_model,
    config_as_saved,
    gpt_oss,
)
from vllm.model_executor.models.registry import resolve_model
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.ops.registry import get_reference_op
from vllm.v1.worker.gpu_profile import run_largest_step

CPU = torch.device("cpu")


class Seen:
    """A model that notes the sizes it runs at."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.sizes: list[int] = []

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, meta: Any, caches: Mapping[str, Any]
    ) -> Any:
        self.sizes.append(len(tokens))
        return self._model(tokens, positions, meta, caches)

    def compute_logits(self, streams: torch.Tensor) -> Any:
        self.sizes.append(len(streams))
        return self._model.compute_logits(streams)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v4"])
def test_the_largest_step_runs_over_pages_of_its_own(family: str) -> None:
    if family == "gpt-oss":
        reference = build_hf_model(gpt_oss(), seed=1)
        raw = config_as_saved(reference)
        model: Any = build_model(raw, reference.state_dict())
        size = 16
    else:
        raw = tiny_checkpoint.tiny_config()
        config = resolve_model(raw["architectures"]).parse_config(raw)
        model = resolve_model(raw["architectures"]).load_model_class()(
            config, ops=get_reference_op, dtype=torch.float32, device="cpu"
        )
        for slot in model.weight_slots().values():
            slot.zero_()
        size = 32
    entry = resolve_model(raw["architectures"])
    specs = entry.load_kv_cache_specs()(model.config, size, torch.float32, torch.float32)
    seen = Seen(model)
    run_largest_step(seen, specs, CpuPlatform(), CPU, num_tokens=300, num_logit_rows=7)
    assert seen.sizes == [300, 7]
