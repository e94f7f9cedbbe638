"""A small input of its own for each layer and token (Gemma 4's E2B and E4B).

Half of it is a row of a table as wide as all layers' inputs together, by token id: the table is
most of such a checkpoint, of which a step touches one row per token. It stays mapped from the file.
"""

import math

import torch
from torch import nn

from vllm.model_executor.layers.linear import StoredLinear
from vllm.model_executor.layers.mapped_table import MappedTable
from vllm.model_executor.models.decoder.config import LayerInputsPlan
from vllm.model_executor.models.decoder.step import ModelParts

_TABLE = "model.embed_tokens_per_layer"
_PROJECTION = "model.per_layer_model_projection"
_NORM = "model.per_layer_projection_norm.weight"


class PlainLinear(StoredLinear):
    """A matrix that every process holds whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [T, in] to [T, out]."""
        return self._map(x)


class LayerInputs(nn.Module):
    """Makes all layers' inputs of a step: (row of the table + projected embedding) / sqrt 2.

    Without a table the projected embedding is all of it.

    Letters: L layers, w values of each.
    """

    def __init__(self, plan: LayerInputsPlan, parts: ModelParts) -> None:
        super().__init__()
        make, config = parts.make, parts.config
        self._shape = (len(config.layers), plan.width)
        total = len(config.layers) * plan.width
        self.table = (
            MappedTable(f"{_TABLE}.weight", plan.vocab_size, total, make)
            if plan.vocab_size
            else None
        )
        self.projection = PlainLinear(_PROJECTION, config.hidden_size, total, make)
        self.norm = make.parameter(plan.width)
        # Rounded as the published models round them.
        self.table_scale = float(torch.tensor(plan.width**0.5, dtype=make.dtype))
        self.projection_scale = 1.0 / math.sqrt(config.hidden_size)
        self._eps = config.norm.eps
        self._norm = parts.ops("rms_norm")

    def forward(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Maps token ids [T] and their scaled embeddings [T, D] to [T, L, w]."""
        projected = (self.projection(embedded) * self.projection_scale).view(-1, *self._shape)
        own: torch.Tensor = self._norm(projected, self.norm, self._eps)
        if self.table is None:
            return own
        stored = self.table(token_ids).view(-1, *self._shape) * self.table_scale
        total: torch.Tensor = stored + own
        return total / math.sqrt(2.0)

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination; that of the table is on no device."""
        return {
            **({} if self.table is None else self.table.weight_slots()),
            **self.projection.weight_slots(_PROJECTION),
            _NORM: self.norm.data,
        }


class LayerInputBlock(nn.Module):
    """Adds a layer's input: x + norm(out(gelu(gate(x)) * input)).

    Args:
        width: w.
        parts: What to build from, within the layer.
    """

    def __init__(self, width: int, parts: ModelParts) -> None:
        super().__init__()
        make, hidden = parts.make, parts.config.hidden_size
        self.gate = PlainLinear("per_layer_input_gate", hidden, width, make)
        self.output = PlainLinear("per_layer_projection", width, hidden, make)
        self.norm = make.parameter(hidden)
        self._eps = parts.config.norm.eps
        self._norm = parts.ops("rms_norm")
        self._activate = parts.ops("gelu_tanh_and_mul")

    def forward(self, x: torch.Tensor, own_input: torch.Tensor) -> torch.Tensor:
        """Maps the residual stream [T, D] and the layer's input [T, w] to [T, D]."""
        inner = self._activate(torch.cat([self.gate(x), own_input], -1))
        normed: torch.Tensor = self._norm(self.output(inner), self.norm, self._eps)
        return x + normed

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        return {
            **self.gate.weight_slots(f"{prefix}.per_layer_input_gate"),
            **self.output.weight_slots(f"{prefix}.per_layer_projection"),
            f"{prefix}.post_per_layer_input_norm.weight": self.norm.data,
        }
