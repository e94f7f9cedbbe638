"""Towers on the native kernels, by products of floats or of whole numbers (``csrc/pairs.h``)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Lock

import torch
from torch.nn.functional import pad

from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.towers.encoder import EncoderPlan
from vllm.model_executor.towers.kernels import KernelMaker, TowerKernels
from vllm.model_executor.towers.tensors import (
    Bounds,
    LayerTensors,
    MapTensors,
    take_layer,
    take_map,
)
from vllm.model_executor.towers.weights import TowerWeights
from vllm.native import structs
from vllm.native.library import NativeContext
from vllm.native.loader import load_library

logger = init_logger(__name__)

PAIR_GROUP = 96
"""Inputs of an output that share a scale."""
_LENGTH, _LARGEST, _LEAST = 46_330.0, 32_760.0, 1e-15
_LANES = 16


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix as the kernels multiply by it.

    Attributes:
        words: fp32 ``[out / 16, in, 16]``, or int32 ``[out / 16, in / 2, 16]``: two inputs of an
            output, the even one low.
        scales: fp32 ``[out / 16, in / 96, 16]`` of int32 words; None: there are none.
    """

    words: torch.Tensor
    scales: torch.Tensor | None = None


def pack_floats(weight: torch.Tensor) -> PackedMatrix:
    """Lays a matrix ``[out, in]`` out for products of floats."""
    padded = pad(weight.float(), (0, 0, 0, -len(weight) % _LANES))
    return PackedMatrix(padded.view(-1, _LANES, weight.shape[1]).transpose(1, 2).contiguous())


def pack_pairs(weight: torch.Tensor) -> PackedMatrix:
    """Rounds a matrix ``[out, in]`` to whole multiples of a scale for each output and group."""
    rows, cols = weight.shape
    num_groups, num_pairs, panels = (-(-cols // PAIR_GROUP), -(-cols // 2), -(-rows // _LANES))
    padding = (0, num_groups * PAIR_GROUP - cols, 0, panels * _LANES - rows)
    groups = pad(weight.float(), padding).view(-1, num_groups, PAIR_GROUP)
    peaks = groups.abs().amax(2)
    largest = torch.minimum(_LENGTH / groups.square().sum(2).sqrt(), _LARGEST / peaks)
    inverses = torch.where(peaks >= _LEAST, largest, 0.0)
    codes = (groups * inverses.unsqueeze(2)).round_().to(torch.int16).flatten(1)
    pairs = codes[:, : 2 * num_pairs].reshape(panels, _LANES, num_pairs, 2)
    words = pairs.transpose(1, 2).contiguous().view(torch.int32).squeeze(3)
    scales = torch.where(peaks >= _LEAST, 1.0 / largest, 0.0)
    return PackedMatrix(words, scales.view(panels, _LANES, -1).transpose(1, 2).contiguous())


class _Binder:
    """Makes structs over tensors.

    Owns: the tensors; keep it as long as the structs.
    """

    def __init__(self, pack: Callable[[torch.Tensor], PackedMatrix]) -> None:
        self._pack = pack
        self._tensors: list[torch.Tensor] = []

    def vector(self, values: torch.Tensor | None) -> int | None:
        """Returns the address of values as contiguous fp32."""
        if values is None:
            return None
        wide = values.float().contiguous()
        self._tensors.append(wide)
        return wide.data_ptr()

    def matrix(self, own: MapTensors) -> structs.TowerMatrix:
        """Returns a packed matrix."""
        packed = self._pack(own.weight)
        self._tensors.append(packed.words)
        return structs.TowerMatrix(
            packed.words.data_ptr(),
            self.vector(packed.scales),
            self.vector(own.bias),
            *own.weight.shape,
            _bounds(own.inputs),
            _bounds(own.outputs),
        )

    def layer(self, own: LayerTensors) -> structs.TowerLayer:
        """Returns a layer."""
        vectors = [
            (None, None) if norm is None else (self.vector(norm.weight), self.vector(norm.bias))
            for norm in own.norms
        ]
        result = structs.TowerLayer(
            queries=self.matrix(own.queries),
            keys=self.matrix(own.keys),
            values=self.matrix(own.values),
            output=self.matrix(own.output),
            up=self.matrix(own.up),
            down=self.matrix(own.down),
            query_norm=self.vector(own.query_norm),
            key_norm=self.vector(own.key_norm),
        )
        if own.gate is not None:
            result.gate = self.matrix(own.gate)
        for i, (weight, bias) in enumerate(vectors):
            result.norms[i], result.norm_biases[i] = weight, bias
        return result


def _bounds(own: Bounds | None) -> structs.Bounds:
    return structs.Bounds(-math.inf, math.inf) if own is None else structs.Bounds(own.low, own.high)


class NativeTowerKernels:
    """The native kernels. Each matrix is packed when it is first multiplied by.

    Owns: packed matrices, and the threads, which have the priority of the one that computes first.

    Args:
        make_context: Starts them.
        weights: The tower's.
        plan: Its layers; None: it has none.
        rounds: Whether products are those of whole numbers.
    """

    def __init__(
        self,
        make_context: Callable[[], NativeContext],
        weights: TowerWeights,
        plan: EncoderPlan | None,
        *,
        rounds: bool = False,
    ) -> None:
        # Half a word and its part of a scale, or a float.
        self.value_bytes = 2 + 4 / PAIR_GROUP if rounds else 4.0
        self._make_context, self._weights, self._plan = make_context, weights, plan
        # Pictures are read one at a time, but now and then in two threads.
        self._lock = Lock()
        self._binder = _Binder(pack_pairs if rounds else pack_floats)
        self._maps: dict[str, structs.TowerMatrix] = {}
        self._layers: dict[int, structs.TowerLayer] = {}
        self._shape = None if plan is None else _make_shape(plan)

    @cached_property
    def _context(self) -> NativeContext:
        return self._make_context()

    def map(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """See ``TowerKernels``."""
        with self._lock:
            own = self._maps.get(name)
            if own is None:
                own = self._maps[name] = self._binder.matrix(take_map(self._weights, name))
            output = torch.empty(len(x), own.rows)
            self._context.map_tower_rows(own, x.float().contiguous(), output)
        return output

    def run_layer(self, layer: int, x: torch.Tensor, turns: torch.Tensor | None) -> torch.Tensor:
        """See ``TowerKernels``."""
        assert self._plan is not None, "the tower has layers"
        assert self._shape is not None, "the tower has layers"
        with self._lock:
            own = self._layers.get(layer)
            if own is None:
                tensors = take_layer(self._weights, self._plan, layer)
                own = self._layers[layer] = self._binder.layer(tensors)
            stream = x.float().contiguous()
            self._context.run_tower_layer(self._shape, own, turns, stream)
        return stream


def _make_shape(plan: EncoderPlan) -> structs.TowerShape:
    return structs.TowerShape(
        width=plan.width,
        num_heads=plan.num_heads,
        num_kv_heads=plan.num_kv_heads,
        head_dim=plan.head_dim,
        is_rms=plan.norm == "rms",
        norms_values=plan.norms_values,
        num_turned_parts=plan.num_turned_parts,
        eps=plan.eps,
        scale=plan.scale,
    )


def find_tower_kernels(num_threads: int) -> KernelMaker | None:
    """Returns what makes native kernels of fp32 towers; None: torch runs them.

    Without vector instructions torch is quicker.

    Args:
        num_threads: Threads that compute.
    """
    library = load_library() if envs.VLLM_NATIVE else None
    if library is None:
        return None
    if NativeContext(library, 1).vector_build == "portable":
        return None
    make_context, rounds = partial(NativeContext, library, num_threads), envs.VLLM_CPU_TOWER_INT16

    def make(weights: TowerWeights, plan: EncoderPlan | None) -> TowerKernels:
        return NativeTowerKernels(make_context, weights, plan, rounds=rounds)

    return make
