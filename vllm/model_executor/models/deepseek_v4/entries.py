"""What a layer attends to besides its window: nothing, every entry, or the indexer's choice.

Chosen once per layer at construction. All three answer the same questions: store this step's
rows and entries, read the entries of a decode batch, read the entries of a query tile.
"""

import torch
from torch import nn

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


class AllEntries(nn.Module):
    """An hca layer: every visible entry is attended."""

    def __init__(self, plan: LayerPlan, names: LayerCacheNames, parts: ModelParts) -> None:
        super().__init__()
        self.compressor = Compressor(plan, parts.config.head_dim, names.state, names.entries, parts)
        width = self.compressor.row_width
        self.in_sizes: tuple[int, ...] = (width, width)
        self.in_names: tuple[str, ...] = ("compressor.wkv", "compressor.wgate")
        self.input_sizes: tuple[int, ...] = (2 * width,)
        self._entries = PageReader(names.entries, parts)

    def store(
        self, q_latent: torch.Tensor, inputs: list[torch.Tensor], turns: Turns, step: Step
    ) -> IndexQueries | None:
        """See ``EntrySource``."""
        del q_latent, turns
        self.compressor(inputs[0], step)
        return None

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

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """See ``EntrySource``."""
        return self.compressor.weight_slots(f"{prefix}.compressor")


class ChosenEntries(nn.Module):
    """A csa layer: the lightning indexer chooses ``index_topk`` entries per query.

    Its own compressor makes the index keys. With no more visible entries than ``index_topk``
    nothing has to be chosen, and no scores are computed.
    """

    def __init__(self, plan: LayerPlan, names: LayerCacheNames, parts: ModelParts) -> None:
        super().__init__()
        config = parts.config
        self._top_k = config.index_topk
        self._window = config.sliding_window
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
        self._entries = PageReader(names.entries, parts)
        self._index_keys = PageReader(names.indexer, parts)
        self._rotate_ = parts.ops("rotate_")
        self._score = parts.ops("index_scores")
        self._select = parts.ops("select_entries")
        self._list = parts.ops("list_entries")
        # Then an entry's place is the same in any batch.
        self._lists_always = envs.VLLM_BATCH_INVARIANT

    def store(
        self, q_latent: torch.Tensor, inputs: list[torch.Tensor], turns: Turns, step: Step
    ) -> IndexQueries | None:
        """See ``EntrySource``."""
        self.all_entries.store(q_latent, inputs[:1], turns, step)
        self.index_compressor(inputs[1], step)
        if not self._must_choose(step):
            return None
        queries = self.wq_b(q_latent).view(-1, self._num_heads, self._width)
        return IndexQueries(
            self._rotate_(queries, turns.heads),
            inputs[2] * (self._num_heads * self._width) ** -0.5,
        )

    def read_decodes(
        self, index: int, queries: IndexQueries | None, plan: AttentionPlan, step: Step
    ) -> DecodeEntries:
        """See ``EntrySource``."""
        reads = self._entries.find_group(step.meta.entries, step).decode_reads[index]
        num_entries = reads.source.blocks.shape[1]
        if num_entries <= self._top_k:
            return self.all_entries.read_decodes(index, queries, plan, step)
        assert queries is not None
        decode = step.meta.decodes[index]
        mask, visible = plan.decode_masks[index].tensor_split((-num_entries,), -1)
        keys = self._index_keys.read_padded(reads, step)
        scores = self._score(decode.take(queries.queries), keys, decode.take(queries.head_weights))
        scores += visible[:, :, 0]
        chosen = self._select(scores, self._top_k)
        num_listed = decode.num_queries * self._top_k
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
        listed = self._list(chosen, self._top_k).flatten(1)
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
        if entries.shape[0] <= self._top_k:
            return ChunkEntries(entries)
        assert queries is not None
        rows = step.meta.chunks[index].rows
        return ChunkEntries(
            entries,
            self._index_keys.read(reads, step),
            IndexQueries(queries.queries[rows], queries.head_weights[rows]),
        )

    def pick_for_tile(self, chunk: ChunkEntries | None, tile: QueryTile) -> TileEntries:
        """See ``EntrySource``; with many entries they are listed, else the others are masked."""
        assert chunk is not None
        if tile.num_entries <= self._top_k:
            return self.all_entries.pick_for_tile(chunk, tile)
        assert chunk.index_keys is not None
        assert chunk.queries is not None
        num_tail = tile.num_entries - tile.num_common
        scores = self._score(
            chunk.queries.queries[None, tile.queries],
            chunk.index_keys[None, : tile.num_entries],
            chunk.queries.head_weights[None, tile.queries],
        )
        visible = tile.tail_mask[..., 0, :num_tail]
        scores[..., tile.num_common :] += visible
        chosen = self._select(scores, self._top_k)
        if self._should_list(tile):
            # Every query sees at least top-k entries, so what was chosen is visible.
            listed = self._list(chosen[0], self._top_k)
            return TileEntries(chunk.entries, tile.tail_mask, listed)
        mask = torch.zeros_like(scores).masked_fill_(chosen.logical_not_(), float("-inf"))
        # A query with fewer visible entries than top-k had invisible ones chosen as fill.
        mask[..., tile.num_common :] += visible
        mask = torch.cat([mask.unsqueeze(2), tile.tail_mask[..., num_tail:]], -1)
        return TileEntries(chunk.entries[: tile.num_entries], mask)

    def _should_list(self, tile: QueryTile) -> bool:
        """Whether per-query keys pay off; they also need full windows and no padding."""
        num_queries = tile.queries.stop - tile.queries.start
        num_window_keys = tile.window_keys.stop - tile.window_keys.start
        return (
            tile.num_entries > _LISTED_ENTRIES_FACTOR * self._top_k
            and tile.num_common >= self._top_k
            and num_window_keys == num_queries + self._window - 1
        )

    def _must_choose(self, step: Step) -> bool:
        entries = self._entries.find_group(step.meta.entries, step)
        return any(
            reads.source.blocks.shape[1] > self._top_k for reads in entries.decode_reads
        ) or any(reads.blocks.shape[0] > self._top_k for reads in entries.chunk_reads)

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """See ``EntrySource``."""
        return {
            **self.all_entries.weight_slots(prefix),
            **self.index_compressor.weight_slots(f"{prefix}.indexer.compressor"),
            **self.wq_b.part_slots(0, f"{prefix}.indexer.wq_b"),
        }


def build_entry_source(plan: LayerPlan, names: LayerCacheNames, parts: ModelParts) -> EntrySource:
    """Returns the entry source of a layer's kind."""
    if plan.kind == "window":
        return NoEntries()
    if plan.kind == "hca":
        return AllEntries(plan, names, parts)
    return ChosenEntries(plan, names, parts)
