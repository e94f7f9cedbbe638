"""Decode graphs inside a real engine, on a fake ``torch.npu`` whose replay runs the model again."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.ascend.test_reference_mode import make_core, run_alone
from tests.ascend.worker.test_decode_graphs import FakeNPU
from tests.ascend.worker.test_worker import FakeDevice, HalfNPU
from tests.v1.engine.test_cache_keeps_outputs import random_tokens
from vllm.config import SpeculativeConfig
from vllm.platforms.cpu import CpuPlatform
from vllm_ascend.envs import GRAPH_VARIABLE
from vllm_ascend.worker.worker import NPUWorker


class Device(FakeDevice, FakeNPU):
    """Memory and graphs in one."""

    def __init__(self) -> None:
        FakeNPU.__init__(self)

    def mem_get_info(self) -> tuple[int, int]:
        return 4 << 30, 4 << 30

    def memory_reserved(self) -> int:
        return 0


class RecordedModel:
    """While a graph is recorded, leaves behind what a replay must do."""

    def __init__(self, model: Any, device: FakeNPU) -> None:
        self._model, self._device = model, device

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: Any,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        streams = self._model(token_ids, positions, meta, kv_caches)
        if self._device.recording is not None:
            self._device.recording.append(
                lambda: streams.copy_(self._model(token_ids, positions, meta, kv_caches))
            )
        return streams

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(streams)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)  # the MTP block's part


class RecordingWorker(NPUWorker):
    def load_model(self) -> None:
        super().load_model()
        self._model = RecordedModel(self._model, self._ascend.device_api())


class GraphPlatform(HalfNPU):
    worker_class_path = f"{__name__}.RecordingWorker"


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [None, "mtp"])
def test_graphed_decode_says_the_same(drafts: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setenv(GRAPH_VARIABLE, "1")
    speculative = None
    if drafts is not None:
        speculative = SpeculativeConfig.from_dict({"method": drafts, "num_speculative_tokens": 1})
    graphed = make_core(GraphPlatform(device), speculative=speculative)
    plain = make_core(CpuPlatform(), speculative=speculative)
    rng = random.Random(3)
    for _ in range(4):
        # Prompts of one length meet the same signatures again.
        prompt = random_tokens(rng, 150)
        assert run_alone(graphed, prompt, 12) == run_alone(plain, prompt, 12)
    # Steps that verify drafts are decode steps of several rows a request: replayed too.
    assert device.calls.count("replay") > 12
    graphed.shutdown()
    plain.shutdown()
