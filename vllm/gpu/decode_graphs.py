"""Decode steps replayed as CUDA graphs, one for each of a few batch sizes.

A graph replays kernels on fixed addresses. What changes from step to step lies in buffers at such
addresses: tokens, positions, and the tables of ``PagedTablesBuilder``. A step of n requests is
filled up to the next size with rows of no request, which read and write no pages:

    n requests -> size s >= n -> tables of s rows, uploaded -> replay graph s -> first n rows

Attention's grid does not depend on the length of contexts (their splits are fixed in number), so
one graph serves all of them. A model with entries has graphs by the length of contexts too
(``entry_graphs``). All are captured at start, largest first, in one memory pool.
"""

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm.logger import init_logger
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.attention.paged_tables import PagedTables, PagedTablesBuilder
from vllm.v1.attention.step_tables import RequestSlice

logger = init_logger(__name__)

# A graph's kernels must be compiled and their workspaces be there before it is captured.
_WARM_UPS = 2


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Run its kernels again, on the same addresses."""


class GraphDevice(Protocol):
    """What captures; tests put a recorder in its place."""

    def capture(
        self, run: Callable[[], torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> tuple[Graph, torch.Tensor]:
        """Run a step that is recorded instead of computed; return it and where its result is.

        Args:
            run: The step.
            buffers: What the caller writes between replays.
        """

    def allocated_bytes(self) -> int:
        """Return the memory that tensors and graphs hold."""

    def release(self) -> None:
        """Let go of what was captured, which nobody replays any more."""


class CudaGraphDevice:
    """``torch.cuda.CUDAGraph``; graphs share one memory pool. Has never been run on a device."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: list[torch.cuda.CUDAGraph] = []

    def capture(
        self, run: Callable[[], torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> tuple[Graph, torch.Tensor]:
        """See ``GraphDevice``."""
        del buffers
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may allocate meanwhile, which is no fault of this capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        self._captured.append(graph)
        return graph, result

    def allocated_bytes(self) -> int:
        """See ``GraphDevice``."""
        return int(torch.cuda.memory_reserved())

    def release(self) -> None:
        """See ``GraphDevice``."""
        for graph in self._captured:
            graph.reset()
        self._captured.clear()


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    graph: Graph
    streams: torch.Tensor


class CapturedSteps:
    """A model's captured steps, by what fixes their shapes.

    Args:
        model: The model.
        kv_caches: Cache name -> pages.
        max_rows: Of a step.
        device: Where it runs.

    Owns: the graphs, and the tokens and positions that they read.
    """

    def __init__(
        self,
        model: Any,
        kv_caches: Mapping[str, torch.Tensor],
        max_rows: int,
        device: torch.device,
    ) -> None:
        self._model, self._kv_caches = model, kv_caches
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._captured: dict[Hashable, _CapturedStep] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def capture(
        self,
        graphs: GraphDevice,
        shape: Hashable,
        num_rows: int,
        find_meta: Callable[[], Any],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        """Capture one step.

        Args:
            graphs: Captures.
            shape: Names it.
            num_rows: Its rows, those of no token too.
            find_meta: Returns what the model reads; what it computes is captured too.
            buffers: Where the caller writes tables between replays, and what else lives longer.
        """
        tokens, positions = self._token_ids[:num_rows], self._positions[:num_rows]

        def run() -> torch.Tensor:
            streams: torch.Tensor = self._model(tokens, positions, find_meta(), self._kv_caches)
            return streams

        lasting = (self._token_ids, self._positions, *buffers)
        self._captured[shape] = _CapturedStep(*graphs.capture(run, lasting))

    def replay(
        self, shape: Hashable, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the streams of a step whose tables are laid out; None: it was not captured."""
        captured = self._captured.get(shape)
        if captured is None:
            return None
        num_rows = len(token_ids)
        self._token_ids[:num_rows].copy_(token_ids, non_blocking=True)
        self._positions[:num_rows].copy_(positions, non_blocking=True)
        if num_rows < len(captured.streams):
            # Rows of no token are all of one: a router then sends them to the same few experts.
            self._token_ids[num_rows : len(captured.streams)].zero_()
        captured.graph.replay()
        # The next replay writes here again; by then the logits of these rows are computed.
        return captured.streams[:num_rows]


def choose_sizes(max_requests: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, largest first: 1, 2, 4, then multiples of 8."""
    sizes = {size for size in (1, 2, 4) if size <= max_requests}
    return tuple(sorted(sizes | {*range(8, max_requests + 1, 8), max_requests}, reverse=True))


class DecodeGraphs:
    """A paged model whose decode steps are replayed; other steps run as they are.

    Args:
        model: The model.
        make_builder: Makes what builds its tables, on buffers of its own.
        layout: Its KV groups.
        kv_caches: Cache name -> pages.
        sizes: Batch sizes to capture.
        max_blocks: Blocks of the longest request, of all groups together.
        device: Where it runs.

    Owns: the graphs, and the tables of decode steps that they read.
    """

    def __init__(
        self,
        model: Any,
        make_builder: Callable[[], PagedTablesBuilder],
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        sizes: Sequence[int],
        max_blocks: int,
        device: torch.device,
    ) -> None:
        self._model, self._layout = model, layout
        # Buffers of other steps may grow, and so move.
        self._builder, self._other_builder = make_builder(), make_builder()
        self._sizes = tuple(sorted(sizes))
        most = self._sizes[-1]
        self._steps = CapturedSteps(model, kv_caches, most, device)
        # Tables of any later step must fit: their address is in the graphs.
        num_groups = len(layout.groups)
        self._builder.reserve(most * (6 + 5 * num_groups + max_blocks) + 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Captured sizes, in order."""
        return self._sizes if len(self._steps) else ()

    @torch.inference_mode()
    def capture(self, graphs: GraphDevice, *, shows_progress: bool) -> None:
        """Capture every size; the log says what they took."""
        with telling_of(graphs, self._steps):
            for number, size in enumerate(self._sizes[::-1], 1):
                if shows_progress:
                    show_progress(number, len(self._sizes))
                meta = self._builder([], self._layout, size)
                self._steps.capture(graphs, size, size, meta.itself, (self._builder.buffer,))

    def build_metadata(self, slices: Sequence[RequestSlice], layout: CacheLayout) -> PagedTables:
        """Return a step's tables; a decode step's are filled up to a captured size."""
        kept = [item for item in slices if item.num_tokens]
        size = 0
        if kept and all(item.num_tokens == 1 for item in kept):
            size = next((size for size in self.sizes if size >= len(kept)), 0)
        return (self._builder if size else self._other_builder)(kept, layout, size)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: PagedTables,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """As the model."""
        size = meta.num_tokens if meta.is_decode else None
        streams = self._steps.replay(size, token_ids, positions)
        if streams is None:
            streams = self._model(token_ids, positions, meta, kv_caches)
        return streams

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """As the model; the rows are the sampler's."""
        logits: torch.Tensor = self._model.compute_logits(streams)
        return logits


@contextmanager
def telling_of(graphs: GraphDevice, *steps: CapturedSteps) -> Iterator[None]:
    """Have the log say what the graphs that are captured inside took."""
    before = graphs.allocated_bytes()
    yield
    taken = graphs.allocated_bytes() - before
    count = sum(map(len, steps))
    logger.info("decode graphs: %d, %.1f MiB", count, taken / 2**20)


def show_progress(number: int, count: int) -> None:
    """Write which graph is being captured over the line before; the last one ends the line."""
    end = "\n" if number == count else ""
    print(f"\rCapturing decode graphs: {number} of {count}", end=end, file=sys.stderr, flush=True)
