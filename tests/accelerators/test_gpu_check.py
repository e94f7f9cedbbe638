"""The sections of a GPU's check run to their end, and what they launch is compiled ahead."""

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_ahead
from vllm.v1.attention.ops.triton.launch import launching_by, run_kernel

pytestmark = pytest.mark.slow


class _Pool:
    """Compiles nothing."""

    def submit(self, *_: Any) -> Future[float]:
        done: Future[float] = Future()
        done.set_result(0.0)
        return done


def test_families_answer_and_their_kernels_are_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = {"kimi-linear": gpu.FAMILIES["kimi-linear"]}
    monkeypatch.setattr(gpu, "FAMILIES", chosen)
    launched: set[str] = set()

    def launch(kernel: Any, grid: Any, args: Any, options: Any) -> None:
        launched.add(kernel.__name__)
        run_kernel(kernel, grid, args, options)

    with launching_by(launch):
        found = gpu.check_families(torch.device("cpu"), True)
    assert found["wrong"] == {}
    assert set(found) >= set(chosen)

    dispatcher = gpu_ahead.Dispatcher(_Pool())  # type: ignore[arg-type]
    with launching_by(dispatcher.launch):
        for name, run in gpu_ahead.list_rehearsals():
            if name.startswith("family"):
                run()
    assert len(launched) > 10
    assert launched <= {key.split()[0] for key in dispatcher.pending}
