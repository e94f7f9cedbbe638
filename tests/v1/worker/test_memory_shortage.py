"""A device without room: the error says what was asked for, what is free, which flag to change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.v1.worker.test_worker import make_config
from vllm.exceptions import ConfigError, DeviceMemoryError
from vllm.platforms.cuda import CudaReferencePlatform
from vllm.v1.attention.ops.registry import get_reference_op
from vllm.v1.worker import gpu_worker, worker
from vllm.v1.worker.gpu_worker import GPUWorker
from vllm.v1.worker.memory_shortage import read_asked_bytes

MESSAGE = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8 GiB"


class SmallMemory:
    """A card of 8 GiB, 1 GiB of it free."""

    def mem_get_info(self) -> tuple[int, int]:
        return 1 << 30, 8 << 30

    def memory_reserved(self) -> int:
        return 0

    def reset_peak_memory_stats(self) -> None:
        pass


class SmallCard(CudaReferencePlatform):
    """The reference platform, which tells of a card's memory."""

    def device_memory(self) -> Any:
        return SmallMemory()

    def get_op(self, name: str) -> Any:
        # Other tests of this process may have loaded kernels that are not interpreted.
        return get_reference_op(name)


def refuse(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError(MESSAGE)


@pytest.fixture
def on_small_card() -> GPUWorker:
    made = GPUWorker(make_config(), SmallCard())
    made.init_device()
    return made


@pytest.mark.parametrize(
    ("place", "name", "step", "flags"),
    [
        (torch, "empty", GPUWorker.load_model, ["--tensor-parallel-size (1)", "quantised"]),
        (worker, "load_model_weights", GPUWorker.load_model, ["load the weights"]),
        (
            gpu_worker,
            "run_largest_step",
            GPUWorker.determine_available_memory,
            ["--max-num-batched-tokens (2048)", "--max-num-seqs (128)", "run the largest step"],
        ),
        (
            worker.Worker,
            "initialize_from_config",
            lambda own: own.initialize_from_config(None),
            ["--gpu-memory-utilization (0.9", "--enforce-eager"],
        ),
        (
            worker.Worker,
            "execute_model",
            lambda own: own.execute_model(None),
            ["--gpu-memory-utilization (0.9", "run a step"],
        ),
    ],
    ids=["build", "load", "profile", "graphs", "step"],
)
def test_each_stage_names_its_flags(
    place: Any,
    name: str,
    step: Callable[[GPUWorker], Any],
    flags: list[str],
    on_small_card: GPUWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, name, refuse)
    with pytest.raises(DeviceMemoryError) as caught:
        step(on_small_card)
    message = str(caught.value)
    assert "2.50 GiB more were asked for, 1.00 GiB of 8.00 GiB are free" in message
    assert all(flag in message for flag in flags), message
    assert (caught.value.asked_bytes, caught.value.free_bytes) == (5 << 29, 1 << 30)
    assert isinstance(caught.value, ConfigError)


def test_what_an_allocator_was_asked_for() -> None:
    assert read_asked_bytes(RuntimeError("tried to allocate 512 bytes.")) == 512
    assert read_asked_bytes(RuntimeError("Tried to allocate 20.00 MiB")) == 20 << 20
    assert read_asked_bytes(RuntimeError("NPU out of memory")) is None
