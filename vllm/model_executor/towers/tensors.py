"""A tower's tensors, gathered as those who multiply want them."""

from dataclasses import dataclass

import torch

from vllm.model_executor.towers.encoder import EncoderPlan
from vllm.model_executor.towers.weights import TowerWeights


@dataclass(frozen=True, slots=True)
class Bounds:
    """Values are clamped to them."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class MapTensors:
    """What maps rows.

    Attributes:
        weight: ``[out, in]``.
        bias: ``[out]``, or None.
        inputs, outputs: What both sides are clamped to, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    inputs: Bounds | None = None
    outputs: Bounds | None = None


@dataclass(frozen=True, slots=True)
class NormTensors:
    """A norm's weights, and its biases if it has any."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """A layer's; norms before attention, behind it, before the MLP, behind it."""

    norms: tuple[NormTensors | None, ...]
    queries: MapTensors
    keys: MapTensors
    values: MapTensors
    output: MapTensors
    gate: MapTensors | None
    up: MapTensors
    down: MapTensors
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None


def take_map(weights: TowerWeights, name: str) -> MapTensors:
    """Return a matrix by its name without ``.weight``, its bounds and bias if it has any.

    A name that goes on with ``_weight`` lies the other way round in its file.
    """
    if f"{name}_weight" in weights:
        return MapTensors(weights.take(f"{name}_weight").t())
    if f"{name}.linear.weight" not in weights:
        bias = weights.take(f"{name}.bias") if f"{name}.bias" in weights else None
        return MapTensors(weights.take(f"{name}.weight").flatten(1), bias)
    bounds = [
        Bounds(*(float(weights.take(f"{name}.{side}_{end}")) for end in ("min", "max")))
        if f"{name}.{side}_min" in weights
        else None
        for side in ("input", "output")
    ]
    return MapTensors(weights.take(f"{name}.linear.weight"), None, *bounds)


def take_layer(weights: TowerWeights, plan: EncoderPlan, layer: int) -> LayerTensors:
    """Return the tensors of a layer."""
    prefix, names = f"{plan.prefix}.{layer}", plan.names

    def take(name: str) -> MapTensors:
        return take_map(weights, f"{prefix}.{name}")

    def take_norm(name: str) -> NormTensors:
        bias = f"{prefix}.{name}.bias"
        return NormTensors(
            weights.take(f"{prefix}.{name}.weight"),
            weights.take(bias) if bias in weights else None,
        )

    def take_head_norm(name: str) -> torch.Tensor | None:
        return weights.take(f"{prefix}.{name}.weight") if name else None

    norms: list[NormTensors | None] = [take_norm(name) for name in names.norms]
    if len(norms) == 2:
        norms = [norms[0], None, norms[1], None]
    if names.queries == names.keys:
        queries, keys, values = _split(take(names.queries), plan)
    else:
        queries, keys, values = take(names.queries), take(names.keys), take(names.values)
    return LayerTensors(
        tuple(norms),
        queries,
        keys,
        values,
        take(names.output),
        take(names.gate) if names.gate else None,
        take(names.up),
        take(names.down),
        take_head_norm(names.query_norm),
        take_head_norm(names.key_norm),
    )


def _split(joined: MapTensors, plan: EncoderPlan) -> list[MapTensors]:
    heads = [plan.num_heads, plan.num_kv_heads, plan.num_kv_heads]
    sizes = [count * plan.head_dim for count in heads]
    weights = torch.split(joined.weight, sizes)
    biases = [None] * 3 if joined.bias is None else torch.split(joined.bias, sizes)
    return [MapTensors(*parts) for parts in zip(weights, biases, strict=True)]
