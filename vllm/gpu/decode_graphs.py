"""Decode steps replayed as CUDA graphs, one for each of a few batch sizes.

A graph replays kernels on fixed addresses. What changes from step to step lies in buffers at such
addresses: tokens, positions, and the tables of ``PagedTablesBuilder``. A step of n rows is filled
up to the next ``StepShape`` with rows of no token, which read and write no pages:

    n rows of r requests -> shape -> its tables, uploaded -> replay its graph -> first n rows

Plain decode steps have shapes of a row a request. Those with drafts have others, whose rows the
requests share as they need them, so that a step may mix requests with many drafts, few and none.

Attention's grid does not depend on the length of contexts (their splits are fixed in number), so
one graph serves all of them. A model with entries has graphs by the length of contexts too
(``entry_graphs``). All are captured at start, largest first, in one memory pool.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm.logger import init_logger
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.attention.paged_tables import PagedTables, PagedTablesBuilder, StepShape
from vllm.v1.attention.step_tables import RequestSlice

logger = init_logger(__name__)

# A graph's kernels must be compiled and their workspaces be there before it is captured.
_WARM_UPS = 2
# Of steps with drafts: how many times more rows the next larger shape of as many requests has.
_ROW_STEPS = 4


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
            buffers: What the step reads and writes that lives longer than it.
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


class Captures(Protocol):
    """Something of a few shapes that is captured."""

    shapes: Sequence[Any]

    def capture(self, graphs: GraphDevice, shape: Any) -> None:
        """Capture one shape."""

    def __len__(self) -> int:
        """Return how many were captured."""


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


def choose_shapes(
    sizes: Sequence[int], num_drafts: int = 0, max_rows: int = 0
) -> tuple[StepShape, ...]:
    """Return the shapes of decode steps to capture, the smallest first.

    Args:
        sizes: Numbers of requests.
        num_drafts: Most drafts of a request; 0: there are none.
        max_rows: Most tokens that a step may have; 0: any number.

    With drafts a size has a shape with as many rows as there may be, and where these are many,
    others with a quarter each: drafts that are looked up are often few.
    """
    shapes = {StepShape(1, size, size) for size in sizes}
    rows_each = num_drafts + 1
    while rows_each > 1:
        for size in sizes:
            num_rows = min(size * rows_each, max_rows or size * rows_each)
            shapes.add(StepShape(num_drafts + 1, num_rows, size))
        rows_each //= _ROW_STEPS
    return tuple(sorted(shapes))


class PagedSteps:
    """Captured steps of one forward pass over pages, by ``StepShape``; and tables of any others.

    Args:
        run: The pass, on flat rows and their tables.
        make_builder: Makes what builds its tables, on buffers of its own.
        layout: Its KV groups.
        kv_caches: Cache name -> pages.
        shapes: Of the steps to capture.
        max_blocks: Blocks of the longest request, of all groups together.
        device: Where it runs.
        inputs: What it reads besides tokens, positions and tables.

    Owns: the graphs, and the tables that they read.
    """

    def __init__(
        self,
        run: Callable[..., torch.Tensor],
        make_builder: Callable[[], PagedTablesBuilder],
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        shapes: Sequence[StepShape],
        max_blocks: int,
        device: torch.device,
        *inputs: torch.Tensor,
    ) -> None:
        self.layout = layout
        self.shapes: Sequence[StepShape] = tuple(sorted(shapes))
        # Buffers of other steps may grow, and so move.
        self._builder, self._other_builder = make_builder(), make_builder()
        most = max(shape.num_rows for shape in shapes)
        self.captured = CapturedSteps(run, kv_caches, most, device)
        self._inputs = inputs
        # Tables of any later step must fit: their address is in the graphs.
        self._builder.fix(self.shapes, max_blocks)

    def __len__(self) -> int:
        return len(self.captured)

    def capture(self, graphs: GraphDevice, shape: StepShape) -> None:
        """Capture one shape."""
        meta = self._builder([], self.layout, shape)
        lasting = (*self._builder.buffers, *self._inputs)
        self.captured.capture(graphs, shape, shape.num_rows, meta.itself, lasting)

    def build_metadata(self, slices: Sequence[RequestSlice]) -> PagedTables:
        """Return a step's tables; those of a step that fits in a shape are filled up to it."""
        kept = [item for item in slices if item.num_tokens]
        shape = self._find_shape([item.num_tokens for item in kept])
        builder = self._other_builder if shape is None else self._builder
        return builder(kept, self.layout, shape)

    def _find_shape(self, counts: Sequence[int]) -> StepShape | None:
        """Returns the smallest captured shape of a step with so many tokens of each request."""
        if not counts or not len(self.captured):
            return None
        most_tokens, num_rows, num_requests = max(counts), sum(counts), len(counts)
        for shape in self.shapes:
            if (
                shape.most_tokens >= most_tokens
                and shape.num_rows >= num_rows
                and shape.num_requests >= num_requests
            ):
                return shape
        return None


@dataclass(frozen=True, slots=True)
class DraftingBlock:
    """A model's own block that drafts.

    Attributes:
        make_builder: Makes what builds its tables, on buffers of its own.
        layout: The group of its cache, as its proposer has it.
        shapes: Of its steps to capture.
        width: Values of a stream.
        dtype: Of them.
    """

    make_builder: Callable[[], PagedTablesBuilder]
    layout: CacheLayout
    shapes: Sequence[StepShape]
    width: int
    dtype: torch.dtype


class DecodeGraphs:
    """A paged model whose decode steps are replayed; other steps run as they are.

    Args:
        model: The model.
        make_builder: Makes what builds its tables, on buffers of its own.
        layout: Its KV groups.
        kv_caches: Cache name -> pages.
        shapes: Of the steps to capture.
        max_blocks: Blocks of the longest request, of all groups together.
        device: Where it runs.
        block: The model's block that drafts, where it does: its steps are replayed too.
        settling: What settles drafts, to be captured behind the steps; None: nothing does.

    Owns: the graphs, and what they read.
    """

    def __init__(
        self,
        model: Any,
        make_builder: Callable[[], PagedTablesBuilder],
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        shapes: Sequence[StepShape],
        max_blocks: int,
        device: torch.device,
        block: DraftingBlock | None = None,
        settling: Captures | None = None,
    ) -> None:
        self._model, self._settling = model, settling
        self._steps = PagedSteps(model, make_builder, layout, kv_caches, shapes, max_blocks, device)
        self._block: PagedSteps | None = None
        if block is not None:
            most = max(shape.num_rows for shape in block.shapes)
            self._streams = torch.zeros((most, block.width), dtype=block.dtype, device=device)
            self._block = PagedSteps(
                self._run_block,
                block.make_builder,
                block.layout,
                kv_caches,
                block.shapes,
                max_blocks,
                device,
                self._streams,
            )

    @property
    def shapes(self) -> Sequence[StepShape]:
        """Those of the model's steps, the smallest first."""
        return self._steps.shapes

    @torch.inference_mode()
    def capture(self, graphs: GraphDevice, *, shows_progress: bool) -> None:
        """Capture every shape; the log says what they took."""
        parts = (self._steps, self._block, self._settling)
        capture_all(parts, graphs, shows_progress=shows_progress)

    def build_metadata(self, slices: Sequence[RequestSlice], layout: CacheLayout) -> PagedTables:
        """Return a step's tables; a decode step's are filled up to a captured shape."""
        if layout is self._steps.layout or self._block is None:
            return self._steps.build_metadata(slices)
        assert layout == self._block.layout, "neither the model's caches nor its block's"
        return self._block.build_metadata(slices)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: PagedTables,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """As the model."""
        streams = self._steps.captured.replay(meta.shape, token_ids, positions)
        if streams is None:
            streams = self._model(token_ids, positions, meta, kv_caches)
        return streams

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """As the model; the rows are the sampler's."""
        logits: torch.Tensor = self._model.compute_logits(streams)
        return logits

    def norm_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """As the model."""
        normed: torch.Tensor = self._model.norm_streams(streams)
        return normed

    def forward_mtp(
        self,
        streams: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: PagedTables,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """As the model."""
        drafted: torch.Tensor | None = None
        if self._block is not None and meta.shape is not None:
            self._streams[: len(streams)].copy_(streams)
            drafted = self._block.captured.replay(meta.shape, next_token_ids, positions)
        if drafted is None:
            drafted = self._model.forward_mtp(streams, next_token_ids, positions, meta, kv_caches)
        return drafted

    def compute_mtp_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """As the model."""
        logits: torch.Tensor = self._model.compute_mtp_logits(streams)
        return logits

    def _run_block(
        self,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: PagedTables,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        streams = self._streams[: len(next_token_ids)]
        drafted: torch.Tensor = self._model.forward_mtp(
            streams, next_token_ids, positions, meta, kv_caches
        )
        return drafted


def capture_all(
    parts: Iterable[Captures | None], graphs: GraphDevice, *, shows_progress: bool
) -> None:
    """Capture every shape of some parts, each part's largest first; the log says what they took.

    Args:
        parts: In order; None: there is none.
        graphs: Captures.
        shows_progress: Whether a line tells how far it is.
    """
    own = [part for part in parts if part is not None]
    pairs = [(part, shape) for part in own for shape in part.shapes[::-1]]
    before = graphs.allocated_bytes()
    for number, (part, shape) in enumerate(pairs, 1):
        if shows_progress:
            _show_progress(number, len(pairs))
        part.capture(graphs, shape)
    taken = graphs.allocated_bytes() - before
    logger.info("decode graphs: %d, %.1f MiB", sum(map(len, own)), taken / 2**20)


def _show_progress(number: int, count: int) -> None:
    """Writes which graph is being captured over the line before; the last one ends the line."""
    end = "\n" if number == count else ""
    print(f"\rCapturing decode graphs: {number} of {count}", end=end, file=sys.stderr, flush=True)
