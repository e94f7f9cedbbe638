"""Decode steps replayed as ACL graphs. Off by default; has never been run on a device.

A graph replays kernels on fixed addresses, so a captured step owns static copies of all its
tensors; a later step of the same signature copies its own into them and replays:

    step -> signature (shapes, dtypes and values of the host's numbers)
              seen twice -> capture: warm up, then record      later -> copy in, replay, read out

The signature holds every number the host's control flow could depend on: a graph is never replayed
for a step that would have run other kernels. Contexts grow, so a signature lives a few steps only,
and the graphs are bounded, oldest dropped first.
"""

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from vllm.v1.attention.metadata import StepMetadata
from vllm.v1.spec_decode.mtp import MTPModel
from vllm.v1.worker.model_runner import CausalLM

_MAX_GRAPHS = 64
_SIGHTINGS_BEFORE_CAPTURE = 2


class DraftingLM(CausalLM, MTPModel, Protocol):
    """A model; its MTP block is asked for where the configuration drafts with it."""


class GraphDevice(Protocol):
    """The part of ``torch.npu`` that records and replays."""

    NPUGraph: Callable[[], Any]

    def graph(self, graph: Any, pool: Any = None) -> AbstractContextManager[Any]:
        """Record what runs inside into ``graph``."""

    def graph_pool_handle(self) -> Any:
        """Return a memory pool that graphs share."""

    def current_stream(self) -> Any:
        """Return the current stream."""

    def synchronize(self) -> None:
        """Wait for the device."""


@dataclasses.dataclass(frozen=True, slots=True)
class CapturedStep:
    """One graph with the tensors it reads and writes."""

    graph: Any
    inputs: tuple[torch.Tensor, ...]
    streams: torch.Tensor


class DecodeGraphs:
    """A model whose decode steps are captured; other steps run as they are.

    Owns: the graphs and their static tensors.

    Args:
        model: The model.
        device: ``torch.npu``.
        max_graphs: Most graphs kept.
    """

    def __init__(
        self, model: DraftingLM, device: GraphDevice, max_graphs: int = _MAX_GRAPHS
    ) -> None:
        self._model = model
        self._device = device
        self._max_graphs = max_graphs
        self._pool: Any = None
        self._sightings: Counter[Hashable] = Counter()
        self._captured: OrderedDict[Hashable, CapturedStep] = OrderedDict()

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: StepMetadata,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """As the model; a decode step of a known signature is replayed."""
        if meta.chunks or not meta.decodes:
            return self._model(token_ids, positions, meta, kv_caches)
        step = (token_ids, positions, meta)
        signature = tuple(_signature(step))
        captured = self._captured.get(signature)
        if captured is not None:
            return self._replay(captured, step)
        self._sightings[signature] += 1
        streams = self._model(token_ids, positions, meta, kv_caches)
        if self._sightings[signature] >= _SIGHTINGS_BEFORE_CAPTURE:
            # This step ran eagerly and was the warm-up; a second run writes the same rows again.
            del self._sightings[signature]
            self._capture(signature, step, kv_caches)
        elif len(self._sightings) > self._max_graphs:
            self._sightings.clear()
        return streams

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """As the model; never captured: the number of rows is the sampler's."""
        return self._model.compute_logits(streams)

    def norm_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """As the model; never captured, likewise."""
        return self._model.norm_streams(streams)

    def forward_mtp(
        self,
        streams: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: StepMetadata,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """As the model; never captured: the rows that stand differ from step to step."""
        return self._model.forward_mtp(streams, next_token_ids, positions, meta, kv_caches)

    def compute_mtp_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """As the model; never captured."""
        return self._model.compute_mtp_logits(streams)

    def _capture(
        self, signature: Hashable, step: Any, kv_caches: Mapping[str, torch.Tensor]
    ) -> None:
        static = _map_tensors(step, torch.clone)
        token_ids, positions, meta = static
        if self._pool is None:
            self._pool = self._device.graph_pool_handle()
        graph = self._device.NPUGraph()
        self._device.synchronize()
        with self._device.graph(graph, pool=self._pool):
            streams = self._model(token_ids, positions, meta, kv_caches)
        self._captured[signature] = CapturedStep(graph, tuple(_tensors(static)), streams)
        if len(self._captured) > self._max_graphs:
            self._captured.popitem(last=False)

    def _replay(self, captured: CapturedStep, step: Any) -> torch.Tensor:
        for target, source in zip(captured.inputs, _tensors(step), strict=True):
            target.copy_(source)
        # Replays run on the graph's own stream: the copies above must have landed.
        self._device.current_stream().synchronize()
        captured.graph.replay()
        # The static output is overwritten by the next replay, and drafters keep streams.
        return captured.streams.clone()


def _children(node: Any) -> list[Any] | None:
    """Return the parts of a container in a fixed order; None for a leaf."""
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [getattr(node, field.name) for field in dataclasses.fields(node)]
    if isinstance(node, tuple | list):
        return list(node)
    if isinstance(node, Mapping):
        return [value for _, value in sorted(node.items())]
    return None


def _tensors(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    for child in _children(node) or ():
        yield from _tensors(child)


def _signature(node: Any) -> Iterator[Hashable]:
    """Yield what must be equal for a graph to stand for a step."""
    children = _children(node)
    if isinstance(node, torch.Tensor):
        yield (tuple(node.shape), node.dtype)
    elif isinstance(node, np.ndarray):
        yield (node.shape, node.tobytes())  # its repr would leave out the middle
    elif children is None:
        yield node if isinstance(node, Hashable) else repr(node)
    else:
        yield (type(node).__name__, len(children))
        if isinstance(node, Mapping):
            yield tuple(sorted(node))
        for child in children:
            yield from _signature(child)


def _map_tensors(node: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of nested containers with every tensor changed."""
    if isinstance(node, torch.Tensor):
        return change(node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        parts = {f.name: _map_tensors(getattr(node, f.name), change) for f in _init_fields(node)}
        return dataclasses.replace(node, **parts)
    if isinstance(node, tuple | list):
        return type(node)(_map_tensors(child, change) for child in node)
    if isinstance(node, Mapping):
        return {key: _map_tensors(value, change) for key, value in node.items()}
    return node


def _init_fields(node: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(node) if field.init]
