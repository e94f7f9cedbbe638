"""The sections of a GPU's check run to their end, and what they launch is compiled ahead."""

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_ahead, gpu_compile, gpu_run
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.attention.ops.registry import get_reference_op
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


def test_every_config_of_the_check_is_one_that_the_engine_serves() -> None:
    for family, raw in gpu.FAMILIES.items():
        for widths in ({}, gpu_compile._RELEASED.get(family, {})):
            config = {**gpu.TINY, **raw, **widths}
            resolve_model(config["architectures"]).parse_config(config)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed is as short as can be, its ops the reference's."""
    for name, value in {"_PROMPT": 2, "_BATCHES": (1, 2), "_PREFILL": 20, "_NUM_STEPS": 6}.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu, "get_triton_op", get_reference_op)


LIMITS = {"copy, GB/s": 1.0, "bf16 product, TFLOP/s": 1.0}
LLAMA = {**gpu.TINY, **gpu.FAMILIES["llama"], "num_hidden_layers": 1}


@pytest.mark.usefixtures("short")
def test_a_model_is_timed_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    found = gpu.bench_model(LLAMA, device, LIMITS)
    for _, figure, *_ in gpu_run._AIMS[:1]:
        assert found[figure] > 0
    for part in ("decode, batch 1", "decode, batch 2", "prefill"):
        assert found[f"{part}, kernels, us"]
    assert found["prefill, share of bf16 rate"] > 0

    # A step that cannot be captured costs none of the other figures.
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(gpu.Again, "capture", refuse)
    without = gpu.bench_model(LLAMA, device, LIMITS)
    assert without["batch 1, graphs"] == "not captured: operation not permitted"
    assert without.keys() >= {key for key in found if ", graphs" not in key}


def test_pages_end() -> None:
    device = torch.device("cpu")
    model = gpu.build_model(LLAMA, torch.float32, device, get_reference_op)
    pages = gpu.Pages(LLAMA, model, device, 3, 0)
    for _ in range(3):
        pages.forget()
        pages.step([(0, [1] * 40)])
    with pytest.raises(AssertionError, match="no block is left"):
        pages.step([(1, [1] * 40)])


def test_events_of_a_card_are_read_when_they_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        is_over = False

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            self.is_over = True

        def elapsed_time(self, end: "Event") -> float:
            assert end.is_over
            return 2.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    calls: list[int] = []
    assert gpu.measure(lambda: calls.append(1), 4) == 0.002
    assert len(calls) == 3 + 4


def test_aims_are_told_from_what_was_found() -> None:
    section, figure, _, aim = gpu_run._AIMS[0]
    lines = gpu_run.compare_aims({section: {"results": {figure: aim}}})
    assert lines[0].endswith("met")
    assert all(line.endswith("not measured") for line in lines[1:])
    lines = gpu_run.compare_aims({section: {"results": {figure: aim / 2}}})
    assert lines[0].endswith("TO TUNE")
    at_most = next(row for row in gpu_run._AIMS if row[2] == "<=")
    lines = gpu_run.compare_aims({at_most[0]: {"results": {at_most[1]: 2 * at_most[3]}}})
    assert lines[-1].endswith("TO TUNE")
