"""What the layers of one forward pass share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import nn

from vllm.model_executor.layers.rotary import (
    compute_half_turns,
    llama3_frequencies,
    plain_frequencies,
    yarn_frequencies,
)
from vllm.model_executor.models.causal_lm import PartsOf
from vllm.model_executor.models.decoder.config import DecoderConfig
from vllm.model_executor.models.decoder.rope_config import RopeConfig
from vllm.v1.attention.step_tables import StepMetadata

HalfTurns = tuple[torch.Tensor, torch.Tensor]
ModelParts = PartsOf[DecoderConfig]


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of every layer in one forward pass.

    Attributes:
        positions: int64 [T], of all rows.
        meta: Index tables.
        kv_caches: Cache name -> [num_blocks, rows_per_block, width].
        turns: Rotary setting -> cosines and signed sines [T, 1, head_dim].
        layer_inputs: [T, L, width]: what each layer adds for its token, if any does.
        wanted: Flat rows whose streams are read, ascending; None: all T.
        is_narrow: Whether streams, turns and layer inputs hold the wanted rows alone.
        prompts: The flat rows of each prompt, where tokens see both ways; else none.
        shared: Cache name -> the step's rows [T, 2 * K * d] as a later step reads them, of the
            caches that several layers read, or what these rank an indexer's keys by; each is put
            there by its owner.
    """

    positions: torch.Tensor
    meta: StepMetadata
    kv_caches: Mapping[str, torch.Tensor]
    turns: Mapping[RopeConfig, HalfTurns]
    layer_inputs: torch.Tensor | None = None
    wanted: torch.Tensor | None = None
    is_narrow: bool = False
    prompts: Sequence[slice] = ()
    shared: dict[str, torch.Tensor] = field(default_factory=dict)

    def narrow(self) -> "Step":
        """Returns the step for layers that compute the wanted rows alone."""
        wanted = self.wanted
        if wanted is None:
            return self
        turns = {rope: (cos[wanted], sin[wanted]) for rope, (cos, sin) in self.turns.items()}
        inputs = None if self.layer_inputs is None else self.layer_inputs[wanted]
        return replace(self, turns=turns, layer_inputs=inputs, is_narrow=True)


class StepFactory(nn.Module):
    """Computes a step's rotary turns once for all layers."""

    def __init__(self, parts: ModelParts) -> None:
        super().__init__()
        ropes = {layer.rope: None for layer in parts.config.layers if layer.rope is not None}
        self._frequencies = {rope: find_frequencies(rope, parts.make.device) for rope in ropes}
        self._axes = {
            rope: torch.tensor(rope.axis_of_pair, device=parts.make.device) for rope in ropes
        }
        self._dtype = parts.make.dtype
        self._sees_both_ways = parts.config.sees_both_ways

    def forward(
        self,
        positions: torch.Tensor,
        meta: StepMetadata,
        kv_caches: Mapping[str, torch.Tensor],
        layer_inputs: torch.Tensor | None,
        axes: torch.Tensor | None = None,
    ) -> Step:
        """Returns the step of rows at int64 positions [T].

        Args:
            positions: Of the rows.
            meta: Index tables.
            kv_caches: Cache name -> pages.
            layer_inputs: What each layer adds for its token.
            axes: int64 [3, T]: what rows are turned by where that is not their position.
        """
        turns = {
            rope: compute_half_turns(
                positions if axes is None else axes[self._axes[rope]].mT,
                frequencies,
                rope.magnitude,
                self._dtype,
            )
            for rope, frequencies in self._frequencies.items()
        }
        wanted = meta.find_wanted(positions.device)
        prompts = find_prompts(positions) if self._sees_both_ways else ()
        return Step(positions, meta, kv_caches, turns, layer_inputs, wanted, prompts=prompts)


def find_prompts(positions: torch.Tensor) -> list[slice]:
    """Returns the rows of each prompt of a step, at positions [T]; all prompts are whole."""
    starts = (positions == 0).nonzero().flatten().tolist()
    return [slice(start, end) for start, end in pairwise([*starts, len(positions)])]


def find_frequencies(rope: RopeConfig, device: torch.device) -> torch.Tensor:
    """Returns a rotary setting's frequencies, fp32 [dim / 2]."""
    if rope.kind == "llama3":
        return llama3_frequencies(
            rope.theta, rope.dim, rope.factor, rope.original_length, rope.low, rope.high, device
        )
    if rope.kind == "yarn":
        return yarn_frequencies(
            rope.theta,
            rope.dim,
            rope.factor,
            rope.original_length,
            rope.high,
            rope.low,
            device,
            truncates=rope.truncates,
        )
    plain = plain_frequencies(rope.theta, rope.dim, device)
    if rope.kind == "divided":
        return plain / torch.tensor(rope.divisors, device=device)
    if rope.kind == "proportional":
        plain[rope.num_turned :] = 0.0
    return plain / rope.factor
