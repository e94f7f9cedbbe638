"""The GPU worker's own decisions, as far as a machine without a GPU can show them."""

from typing import Any

import pytest
import torch

from tests.v1.worker.test_worker import make_config
from vllm.exceptions import EngineError
from vllm.platforms.cuda import CudaReferencePlatform
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu_worker import GPUWorker


class Platform(CudaReferencePlatform):
    """What captures, and the group, tell who of them was let go of."""

    def __init__(self) -> None:
        self.released: list[str] = []

    def make_graph_device(self) -> Any:
        return self

    def release(self) -> None:
        self.released.append("graphs")

    def close(self) -> None:
        self.released.append("group")


def test_graphs_go_before_the_group_whose_sums_they_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    platform = Platform()
    worker = GPUWorker(make_config(), platform)
    worker._group = platform  # type: ignore[assignment]
    monkeypatch.setattr(gpu_worker, "can_replay", lambda *_: True)
    monkeypatch.setattr(gpu_worker, "make_graphed_step_model", lambda *_, **__: "steps")
    assert worker._make_step_model(None, {}, torch.device("cpu")) == "steps"  # type: ignore[arg-type]
    worker.shutdown()
    worker.shutdown()
    assert platform.released == ["graphs", "group"]


def test_what_cannot_be_captured_is_told_with_the_way_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    worker = GPUWorker(make_config(), Platform())
    monkeypatch.setattr(gpu_worker, "can_replay", lambda *_: True)
    monkeypatch.setattr(gpu_worker, "make_graphed_step_model", refuse)
    with pytest.raises(EngineError, match=r"stream is capturing.*--enforce-eager"):
        worker._make_step_model(None, {}, torch.device("cpu"))  # type: ignore[arg-type]
