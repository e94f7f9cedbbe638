"""Drafts of recurrent layers that stand are settled as CUDA graphs, by the number of requests.

    kept drafts, tables of those that stand, uploaded -> replay -> states behind them, in pages

Requests of no drafts, and drafts that do not stand, read and write no pages.
"""

from collections.abc import Sequence

import torch

from vllm.gpu.decode_graphs import Graph, GraphDevice
from vllm.v1.attention.draft_states import DraftStates, SettledShape, list_drafted
from vllm.v1.attention.step_tables import RequestSlice
from vllm.v1.attention.table_buffer import TableBuffer


class SettleGraphs:
    """Stores the states behind drafts that stand; a ``SettlesDrafts``, and ``Captures``.

    Args:
        drafts: What keeps them; steps that it keeps drafts of are captured before.
        sizes: Numbers of requests.
        num_drafts: Most drafts of a request.
        device: Where it runs.

    Owns: the graphs, and the tables that they read.
    """

    def __init__(
        self, drafts: DraftStates, sizes: Sequence[int], num_drafts: int, device: torch.device
    ) -> None:
        self._drafts = drafts
        self.shapes: Sequence[SettledShape] = tuple(
            sorted(SettledShape(size, num_drafts) for size in sizes)
        )
        # Steps may have fewer rows than all drafts of all requests would take.
        self._drafts.reserve(self.shapes[-1].num_rows)
        self._buffer = TableBuffer(device)
        self._drafts.lay_out([], self._buffer, self.shapes[-1])
        self._buffer.fix()
        self._captured: dict[SettledShape, Graph] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def capture(self, graphs: GraphDevice, shape: SettledShape) -> None:
        """Capture one shape."""
        tables = self._drafts.lay_out([], self._buffer, shape)

        def run() -> torch.Tensor:
            self._drafts.run(tables)
            return self._drafts.kept

        lasting = (self._buffer.values, self._drafts.kept)
        self._captured[shape], _ = graphs.capture(run, lasting)

    def __call__(self, slices: Sequence[RequestSlice], num_accepted: Sequence[int]) -> None:
        """Store the states.

        Raises:
            InvariantError: A state has no blocks (I5).
        """
        drafted = list_drafted(slices, num_accepted)
        if not any(count for _, count in drafted):
            return
        for shape in self.shapes:
            graph = self._captured.get(shape)
            if graph is not None and shape.num_requests >= len(drafted):
                self._drafts.lay_out(drafted, self._buffer, shape)
                graph.replay()
                return
        self._drafts.settle(slices, num_accepted)
