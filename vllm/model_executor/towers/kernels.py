"""What multiplies for a tower: torch, wherever nothing quicker is."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from vllm.model_executor.towers.encoder import EncoderPlan
from vllm.model_executor.towers.parts import rms
from vllm.model_executor.towers.tensors import (
    LayerTensors,
    MapTensors,
    NormTensors,
    take_layer,
    take_map,
)
from vllm.model_executor.towers.weights import TowerWeights


class TowerKernels(Protocol):
    """Maps rows of one picture, whose bits nothing else moves.

    Attributes:
        value_bytes: Bytes of a weight once it is there, about.
    """

    value_bytes: float

    def map(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Map rows ``[N, in]`` by a matrix, with its bias: see ``take_map``."""

    def run_layer(self, layer: int, x: torch.Tensor, turns: torch.Tensor | None) -> torch.Tensor:
        """Take rows ``[N, D]`` through a layer.

        Args:
            layer: Its number.
            x: The rows; may be written to.
            turns: fp32 ``[N, 2, d / 2]``: cosines and sines, part by part; None: nothing is turned.
        """


KernelMaker = Callable[[TowerWeights, EncoderPlan | None], TowerKernels]
"""Of a tower's weights and layers."""


class TorchKernels:
    """Torch. Norms, softmax and turns are fp32 whatever the type of the weights.

    Owns: what it has taken.

    Args:
        weights: The tower's.
        plan: Its layers; None: it has none.
    """

    def __init__(self, weights: TowerWeights, plan: EncoderPlan | None) -> None:
        self._weights, self._plan = weights, plan
        self._maps: dict[str, MapTensors] = {}
        self._layers: dict[int, LayerTensors] = {}
        self.value_bytes = float(weights.dtype.itemsize)

    def map(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """See ``TowerKernels``."""
        own = self._maps.get(name)
        if own is None:
            own = self._maps[name] = take_map(self._weights, name)
        return _map(own, x.to(own.weight.dtype))

    def run_layer(self, layer: int, x: torch.Tensor, turns: torch.Tensor | None) -> torch.Tensor:
        """See ``TowerKernels``."""
        assert self._plan is not None, "the tower has layers"
        own = self._layers.get(layer)
        if own is None:
            own = self._layers[layer] = take_layer(self._weights, self._plan, layer)
        return _run_layer(self._plan, own, x, turns)


def _run_layer(
    plan: EncoderPlan, own: LayerTensors, x: torch.Tensor, turns: torch.Tensor | None
) -> torch.Tensor:
    before, behind, before_mlp, behind_mlp = own.norms
    normed = _norm(plan, before, x)
    shape = len(x), -1, plan.head_dim
    queries, keys, values = (
        _map(part, normed).view(shape) for part in (own.queries, own.keys, own.values)
    )
    if own.query_norm is not None:
        queries = rms(queries, own.query_norm, plan.eps)
    if own.key_norm is not None:
        keys = rms(keys, own.key_norm, plan.eps)
    if plan.norms_values:
        values = rms(values, None, plan.eps)
    if turns is not None:
        queries, keys = (_turn(part, turns, plan.num_turned_parts) for part in (queries, keys))
    x = x + _norm(plan, behind, _map(own.output, _attend(queries, keys, values, plan.scale)))
    normed = _norm(plan, before_mlp, x)
    inner = _map(own.up, normed)
    if own.gate is None:
        inner = gelu(inner, approximate="tanh")
    else:
        inner = gelu(_map(own.gate, normed), approximate="tanh") * inner
    return x + _norm(plan, behind_mlp, _map(own.down, inner))


def _map(own: MapTensors, x: torch.Tensor) -> torch.Tensor:
    if own.inputs is not None:
        x = x.clamp(own.inputs.low, own.inputs.high)
    x = linear(x, own.weight, own.bias)
    return x if own.outputs is None else x.clamp(own.outputs.low, own.outputs.high)


def _norm(plan: EncoderPlan, own: NormTensors | None, x: torch.Tensor) -> torch.Tensor:
    if own is None:
        return x
    if plan.norm == "rms":
        return rms(x, own.weight, plan.eps)
    assert own.bias is not None, "a layer norm has biases"
    weight, bias = own.weight.float(), own.bias.float()
    return layer_norm(x.float(), x.shape[-1:], weight, bias, plan.eps).to(x.dtype)


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attends all rows to all: queries [N, H, d], keys and values [N, K, d] to [N, H * d]."""
    query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (queries, keys, values))
    attended = scaled_dot_product_attention(
        query, key, value, scale=scale, enable_gqa=keys.shape[1] != queries.shape[1]
    )
    return attended[0].transpose(0, 1).flatten(1)


def _turn(heads: torch.Tensor, turns: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Turns pairs of heads [N, H, d]: in each part, the first half with the second."""
    count, num_heads, width = heads.shape
    cosines, sines = turns.view(count, 2, 1, num_parts, -1).unbind(1)
    first, second = heads.float().view(count, num_heads, num_parts, 2, -1).unbind(3)
    turned = [first * cosines - second * sines, second * cosines + first * sines]
    return torch.stack(turned, 3).view(count, num_heads, width).to(heads.dtype)
