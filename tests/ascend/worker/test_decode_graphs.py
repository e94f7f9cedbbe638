"""Call order and results of decode graphs, on a fake ``torch.npu`` that replays by running."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from vllm_ascend.worker.decode_graphs import DecodeGraphs


@dataclass(frozen=True)
class Meta:
    """As much of a StepMetadata as the wrapper reads."""

    decodes: tuple[torch.Tensor, ...]
    chunks: tuple[int, ...]
    group_of: Mapping[str, int]
    longest: int


class FakeNPU:
    """Records calls; a graph keeps what ran while it was recorded and runs it again."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.recording: list[Callable[[], None]] | None = None
        self.NPUGraph = self._make_graph

    def _make_graph(self) -> Any:
        self.calls.append("NPUGraph")
        npu = self

        class Graph:
            work: list[Callable[[], None]]

            def replay(self) -> None:
                npu.calls.append("replay")
                for run in self.work:
                    run()

        return Graph()

    @contextmanager
    def graph(self, graph: Any, pool: Any = None) -> Iterator[None]:
        self.calls.append(f"graph(pool={pool})")
        graph.work = self.recording = []
        yield
        self.recording = None
        self.calls.append("end")

    def graph_pool_handle(self) -> str:
        self.calls.append("graph_pool_handle")
        return "shared"

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def current_stream(self) -> Any:
        npu = self

        class Stream:
            def synchronize(self) -> None:
                npu.calls.append("stream.synchronize")

        return Stream()


class FakeModel:
    """Writes its output into a buffer of the call's, so that a replay can do it again."""

    def __init__(self, npu: FakeNPU) -> None:
        self.npu = npu

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, meta: Meta, caches: Any
    ) -> torch.Tensor:
        self.npu.calls.append("model")
        out = torch.empty_like(token_ids)

        def run() -> None:
            torch.add(token_ids * 1000 + positions, meta.decodes[0], out=out)

        run()
        if self.npu.recording is not None:
            self.npu.recording.append(run)
        return out

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        return streams + 1

    def forward_mtp(self, streams: torch.Tensor, *others: Any) -> torch.Tensor:
        self.npu.calls.append("mtp")
        return streams + 2

    def compute_mtp_logits(self, streams: torch.Tensor) -> torch.Tensor:
        return streams + 3


def step(token: int, *, batch: int = 2, longest: int = 7, chunks: tuple[int, ...] = ()) -> tuple:
    rows = torch.arange(batch)
    meta = Meta((rows + token,), chunks, {"layers.0": 0}, longest)
    return torch.full((batch,), token), rows, meta, {}


@pytest.fixture
def npu() -> FakeNPU:
    return FakeNPU()


@pytest.fixture
def graphs(npu: FakeNPU) -> DecodeGraphs:
    return DecodeGraphs(FakeModel(npu), npu)  # type: ignore[arg-type]


def test_call_order(npu: FakeNPU, graphs: DecodeGraphs) -> None:
    graphs(*step(1))
    assert npu.calls == ["model"]
    npu.calls.clear()
    graphs(*step(2))
    assert npu.calls == [
        "model",
        "graph_pool_handle",
        "NPUGraph",
        "synchronize",
        "graph(pool=shared)",
        "model",
        "end",
    ]
    npu.calls.clear()
    graphs(*step(3))
    assert npu.calls == ["stream.synchronize", "replay"]


def test_replays_use_the_steps_own_tensors(graphs: DecodeGraphs, npu: FakeNPU) -> None:
    results = [graphs(*step(token)) for token in (1, 2, 3, 4)]
    for token, result in zip((1, 2, 3, 4), results, strict=True):
        expected = FakeModel(FakeNPU())(*step(token))
        assert torch.equal(result, expected)  # earlier results outlive later replays


def test_other_signatures_are_not_replayed(graphs: DecodeGraphs, npu: FakeNPU) -> None:
    for token in (1, 2):
        graphs(*step(token))
    npu.calls.clear()
    graphs(*step(3, batch=3))
    graphs(*step(3, longest=8))  # a number the host's control flow may depend on
    assert npu.calls == ["model", "model"]


def test_prefill_runs_as_it_is(graphs: DecodeGraphs, npu: FakeNPU) -> None:
    for token in range(4):
        graphs(*step(token, chunks=(0,)))
    assert npu.calls == ["model"] * 4


def test_graphs_are_bounded(npu: FakeNPU) -> None:
    graphs = DecodeGraphs(FakeModel(npu), npu, max_graphs=2)  # type: ignore[arg-type]
    for batch in (1, 2, 3):
        for token in (1, 2):
            graphs(*step(token, batch=batch))
    npu.calls.clear()
    graphs(*step(5, batch=1))
    assert npu.calls == ["model"]
    npu.calls.clear()
    graphs(*step(5, batch=3))
    assert npu.calls == ["stream.synchronize", "replay"]


def test_logits_and_drafts_pass_through(graphs: DecodeGraphs, npu: FakeNPU) -> None:
    assert graphs.compute_logits(torch.zeros(1)).item() == 1
    token_ids, positions, meta, caches = step(1)
    for _ in range(4):
        drafted = graphs.forward_mtp(torch.zeros(1), token_ids, positions, meta, caches)
        assert graphs.compute_mtp_logits(drafted).item() == 5
    assert npu.calls == ["mtp"] * 4
