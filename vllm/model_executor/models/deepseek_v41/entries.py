"""Entries that layers share: who makes them, who chooses among them, who reads both."""

import torch
from torch.nn.functional import pad
from typing_extensions import override

from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.rotary import Turns
from vllm.model_executor.models.causal_lm import PartsOf
from vllm.model_executor.models.deepseek_v4.compressor import Compressor
from vllm.model_executor.models.deepseek_v4.entries import (
    EntryChooser,
    NoEntries,
    read_index_keys,
    score_tile,
)
from vllm.model_executor.models.deepseek_v4.entry_source import (
    ChunkEntries,
    EntrySource,
    IndexQueries,
)
from vllm.model_executor.models.deepseek_v4.kv_cache import LayerCacheNames
from vllm.model_executor.models.deepseek_v4.page_reader import PageReader
from vllm.model_executor.models.deepseek_v4.selections import Place, Selections
from vllm.model_executor.models.deepseek_v4.step import ModelParts, Step
from vllm.model_executor.models.deepseek_v41.config import DeepseekV41Config, SharedLayerPlan
from vllm.v1.attention.step_tables import PaddedRows, QueryTile


class EntryMaker(torch.nn.Module):
    """Makes a layer's entries, and of each its index key before it is turned.

    With a ratio of 1 every token is an entry; else a gate weighs the rows of each window.

    Args:
        plan: The layer's.
        names: Of the layer's caches.
        parts: What to build from.
    """

    def __init__(self, plan: SharedLayerPlan, names: LayerCacheNames, parts: ModelParts) -> None:
        super().__init__()
        config, make = parts.config, parts.make
        width = config.head_dim
        self._names, self._eps, self._dtype = names, config.rms_norm_eps, make.dtype
        self.compressor: Compressor | None = None
        if plan.ratio > 1:
            self.compressor = Compressor(
                plan, width, names.state, names.entries, parts, has_biases=False
            )
        self.norm = self.compressor.norm if self.compressor else make.parameter(width)
        self.wk = ReplicatedLinear(width, (config.index_head_dim,), make, ("indexer.wk",))
        self.k_norm = make.parameter(config.index_head_dim)
        self.in_names = ("compressor.wkv", "compressor.wgate")[: 2 if self.compressor else 1]
        self.in_sizes = (width,) * len(self.in_names)
        self._rms_norm = parts.ops("rms_norm")
        self._rotate_ = parts.ops("rotate_")
        self._write_rows = parts.ops("write_rows")

    def forward(self, projected: torch.Tensor, step: Step) -> None:
        """Stores the entries that a step completes, and their keys.

        Args:
            projected: [T, width] or, with a gate, [T, 2 * width].
            step: The step.

        Mutates:
            The layer's caches.
        """
        meta = step.meta
        dense = meta.entries[meta.group_of[self._names.entries]]
        if self.compressor is not None:
            latents = self.compressor.complete(projected, step)
            if latents is None:
                return
            turns = step.entry_turns[meta.group_of[self._names.state]].rows
        else:
            turns = step.compress_turns.rows
            if dense.sources is not None:
                projected, turns = projected[dense.sources], turns[dense.sources]
            latents = self._rms_norm(projected, self.norm, self._eps)
        keys = self._rms_norm(self.wk(latents), self.k_norm, self._eps)
        target = dense.target
        for name, rows in ((self._names.entries, latents), (self._names.indexer, keys)):
            self._rotate_(rows, turns)
            self._write_rows(step.kv_caches[name], target.blocks, target.rows, rows)

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination, but for the caller's matrices."""
        return {
            f"{prefix}.compressor.norm.weight": self.norm.data,
            **self.wk.part_slots(0, f"{prefix}.indexer.wk"),
            f"{prefix}.indexer.k_norm.weight": self.k_norm.data,
        }


class SharedEntries(EntryChooser):
    """Entries of this layer or of one below it, chosen here or there.

    Args:
        layer: Which layer it is.
        plan: The layer's.
        parts: What to build from, within the layer's attention.
    """

    def __init__(
        self, layer: int, plan: SharedLayerPlan, parts: PartsOf[DeepseekV41Config]
    ) -> None:
        config = parts.config
        names = LayerCacheNames.of_block(f"layers.{plan.source}")
        num_candidates = config.candidate_topk_blocks * config.candidate_block_size
        super().__init__(
            names.entries,
            parts,
            # Layers of one choice begin to choose together, the one that names candidates too.
            num_free=min(config.index_topk, num_candidates)
            if config.names_candidates(plan.source)
            else None,
            # The newest block of the candidates may hold one entry alone.
            may_list=not plan.candidates
            or num_candidates >= config.index_topk + config.candidate_block_size,
        )
        self._plan = plan
        self._num_blocks, self._block_size = (
            config.candidate_topk_blocks,
            config.candidate_block_size,
        )
        self._num_heads, self._width = config.index_n_heads, config.index_head_dim
        self.maker = EntryMaker(plan, names, parts) if layer == plan.source else None
        self.wq_b: ReplicatedLinear | None = None
        in_names: list[str] = []
        in_sizes: list[int] = []
        input_sizes: list[int] = []
        if self.maker is not None:
            in_names += self.maker.in_names
            in_sizes += self.maker.in_sizes
            input_sizes.append(sum(self.maker.in_sizes))
        if layer == plan.chooser:
            self.wq_b = ReplicatedLinear(
                config.q_lora_rank,
                (self._num_heads * self._width,),
                parts.make,
                ("indexer.wq_b",),
            )
            in_names.append("indexer.weights_proj")
            in_sizes.append(self._num_heads)
            input_sizes.append(self._num_heads)
        self.in_names: tuple[str, ...] = tuple(in_names)
        self.in_sizes: tuple[int, ...] = tuple(in_sizes)
        self.input_sizes: tuple[int, ...] = tuple(input_sizes)
        self._index_keys = PageReader(names.indexer, parts)
        self._rotate_ = parts.ops("rotate_")
        self._score = parts.ops("index_scores")
        self._select = parts.ops("select_entries")

    def store(
        self, q_latent: torch.Tensor, inputs: list[torch.Tensor], turns: Turns, step: Step
    ) -> IndexQueries | None:
        """See ``EntrySource``."""
        if step.kept is None:
            self.make(inputs, step)
        if self.wq_b is None or not self._must_choose(step):
            return None
        queries = self.wq_b(q_latent).view(-1, self._num_heads, self._width)
        weights = inputs[-1] * (self._num_heads * self._width) ** -0.5
        queries = self._rotate_(queries, turns.heads)
        return IndexQueries(step.spread(queries), step.spread(weights))

    def make(self, inputs: list[torch.Tensor], step: Step) -> None:
        """See ``EntrySource``."""
        if self.maker is not None:
            self.maker(inputs[0], step)

    @override
    def choose_for_decodes(
        self,
        index: int,
        queries: IndexQueries | None,
        reads: PaddedRows,
        visible: torch.Tensor,
        step: Step,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shared, place = step.selections, (index,)
        if queries is not None:
            decode = step.meta.decodes[index]
            keys = self._index_keys.read_padded(reads, step)
            scores = self._score(
                decode.take(queries.queries), keys, decode.take(queries.head_weights)
            )
            scores += visible[:, :, 0]
            self._choose(scores, place, shared)
        candidates = self._find_candidates(place, shared)
        if candidates is not None:
            visible = visible.masked_fill(~candidates.unsqueeze(2), float("-inf"))
        return shared.chosen[place], visible

    @override
    def read_keys(
        self, index: int, queries: IndexQueries | None, entries: torch.Tensor, step: Step
    ) -> ChunkEntries:
        if queries is None:
            return ChunkEntries(entries, index=index, selections=step.selections)
        return read_index_keys(self._index_keys, index, queries, entries, step)

    @override
    def choose_for_tile(
        self, chunk: ChunkEntries, tile: QueryTile, visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert chunk.selections is not None
        shared, place = chunk.selections, (chunk.index, tile.queries.start)
        if chunk.queries is not None:
            self._choose(score_tile(chunk, tile, visible, self._score), place, shared)
        return shared.chosen[place], self._find_candidates(place, shared)

    def _choose(self, scores: torch.Tensor, place: Place, shared: Selections) -> None:
        """Leaves the choice by scores [B, Q, K], -inf for what a query does not see.

        Mutates:
            scores, and what is shared.
        """
        if self._plan.candidates == "names":
            self._name_candidates(scores, place, shared)
        candidates = self._find_candidates(place, shared)
        if candidates is not None:
            scores = scores.masked_fill_(~candidates, float("-inf"))
        shared.chosen[place] = self._select(scores, min(self._top_k, scores.shape[-1]))

    def _find_candidates(self, place: Place, shared: Selections) -> torch.Tensor | None:
        """Returns what the choice was made of; None: of all entries."""
        return shared.candidates.get(place) if self._plan.candidates == "within" else None

    def _name_candidates(self, scores: torch.Tensor, place: Place, shared: Selections) -> None:
        """Leaves the entries of the best blocks, a query's newest among them."""
        num_entries, size = scores.shape[-1], self._block_size
        num_blocks = -(-num_entries // size)
        if num_blocks <= self._num_blocks:
            return
        padded = pad(scores, (0, num_blocks * size - num_entries), value=float("-inf"))
        best = padded.view(*scores.shape[:-1], num_blocks, size).amax(-1)
        num_visible = (scores > float("-inf")).sum(-1, keepdim=True)
        newest = (num_visible - 1).clamp_(min=0) // size
        best.scatter_(-1, newest, float("inf"))
        blocks = self._select(best, self._num_blocks)
        shared.candidates[place] = blocks.repeat_interleave(size, -1)[..., :num_entries]

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """See ``EntrySource``."""
        slots = {} if self.maker is None else self.maker.weight_slots(prefix)
        if self.wq_b is not None:
            slots |= self.wq_b.part_slots(0, f"{prefix}.indexer.wq_b")
        return slots


def build_shared_source(
    layer: int, plan: SharedLayerPlan, parts: PartsOf[DeepseekV41Config]
) -> EntrySource:
    """Returns what a layer attends to besides its window."""
    return NoEntries() if plan.kind == "window" else SharedEntries(layer, plan, parts)
