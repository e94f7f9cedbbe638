"""The seam between a layer's attention and its compressed entries."""

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm.model_executor.layers.rotary import Turns
from vllm.model_executor.models.deepseek_v4.selections import Selections
from vllm.model_executor.models.deepseek_v4.step import Step
from vllm.v1.attention.step_tables import AttentionPlan, QueryTile


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """The indexer's side of a step.

    Attributes:
        queries: [T, H, d].
        head_weights: [T, H], constants folded in.
    """

    queries: torch.Tensor
    head_weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkEntries:
    """Entries that a chunk's last query sees.

    Attributes:
        entries: [K, head_dim].
        index_keys: [K, index_head_dim], or None when nothing has to be chosen.
        queries: The indexer's queries of the chunk, or None likewise.
        index: Which chunk of the step it is.
        selections: What layers share of choices.
    """

    entries: torch.Tensor
    index_keys: torch.Tensor | None = None
    queries: IndexQueries | None = None
    index: int = 0
    selections: Selections | None = None


@dataclass(frozen=True, slots=True)
class TileEntries:
    """What the queries of a tile attend to besides the window, in one of two forms.

    Attributes:
        entries: [K, head_dim].
        mask: fp32 [1, Q, 1, M], 0 or -inf, of the last M keys (entries, then window rows).
        chosen: int64 [Q, top_k]: each query attends these entries only and its whole window, and
            ``mask`` does not apply. None: all entries that the mask lets through.
    """

    entries: torch.Tensor | None
    mask: torch.Tensor
    chosen: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeEntries:
    """What the queries of a decode batch attend to besides the window.

    Attributes:
        entries: [B, K, head_dim]; or [B * Q, K, head_dim], each query's own; or None.
        mask: fp32 [B, Q, 1, M], or [B * Q, 1, 1, M] with entries of each query's own, 0 or -inf,
            of the M keys (window rows, own rows, entries).
    """

    entries: torch.Tensor | None
    mask: torch.Tensor


class EntrySource(Protocol):
    """Where a layer's compressed entries come from; see ``entries`` for the kinds."""

    in_sizes: tuple[int, ...]
    """Rows of the matrices over the layer's input."""
    in_names: tuple[str, ...]
    """Published names of these, without the attention's prefix."""
    input_sizes: tuple[int, ...]
    """Widths of what ``store`` takes of their products, of which two may be one."""

    def make(self, inputs: list[torch.Tensor], step: Step) -> None:
        """Writes the entries that a step completes, of all its rows; without any does nothing."""

    def store(
        self, q_latent: torch.Tensor, inputs: list[torch.Tensor], turns: Turns, step: Step
    ) -> IndexQueries | None:
        """Writes this step's compressor rows and the entries they complete (``make``).

        Of a step with some rows alone, entries were made before.

        Args:
            q_latent: Normed query latent [T, q_lora_rank].
            inputs: Projections [T, size] of the layer's input, by ``input_sizes``.
            turns: Rotary turns of the layer.
            step: The step.
        """

    def read_decodes(
        self, index: int, queries: IndexQueries | None, plan: AttentionPlan, step: Step
    ) -> DecodeEntries:
        """Reads the entries of decode batch ``index``."""

    def read_chunk(
        self, index: int, queries: IndexQueries | None, step: Step
    ) -> ChunkEntries | None:
        """Reads what ``pick_for_tile`` needs for every tile of chunk ``index``."""

    def pick_for_tile(self, chunk: ChunkEntries | None, tile: QueryTile) -> TileEntries:
        """Returns what a tile's queries attend to."""

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination, but for the matrices of ``in_names``.

        Args:
            prefix: The attention's prefix.
        """
