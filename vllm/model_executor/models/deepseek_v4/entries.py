"""What a layer attends to besides its window: nothing, every entry, or a choice among them.

Chosen once per layer at construction. All answer the same questions: store this step's
rows and entries, read the entries of a decode batch, read the entries of a query tile.
"""

from abc import abstractmethod

import torch
from torch import nn
from typing_extensions import override

from vllm import envs
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.rotary import Turns
from vllm.model_executor.models.deepseek_v4.compressor import Compressor
from vllm.model_executor.models.deepseek_v4.config import LayerPlan
from vllm.model_executor.models.deepseek_v4.entry_source import (
    ChunkEntries,
    DecodeEntries,
    EntrySource,
    IndexQueries,
    TileEntries,
)
from vllm.model_executor.models.deepseek_v4.kv_cache import LayerCacheNames
from vllm.model_executor.models.deepseek_v4.page_reader import PageReader
from vllm.model_executor.models.deepseek_v4.step import ModelParts, Step
from vllm.v1.attention.ops.registry import Op
from vllm.v1.attention.step_tables import AttentionPlan, PaddedRows, PageRows, QueryTile

# Masking entries that were not chosen shares one key matrix between queries; listing the chosen
# ones copies rows per query. On a CPU listing wins from about 2 * top-k entries (8 times at 16),
# for the few queries of a decode batch from 2 * queries * top-k.
_LISTED_ENTRIES_FACTOR = 2


class NoEntries(nn.Module):
    """A window-only layer."""

    in_sizes: tuple[int, ...] = ()
    in_names: tuple[str, ...] = ()
    input_sizes: tuple[int, ...] = ()

    def make(self, inputs: list[torch.Tensor], step: Step) -> None:
        """Does nothing."""
        del inputs, step

    def store(
        self, q_latent: torch.Tensor, inputs: list[torch.Tensor], turns: Turns, step: Step
    ) -> IndexQueries | None:
        """Does nothing."""
        del q_latent, inputs, turns, step
        return None

    def read_decodes(
        self, index: int, queries: IndexQueries | None, plan: AttentionPlan, step: Step
    ) -> DecodeEntries:
        """Returns no entries and the window's mask."""
        del queries, step
        return DecodeEntries(None, plan.decode_masks[index])

    def read_chunk(
        self, index: int, queries: IndexQueries | None, step: Step
    ) -> ChunkEntries | None:
        """Returns None."""
        del index, queries, step
        return None

    def pick_for_tile(self, chunk: ChunkEntries | None, tile: QueryTile) -> TileEntries:
        """Returns no entries and the window's mask."""
        del chunk
        return TileEntries(None, tile.tail_mask)

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns nothing."""
        del prefix
        return {}


class StoredEntries(nn.Module):
    """Reads the entries of a cache, all that a query sees."""

    def __init__(self, cache_name: str, parts: ModelParts) -> None:
        super().__init__()
        self._entries = PageReader(cache_name, parts)

    def read_decodes(
        self, index: int, queries: IndexQueries | None, plan: AttentionPlan, step: Step
    ) -> DecodeEntries:
        """See ``EntrySource``."""
        del queries
        reads = self._entries.find_group(step.meta.entries, step).decode_reads[index]
        return DecodeEntries(self._entries.read_padded(reads, step), plan.decode_masks[index])

    def read_chunk(
        self, index: int, queries: IndexQueries | None, step: Step
    ) -> ChunkEntries | None:
        """See ``EntrySource``."""
        del queries
        reads = self._entries.find_group(step.meta.entries, step).chunk_reads[index]
        return ChunkEntries(self._entries.read(reads, step))

    def pick_for_tile(self, chunk: ChunkEntries | None, tile: QueryTile) -> TileEntries:
        """See ``EntrySource``."""
        assert chunk is not None
        return TileEntries(chunk.entries[: tile.num_entries], tile.tail_mask)


class AllEntries(StoredEntries):
    """An hca layer: every visible entry is attended."""

    def __init__(self, plan: LayerPlan, names: LayerCacheNames, parts: ModelParts) -> None:
        super().__init__(names.entries, parts)
        self.compressor = Compressor(plan, parts.config.head_dim, names.state, names.entries, parts)
        width = self.compressor.row_width
        self.in_sizes: tuple[int, ...] = (width, width)
        self.in_names: tuple[str, ...] = ("compressor.wkv", "compressor.wgate")
        self.input_sizes: tuple[int, ...] = (2 * width,)

    def store(
        self, q_latent: torch.Tensor, inputs: list[torch.Tensor], turns: Turns, step: Step
    ) -> IndexQueries | None:
        """See ``EntrySource``."""
        del q_latent, turns
        self.make(inputs, step)
        return None

    def make(self, inputs: list[torch.Tensor], step: Step) -> None:
        """See ``EntrySource``."""
        self.compressor(inputs[0], step)

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """See ``EntrySource``."""
        return self.compressor.weight_slots(f"{prefix}.compressor")


class EntryChooser(nn.Module):
    """Attends ``index_topk`` entries per query, however they are chosen.

    With no more visible entries than ``num_free`` nothing has to be chosen.

    Args:
        cache_name: Of the entries.
        parts: What to build from.
        num_free: Entries of which all are attended; at most ``index_topk``. None: so many.
        may_list: Whether a query that sees ``index_topk`` entries always has so many to choose of.
    """

    def __init__(
        self,
        cache_name: str,
        parts: ModelParts,
        *,
        num_free: int | None = None,
        may_list: bool = True,
    ) -> None:
        super().__init__()
        config = parts.config
        self._top_k = config.index_topk
        self._num_free = self._top_k if num_free is None else num_free
        self._window = config.sliding_window
        self._may_list = may_list
        self.stored = StoredEntries(cache_name, parts)
        self._entries = PageReader(cache_name, parts)
        self._list = parts.ops("list_entries")
        # Then an entry's place is the same in any batch.
        self._lists_always = envs.VLLM_BATCH_INVARIANT

    @abstractmethod
    def choose_for_decodes(
        self,
        index: int,
        queries: IndexQueries | None,
        reads: PaddedRows,
        visible: torch.Tensor,
        step: Step,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses for the queries of decode batch ``index``.

        Args:
            index: Of the batch.
            queries: What ``store`` returned.
            reads: The requests' entries.
            visible: fp32 [B, Q, 1, K], 0 or -inf.
            step: The step.

        Returns:
            bool [B, Q, K], True at ``index_topk``, or at all if they are fewer; and what of them
            may be attended: fp32 [B, Q, 1, K], 0 or -inf.
        """

    @abstractmethod
    def choose_for_tile(
        self, chunk: ChunkEntries, tile: QueryTile, visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Chooses for the queries of a tile.

        Args:
            chunk: What ``read_chunk`` returned.
            tile: The tile.
            visible: fp32 [1, Q, N], 0 or -inf, of the last N entries.

        Returns:
            bool [1, Q, K], True at ``index_topk``, or at all if they are fewer; and bool [1, Q, K],
            what of the visible ones may be attended, or None: all.
        """

    @abstractmethod
    def read_keys(
        self, index: int, queries: IndexQueries | None, entries: torch.Tensor, step: Step
    ) -> ChunkEntries:
        """Returns the entries of chunk ``index`` with what ``choose_for_tile`` needs."""

    def read_decodes(
        self, index: int, queries: IndexQueries | None, plan: AttentionPlan, step: Step
    ) -> DecodeEntries:
        """See ``EntrySource``."""
        reads = self._entries.find_group(step.meta.entries, step).decode_reads[index]
        num_entries = reads.source.blocks.shape[1]
        if num_entries <= self._num_free:
            return self.stored.read_decodes(index, queries, plan, step)
        decode = step.meta.decodes[index]
        mask, visible = plan.decode_masks[index].tensor_split((-num_entries,), -1)
        chosen, visible = self.choose_for_decodes(index, queries, reads, visible, step)
        num_listed = decode.num_queries * min(self._top_k, num_entries)
        is_long = num_entries > _LISTED_ENTRIES_FACTOR * num_listed
        if decode.num_queries == 1 or is_long or self._lists_always:
            return self._list_chosen(chosen, reads, mask, visible, step)
        # A query with fewer visible entries than top-k had invisible ones chosen as fill.
        hidden = visible.masked_fill(~chosen.unsqueeze(2), float("-inf"))
        mask = torch.cat([mask, hidden], -1)
        return DecodeEntries(self._entries.read_padded(reads, step), mask)

    def _list_chosen(
        self,
        chosen: torch.Tensor,
        reads: PaddedRows,
        mask: torch.Tensor,
        visible: torch.Tensor,
        step: Step,
    ) -> DecodeEntries:
        """Reads for each query the entries chosen [B, Q, K] for it.

        Args:
            chosen: Which are.
            reads: The requests' entries.
            mask: fp32 [B, Q, 1, recent].
            visible: fp32 [B, Q, 1, K], of entries; 0 or -inf.
            step: The step.
        """
        num_requests, num_queries, _ = chosen.shape
        listed = self._list(chosen, min(self._top_k, chosen.shape[-1])).flatten(1)
        blocks, rows = (
            part.gather(1, listed).view(num_requests * num_queries, -1)
            for part in (reads.source.blocks, reads.source.rows)
        )
        empty = reads.empty_requests
        if empty is not None and num_queries > 1:
            offsets = torch.arange(num_queries, device=empty.device)
            empty = (empty.unsqueeze(1) * num_queries + offsets).flatten()
        entries = self._entries.read_with_empty(PageRows(blocks, rows), empty, step)
        listed = listed.view(num_requests * num_queries, 1, -1)
        chosen_mask = visible.flatten(0, 1).gather(2, listed)
        return DecodeEntries(entries, torch.cat([mask.flatten(0, 1), chosen_mask], -1).unsqueeze(1))

    def read_chunk(
        self, index: int, queries: IndexQueries | None, step: Step
    ) -> ChunkEntries | None:
        """See ``EntrySource``."""
        reads = self._entries.find_group(step.meta.entries, step).chunk_reads[index]
        entries = self._entries.read(reads, step)
        if entries.shape[0] <= self._num_free:
            return ChunkEntries(entries)
        return self.read_keys(index, queries, entries, step)

    def pick_for_tile(self, chunk: ChunkEntries | None, tile: QueryTile) -> TileEntries:
        """See ``EntrySource``; with many entries they are listed, else the others are masked."""
        assert chunk is not None
        if tile.num_entries <= self._num_free:
            return self.stored.pick_for_tile(chunk, tile)
        num_tail = tile.num_entries - tile.num_common
        visible = tile.tail_mask[..., 0, :num_tail]
        chosen, allowed = self.choose_for_tile(chunk, tile, visible)
        if self._should_list(tile):
            # Every query sees at least top-k entries, so what was chosen is visible.
            listed = self._list(chosen[0], self._top_k)
            return TileEntries(chunk.entries, tile.tail_mask, listed)
        if allowed is not None:
            chosen = chosen & allowed
        hidden = torch.zeros(chosen.shape, dtype=torch.float32, device=chosen.device)
        mask = hidden.masked_fill_(chosen.logical_not(), float("-inf"))
        # A query with fewer visible entries than top-k had invisible ones chosen as fill.
        mask[..., tile.num_common :] += visible
        mask = torch.cat([mask.unsqueeze(2), tile.tail_mask[..., num_tail:]], -1)
        return TileEntries(chunk.entries[: tile.num_entries], mask)

    def _should_list(self, tile: QueryTile) -> bool:
        """Whether per-query keys pay off; they also need full windows and no padding."""
        num_queries = tile.queries.stop - tile.queries.start
        num_window_keys = tile.window_keys.stop - tile.window_keys.start
        return (
            self._may_list
            and tile.num_entries > _LISTED_ENTRIES_FACTOR * self._top_k
            and tile.num_common >= self._top_k
            and num_window_keys == num_queries + self._window - 1
        )

    def _must_choose(self, step: Step) -> bool:
        entries = self._entries.find_group(step.meta.entries, step)
        return any(
            reads.source.blocks.shape[1] > self._num_free for reads in entries.decode_reads
        ) or any(reads.blocks.shape[0] > self._num_free for reads in entries.chunk_reads)


class ChosenEntries(EntryChooser):
    """A csa layer: the lightning indexer chooses; its own compressor makes the index keys."""

    def __init__(self, plan: LayerPlan, names: LayerCacheNames, parts: ModelParts) -> None:
        super().__init__(names.entries, parts)
        config = parts.config
        self._num_heads, self._width = config.index_n_heads, config.index_head_dim
        self.all_entries = AllEntries(plan, names, parts)
        self.index_compressor = Compressor(
            plan, self._width, names.indexer_state, names.indexer, parts
        )
        width = self.index_compressor.row_width
        self.in_sizes: tuple[int, ...] = (
            *self.all_entries.in_sizes,
            width,
            width,
            self._num_heads,
        )
        self.input_sizes: tuple[int, ...] = (
            *self.all_entries.input_sizes,
            2 * width,
            self._num_heads,
        )
        self.in_names: tuple[str, ...] = (
            *self.all_entries.in_names,
            "indexer.compressor.wkv",
            "indexer.compressor.wgate",
            "indexer.weights_proj",
        )
        self.wq_b = ReplicatedLinear(
            config.q_lora_rank,
            (self._num_heads * self._width,),
            parts.make,
            ("indexer.wq_b",),
        )
        self._index_keys = PageReader(names.indexer, parts)
        self._rotate_ = parts.ops("rotate_")
        self._score = parts.ops("index_scores")
        self._select = parts.ops("select_entries")

    def store(
        self, q_latent: torch.Tensor, inputs: list[torch.Tensor], turns: Turns, step: Step
    ) -> IndexQueries | None:
        """See ``EntrySource``."""
        self.make(inputs, step)
        if not self._must_choose(step):
            return None
        queries = self.wq_b(q_latent).view(-1, self._num_heads, self._width)
        return IndexQueries(
            self._rotate_(queries, turns.heads),
            inputs[2] * (self._num_heads * self._width) ** -0.5,
        )

    def make(self, inputs: list[torch.Tensor], step: Step) -> None:
        """See ``EntrySource``."""
        self.all_entries.make(inputs[:1], step)
        self.index_compressor(inputs[1], step)

    @override
    def choose_for_decodes(
        self,
        index: int,
        queries: IndexQueries | None,
        reads: PaddedRows,
        visible: torch.Tensor,
        step: Step,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert queries is not None
        decode = step.meta.decodes[index]
        keys = self._index_keys.read_padded(reads, step)
        scores = self._score(decode.take(queries.queries), keys, decode.take(queries.head_weights))
        scores += visible[:, :, 0]
        return self._select(scores, self._top_k), visible

    @override
    def read_keys(
        self, index: int, queries: IndexQueries | None, entries: torch.Tensor, step: Step
    ) -> ChunkEntries:
        assert queries is not None
        return read_index_keys(self._index_keys, index, queries, entries, step)

    @override
    def choose_for_tile(
        self, chunk: ChunkEntries, tile: QueryTile, visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        scores = score_tile(chunk, tile, visible, self._score)
        return self._select(scores, self._top_k), None

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """See ``EntrySource``."""
        return {
            **self.all_entries.weight_slots(prefix),
            **self.index_compressor.weight_slots(f"{prefix}.indexer.compressor"),
            **self.wq_b.part_slots(0, f"{prefix}.indexer.wq_b"),
        }


def read_index_keys(
    keys: PageReader, index: int, queries: IndexQueries, entries: torch.Tensor, step: Step
) -> ChunkEntries:
    """Returns the entries of chunk ``index`` with their keys and its part of the queries."""
    reads = keys.find_group(step.meta.entries, step).chunk_reads[index]
    rows = step.meta.chunks[index].rows
    own = IndexQueries(queries.queries[rows], queries.head_weights[rows])
    return ChunkEntries(entries, keys.read(reads, step), own, index, step.selections)


def score_tile(
    chunk: ChunkEntries, tile: QueryTile, visible: torch.Tensor, score: Op
) -> torch.Tensor:
    """Returns the scores fp32 [1, Q, K] of what a tile's queries see, -inf for the others."""
    assert chunk.index_keys is not None
    assert chunk.queries is not None
    scores: torch.Tensor = score(
        chunk.queries.queries[None, tile.queries],
        chunk.index_keys[None, : tile.num_entries],
        chunk.queries.head_weights[None, tile.queries],
    )
    scores[..., tile.num_common :] += visible
    return scores


def build_entry_source(plan: LayerPlan, names: LayerCacheNames, parts: ModelParts) -> EntrySource:
    """Returns the entry source of a layer's kind."""
    if plan.kind == "window":
        return NoEntries()
    if plan.kind == "hca":
        return AllEntries(plan, names, parts)
    return ChosenEntries(plan, names, parts)
