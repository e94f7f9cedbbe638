"""Decode steps of models with windows and entries as CUDA graphs, with drafts or without.

A step is replayed in the smallest captured shape that it fits in: so many tokens of each request,
so many requests, contexts of so many tokens (``DecodeShape``). Tokens come and go as flat rows; the
captured step fills requests up by itself (``entry_tables``).

    main model  1 + k tokens of each request that was drafted for: 1 + k rows
    its block   the rows that stand, up to 1 + k: 1 + k rows; then one row for each further draft
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vllm.gpu.decode_graphs import (
    CapturedSteps,
    GraphDevice,
    capture_all,
)
from vllm.gpu.settle_graphs import SettleGraphs
from vllm.model_executor.models.deepseek_v4.kv_cache import MTP_WINDOW
from vllm.v1.attention.draft_states import DraftStates
from vllm.v1.attention.entry_tables import (
    DecodeShape,
    EntryTables,
    ExpandedStep,
    LaidOutStep,
    choose_limits,
    choose_reaches,
)
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.attention.metadata import StepMetadata, build_step_metadata
from vllm.v1.attention.step_model import SettlesDrafts
from vllm.v1.attention.step_tables import RequestSlice


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Which decode steps of a model with windows and entries are captured.

    Attributes:
        requests: Numbers of requests.
        queries: Tokens of each request, drafts included.
        max_tokens: Of a context.
    """

    requests: Sequence[int]
    queries: Sequence[int]
    max_tokens: int

    def find_shapes(self, layout: CacheLayout) -> tuple[DecodeShape, ...]:
        """Return the shapes, the smallest first."""
        coarsest = max(group.ratio for group in layout.groups)
        reaches = choose_reaches(self.requests, self.max_tokens, coarsest)
        if all(group.kind == "window" for group in layout.groups):
            # Nothing in a step depends on the context's length.
            longest = choose_limits(self.max_tokens, coarsest)[-1]
            reaches = tuple((size, longest) for size in self.requests)
        return tuple(
            sorted(DecodeShape(queries, *reach) for queries in self.queries for reach in reaches)
        )


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A model's own block that drafts, whose steps are captured too.

    Attributes:
        layout: The groups of its caches, as its proposer has them.
        sizes: What to capture.
        stream_shape: Of the streams of one row.
        dtype: Of these.
    """

    layout: CacheLayout
    sizes: StepSizes
    stream_shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Settling:
    """How drafts of recurrent states are settled.

    Attributes:
        drafts: What keeps those of steps that are replayed.
        replayed: Settles these.
        others: Settles those of steps that are not.
    """

    drafts: DraftStates
    replayed: SettleGraphs
    others: SettlesDrafts


class EntryGraphs:
    """A model with windows and entries whose decode steps are replayed; others run as they are.

    Args:
        model: The model, with the block that drafts where it has one.
        layout: Its KV groups.
        kv_caches: Cache name -> pages.
        sizes: What to capture.
        device: Where it runs.
        block: Its block that drafts; None: that runs as it is.
        settling: How drafts are settled; None: nothing that is stored depends on it.

    Owns: the graphs, and the tables of decode steps that they read.
    """

    def __init__(
        self,
        model: Any,
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        sizes: StepSizes,
        device: torch.device,
        block: BlockPlan | None = None,
        settling: Settling | None = None,
    ) -> None:
        self._model, self._device, self._settling = model, device, settling
        self._was_replayed = False
        drafts = None if settling is None else settling.drafts
        if drafts is not None:
            drafts.reserve(max(sizes.requests) * (max(sizes.queries) - 1))
            drafts.fix()
        self._steps = _ShapedSteps(
            _run_filled_up(model),
            layout,
            kv_caches,
            sizes.find_shapes(layout),
            device,
            *(() if drafts is None else (drafts.kept,)),
            drafts=drafts,
        )
        self._block: _ShapedSteps | None = None
        if block is not None:
            shapes = block.sizes.find_shapes(block.layout)
            num_rows = max(shape.num_rows for shape in shapes)
            self._streams = torch.zeros(
                (num_rows, *block.stream_shape), dtype=block.dtype, device=device
            )
            self._block = _ShapedSteps(
                self._run_block, block.layout, kv_caches, shapes, device, self._streams
            )

    @torch.inference_mode()
    def capture(self, graphs: GraphDevice, *, shows_progress: bool) -> None:
        """Capture every shape; the log says what they took."""
        settling = None if self._settling is None else self._settling.replayed
        parts = (self._steps, self._block, settling)
        capture_all(parts, graphs, shows_progress=shows_progress)

    def build_metadata(
        self, slices: Sequence[RequestSlice], layout: CacheLayout
    ) -> StepMetadata | LaidOutStep:
        """Return a step's tables; a decode step's are filled up to a captured shape."""
        kept = [item for item in slices if item.num_tokens]
        for steps in (self._steps, self._block):
            if steps is not None and steps.layout == layout:
                laid_out = steps.lay_out(kept)
                if laid_out is not None:
                    return laid_out
        return build_step_metadata(kept, layout, self._device)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: StepMetadata | LaidOutStep,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """As the model."""
        self._was_replayed = isinstance(meta, LaidOutStep)
        if isinstance(meta, LaidOutStep):
            return self._steps.replay(meta, token_ids, positions)
        streams: torch.Tensor = self._model(token_ids, positions, meta, kv_caches)
        return streams

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """As the model; the rows are the sampler's."""
        logits: torch.Tensor = self._model.compute_logits(streams)
        return logits

    def settle_drafts(self, slices: Sequence[RequestSlice], num_accepted: Sequence[int]) -> None:
        """Store the states behind drafts of the last step that stand; a ``SettlesDrafts``.

        Raises:
            InvariantError: A state has no blocks (I5).
        """
        assert self._settling is not None, "nothing depends on what stands"
        settling = self._settling
        settle = settling.replayed if self._was_replayed else settling.others
        settle(slices, num_accepted)

    def norm_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """As the model."""
        normed: torch.Tensor = self._model.norm_streams(streams)
        return normed

    def forward_mtp(
        self,
        streams: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: StepMetadata | LaidOutStep,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """As the model."""
        if isinstance(meta, LaidOutStep):
            assert self._block is not None, "whoever laid the step out captured it"
            self._streams[: len(streams)].copy_(streams)
            return self._block.replay(meta, next_token_ids, positions)
        drafted: torch.Tensor = self._model.forward_mtp(
            streams, next_token_ids, positions, meta, kv_caches
        )
        return drafted

    def compute_mtp_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """As the model."""
        logits: torch.Tensor = self._model.compute_mtp_logits(streams)
        return logits

    def _run_block(
        self,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ExpandedStep,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        streams = self._streams[: len(next_token_ids)]

        def run(*filled_up: torch.Tensor) -> torch.Tensor:
            drafted: torch.Tensor = self._model.forward_mtp(*filled_up, step.meta, kv_caches)
            return drafted

        return _fill_up(run, step, streams, next_token_ids, positions)


class _ShapedSteps:
    """Captured steps of one forward pass over one layout, by ``DecodeShape``.

    Args:
        run: The pass, on flat rows and an ``ExpandedStep``.
        layout: Its KV groups.
        kv_caches: Cache name -> pages.
        shapes: To capture, those that are preferred first.
        device: Where it runs.
        inputs: What it reads and writes besides tokens, positions and tables.
        drafts: What keeps them for recurrent states; None: there are none of either.
    """

    def __init__(
        self,
        run: Callable[..., torch.Tensor],
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        shapes: Sequence[DecodeShape],
        device: torch.device,
        *inputs: torch.Tensor,
        drafts: DraftStates | None = None,
    ) -> None:
        self.layout, self.shapes = layout, shapes
        self._has_states = any(group.state is not None for group in layout.groups)
        self._tables = EntryTables(layout, kv_caches, shapes, device, drafts)
        num_rows = max(shape.num_rows for shape in shapes)
        self.captured = CapturedSteps(run, kv_caches, num_rows, device)
        self._inputs = inputs

    def __len__(self) -> int:
        return len(self.captured)

    def capture(self, graphs: GraphDevice, shape: DecodeShape) -> None:
        """Capture one shape."""
        self._tables.lay_out([], shape)
        self.captured.capture(
            graphs,
            shape,
            shape.num_rows,
            partial(self._tables.expand, shape),
            (self._tables.buffer, *self._inputs),
        )

    def lay_out(self, slices: Sequence[RequestSlice]) -> LaidOutStep | None:
        """Lay a step out in the first shape that it fits in; None: there is none."""
        is_plain = slices and all(
            max((item.read_from, *item.write_from)) <= item.start
            # A state is left behind one token.
            and not (self._has_states and item.num_tokens - item.num_drafts != 1)
            for item in slices
        )
        if not is_plain:
            return None
        most = max(item.num_tokens for item in slices)
        longest = max(item.start + item.num_tokens for item in slices)
        for shape in self.shapes:
            if (
                shape.num_queries >= most
                and shape.num_requests >= len(slices)
                and shape.limit >= longest
            ):
                return self._tables.lay_out(slices, shape)
        return None

    def replay(
        self, step: LaidOutStep, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the streams of a step that is laid out."""
        streams = self.captured.replay(step.shape, token_ids, positions)
        assert streams is not None, f"{step.shape} was not captured"
        return streams


def _run_filled_up(model: Any) -> Callable[..., torch.Tensor]:
    """Returns the model's forward pass on flat rows and an ``ExpandedStep``."""

    def run(
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ExpandedStep,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        return _fill_up(
            lambda *filled_up: model(*filled_up, step.meta, kv_caches), step, token_ids, positions
        )

    return run


def _fill_up(
    run: Callable[..., torch.Tensor], step: ExpandedStep, *flat: torch.Tensor
) -> torch.Tensor:
    """Runs a pass on the rows of requests that are filled up; returns those of flat rows."""
    if step.sources is None:
        return run(*flat)
    return run(*(rows[step.sources] for rows in flat))[step.places]


def block_layout(layout: CacheLayout, names: Sequence[str] = (MTP_WINDOW,)) -> CacheLayout:
    """Return the layout of the caches of a block that drafts, as its proposer has it."""
    groups = tuple(layout.groups[layout.group_of[name]] for name in names)
    return replace(layout, groups=groups, group_of={name: i for i, name in enumerate(names)})
