"""What the layers of one forward pass share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from vllm.model_executor.layers.rotary import (
    Turns,
    compute_turns,
    plain_frequencies,
    yarn_frequencies,
)
from vllm.model_executor.models.causal_lm import PartsOf
from vllm.model_executor.models.deepseek_v4.config import LatentConfig
from vllm.model_executor.models.deepseek_v4.config_rope import RopeConfig
from vllm.model_executor.models.deepseek_v4.selections import Selections
from vllm.v1.attention.step_tables import StepMetadata

ModelParts = PartsOf[LatentConfig]


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of every layer in one forward pass.

    Attributes:
        token_ids: int64 [T]; hash-routed layers look experts up by them.
        meta: Index tables.
        kv_caches: Cache name -> [num_blocks, rows_per_block, width].
        main_turns: Rotary turns of window-only layers.
        compress_turns: Rotary turns of layers with a compressor.
        entry_turns: State group id -> turns of the entries this step completes.
        selections: What indexers chose, for the layers that share it.
        kept: int64 [N]: the flat rows that layers compute, ascending; what they take and give has
            these rows, and turns are theirs. None: all rows.
        first_queries: By chunk, how many of its first rows are not among them; empty: none.
    """

    token_ids: torch.Tensor
    meta: StepMetadata
    kv_caches: Mapping[str, torch.Tensor]
    main_turns: Turns
    compress_turns: Turns
    entry_turns: Mapping[int, Turns]
    selections: Selections = field(default_factory=Selections)
    kept: torch.Tensor | None = None
    first_queries: tuple[int, ...] = ()

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values of the kept rows among zeros for the others: [N, ...] to [T, ...]."""
        if self.kept is None:
            return values
        shape = (self.meta.num_tokens, *values.shape[1:])
        spread: torch.Tensor = values.new_zeros(shape)
        spread[self.kept] = values
        return spread

    def narrow(self, kept: torch.Tensor, first_queries: tuple[int, ...]) -> "Step":
        """Returns a whole step with some rows alone; their chunks' tables stay as they are."""
        return replace(
            self,
            token_ids=self.token_ids[kept],
            main_turns=_pick(self.main_turns, kept),
            compress_turns=_pick(self.compress_turns, kept),
            kept=kept,
            first_queries=first_queries,
        )


class StepFactory(nn.Module):
    """Computes a step's rotary turns once for all layers."""

    def __init__(self, parts: ModelParts) -> None:
        super().__init__()
        config, device = parts.config, parts.make.device
        # fp32 [qk_rope_head_dim / 2] of window-only layers, and of those with a compressor.
        self.main = _frequencies(config.main_rope, config.qk_rope_head_dim, device)
        self.compress = _frequencies(config.compress_rope, config.qk_rope_head_dim, device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: StepMetadata,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> Step:
        """Returns the step of token ids [T] at positions [T]."""
        return Step(
            token_ids=token_ids,
            meta=meta,
            kv_caches=kv_caches,
            main_turns=compute_turns(positions, self.main),
            compress_turns=compute_turns(positions, self.compress),
            entry_turns={
                group_id: compute_turns(state.entry_positions, self.compress)
                for group_id, state in meta.states.items()
                if state.num_completed
            },
        )


def _pick(turns: Turns, rows: torch.Tensor) -> Turns:
    return Turns(turns.rows[rows], turns.heads[rows], turns.inverse_heads[rows])


def _frequencies(rope: RopeConfig, dim: int, device: torch.device) -> torch.Tensor:
    yarn = rope.yarn
    if yarn is None:
        return plain_frequencies(rope.theta, dim, device)
    return yarn_frequencies(
        rope.theta,
        dim,
        yarn.factor,
        yarn.original_max_position_embeddings,
        yarn.beta_fast,
        yarn.beta_slow,
        device,
    )
