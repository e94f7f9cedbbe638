"""DeepSeek-V4 attention: one shared key/value per token, a window, and compressed entries."""

import torch
from torch import nn

from vllm.distributed.parallel_state import shard_size
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    GroupedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.models.deepseek_v4.config import LayerPlan
from vllm.model_executor.models.deepseek_v4.entry_source import (
    EntrySource,
    IndexQueries,
    TileEntries,
)
from vllm.model_executor.models.deepseek_v4.kv_cache import LayerCacheNames
from vllm.model_executor.models.deepseek_v4.page_reader import PageReader
from vllm.model_executor.models.deepseek_v4.step import ModelParts, Step
from vllm.v1.attention.step_batch import MAX_DECODE_QUERIES

# Keys are copied for so many queries at a time that the copies (4 MiB of fp32) stay in the cache:
# 3 to 4 times as fast as copying a whole tile's.
_MAX_KEY_VALUES = 1 << 20


class DeepseekV4Attention(nn.Module):
    """Attention of one layer; what it attends to besides the window is its ``EntrySource``.

    Args:
        plan: The layer's kind and ratio.
        names: Names of the layer's caches.
        parts: What to build from.
        entries: What it attends to besides the window.
    """

    def __init__(
        self, plan: LayerPlan, names: LayerCacheNames, parts: ModelParts, entries: EntrySource
    ) -> None:
        super().__init__()
        config, make = parts.config, parts.make
        self._names = names
        self._eps = config.rms_norm_eps
        self._head_dim = config.head_dim
        self._plan_key = (config.sliding_window, plan.ratio)
        self._has_compressor = plan.kind != "window"
        heads = shard_size("num_attention_heads", config.num_attention_heads, make.group)

        # All matrices over the layer's input in one product; their outputs in this order.
        self.entries = entries
        self.in_proj = ReplicatedLinear(
            config.hidden_size,
            (config.q_lora_rank, config.head_dim, *self.entries.in_sizes),
            make,
            ("wq_a", "wkv", *self.entries.in_names),
        )
        self._input_sizes = [config.q_lora_rank, config.head_dim, *self.entries.input_sizes]
        self.q_norm = make.parameter(config.q_lora_rank)
        self.kv_norm = make.parameter(config.head_dim)
        self.wq_b = ColumnParallelLinear(
            "num_attention_heads * head_dim",
            config.q_lora_rank,
            config.num_attention_heads * config.head_dim,
            make,
            "wq_b",
        )
        self.wo_a = GroupedColumnParallelLinear(
            "o_groups",
            config.o_groups,
            config.num_attention_heads * config.head_dim // config.o_groups,
            config.o_lora_rank,
            make,
            "wo_a",
        )
        self.wo_b = RowParallelLinear(
            "o_groups * o_lora_rank",
            config.o_groups * config.o_lora_rank,
            config.hidden_size,
            make,
            "wo_b",
        )
        self.sinks = make.parameter(heads, dtype=torch.float32)
        # Where there is a per-head query norm it has no weight: the softmax scale can ride on it.
        self._norms_heads = config.norms_heads
        self._q_scale = torch.full(
            (config.head_dim,), config.head_dim**-0.5, dtype=make.dtype, device=make.device
        )
        self._zero_key = torch.zeros(1, 1, config.head_dim, dtype=make.dtype, device=make.device)
        self._rms_norm = parts.ops("rms_norm")
        self._rotate_ = parts.ops("rotate_")
        self._write_rows = parts.ops("write_rows")
        self._round_rows = parts.ops("round_rows")
        self._window = PageReader(names.window, parts)
        self._attend = parts.ops("attend")

    def store_entries(self, x: torch.Tensor, step: Step) -> None:
        """Writes the entries that a step completes from its normed input [T, D], nothing else."""
        _, _, *entry_inputs = self.in_proj(x).split(self._input_sizes, -1)
        self.entries.make(entry_inputs, step)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Maps the normed input [T, D] to the output [T, D]; writes the layer's caches.

        Of a step with some rows alone it takes and gives those; the others' windows hold zeros.
        """
        num_tokens = x.shape[0]
        turns = step.compress_turns if self._has_compressor else step.main_turns
        q_latent, kv, *entry_inputs = self.in_proj(x).split(self._input_sizes, -1)
        q_latent = self._rms_norm(q_latent, self.q_norm, self._eps)
        queries = self.wq_b(q_latent).view(num_tokens, -1, self._head_dim)
        if self._norms_heads:
            queries = self._rms_norm(queries, self._q_scale, self._eps)
        else:
            queries = queries * self._q_scale
        queries = self._rotate_(queries, turns.heads)
        kv = self._rotate_(self._rms_norm(kv, self.kv_norm, self._eps), turns.rows)
        # Every write of the layer comes before any read from its pages.
        kv = self._store_window(step.spread(kv), step)
        index_queries = self.entries.store(q_latent, entry_inputs, turns, step)
        output = self._attend_all(step.spread(queries), kv, index_queries, step)
        if step.kept is not None:
            output = output[step.kept]
        self._rotate_(output, turns.inverse_heads)
        attended: torch.Tensor = self.wo_b(self.wo_a(output.flatten(1)))
        return attended

    def blank_window(self, step: Step) -> None:
        """Writes zeros for the window rows of all rows of a step: none is read but masked."""
        shape = (step.meta.num_tokens, self._head_dim)
        self._store_window(torch.zeros(shape, dtype=self._zero_key.dtype), step)

    def _store_window(self, kv: torch.Tensor, step: Step) -> torch.Tensor:
        """Writes window rows; returns them as a later step will read them."""
        cache = step.kv_caches[self._names.window]
        writes = self._window.find_group(step.meta.windows, step).writes
        kept = kv if writes.sources is None else kv[writes.sources]
        self._write_rows(cache, writes.target.blocks, writes.target.rows, kept)
        # A cache narrower than the model rounds; rounding here too keeps the result independent
        # of where chunks end.
        rounded: torch.Tensor = self._round_rows(cache, kv)
        return rounded

    def _attend_all(
        self,
        queries: torch.Tensor,
        kv: torch.Tensor,
        index_queries: IndexQueries | None,
        step: Step,
    ) -> torch.Tensor:
        """Returns [T, H, head_dim], still turned to the queries' positions."""
        decodes = step.meta.decodes
        if len(decodes) == 1 and decodes[0].rows is None:
            return self._attend_decodes(0, queries, kv, index_queries, step).flatten(0, 1)
        output = torch.empty_like(queries)
        for index, decode in enumerate(decodes):
            decode.put(self._attend_decodes(index, queries, kv, index_queries, step), output)
        for index, chunk in enumerate(step.meta.chunks):
            self._attend_chunk(
                index, queries[chunk.rows], kv[chunk.rows], index_queries, step, output[chunk.rows]
            )
        return output

    def _attend_decodes(
        self,
        index: int,
        queries: torch.Tensor,
        kv: torch.Tensor,
        index_queries: IndexQueries | None,
        step: Step,
    ) -> torch.Tensor:
        """Attends the queries of a decode batch: [B, Q, H, head_dim]."""
        plan, decode = step.meta.plans[self._plan_key], step.meta.decodes[index]
        picked = self.entries.read_decodes(index, index_queries, plan, step)
        reads = self._window.find_group(step.meta.windows, step).decode_reads[index]
        batch_queries = decode.take(queries)
        recent = [self._window.read_padded(reads, step), decode.take(kv)]
        output_shape = batch_queries.shape
        if picked.entries is not None and picked.entries.shape[0] > decode.num_requests:
            # Every query has entries of its own, and so becomes a batch of its own.
            batch_queries = batch_queries.flatten(0, 1).unsqueeze(1)
            recent = [rows.repeat_interleave(decode.num_queries, 0) for rows in recent]
        # Filled up, so that nothing moves an entry from its place.
        window, _ = self._plan_key
        zeros = self._zero_key.expand(batch_queries.shape[0], -1, -1)
        before = zeros.expand(-1, window - recent[0].shape[1], -1)
        behind = zeros.expand(-1, MAX_DECODE_QUERIES - decode.num_queries, -1)
        keys = [before, *recent, behind]
        if picked.entries is not None:
            keys.append(picked.entries)
        attended: torch.Tensor = self._attend(
            batch_queries, torch.cat(keys, 1), picked.mask, self.sinks
        )
        return attended.view(output_shape)

    def _attend_chunk(
        self,
        index: int,
        queries: torch.Tensor,
        kv: torch.Tensor,
        index_queries: IndexQueries | None,
        step: Step,
        output: torch.Tensor,
    ) -> None:
        """Attends one request's queries [N, H, head_dim], tile by tile.

        Mutates:
            output [N, H, head_dim].
        """
        plan = step.meta.plans[self._plan_key]
        chunk = self.entries.read_chunk(index, index_queries, step)
        prior = self._window.find_group(step.meta.windows, step).chunk_reads[index]
        local_keys = torch.cat([self._window.read(prior, step), kv])
        first = step.first_queries[index] if step.first_queries else 0
        for tile in plan.chunk_tiles[index]:
            if tile.queries.stop <= first:
                continue
            picked = self.entries.pick_for_tile(chunk, tile)
            tile_queries, window_keys = queries[tile.queries], local_keys[tile.window_keys]
            if picked.chosen is not None:
                self._attend_chosen(tile_queries, picked, window_keys, output[tile.queries])
                continue
            keys = [self._zero_key[0]]
            if picked.entries is not None:
                keys.append(picked.entries)
            tile_keys = torch.cat([*keys, window_keys]).unsqueeze(0)
            output[tile.queries] = self._attend(
                tile_queries.unsqueeze(0), tile_keys, picked.mask, self.sinks
            )[0]

    def _attend_chosen(
        self,
        queries: torch.Tensor,
        picked: TileEntries,
        window_keys: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attends queries [Q, H, head_dim] with keys of their own.

        Mutates:
            output [Q, H, head_dim].
        """
        assert picked.chosen is not None
        assert picked.entries is not None
        window, _ = self._plan_key
        num_queries = picked.chosen.shape[0]
        source = torch.cat([self._zero_key[0], picked.entries, window_keys])
        # | zero key | chosen entries | window: keys i .. i + window - 1 of query i |
        offsets = torch.arange(num_queries, device=source.device).unsqueeze(1)
        windows = offsets + torch.arange(window, device=source.device)
        first_window_key = 1 + picked.entries.shape[0]
        index = torch.cat(
            [torch.zeros_like(offsets), picked.chosen + 1, windows + first_window_key], 1
        )
        step = max(1, _MAX_KEY_VALUES // (index.shape[1] * self._head_dim))
        for first in range(0, num_queries, step):
            part = index[first : first + step]
            keys = source.index_select(0, part.flatten()).view(*part.shape, -1)
            part_queries = queries[first : first + step].unsqueeze(1)
            attended = self._attend(part_queries, keys, None, self.sinks)
            output[first : first + step] = attended.squeeze(1)

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination."""
        names = ("wq_a", "wkv", *self.entries.in_names)
        matrices: dict[str, torch.Tensor] = {}
        for index, name in enumerate(names):
            matrices |= self.in_proj.part_slots(index, f"{prefix}.{name}")
        return {
            **matrices,
            f"{prefix}.q_norm.weight": self.q_norm.data,
            **self.wq_b.weight_slots(f"{prefix}.wq_b"),
            f"{prefix}.kv_norm.weight": self.kv_norm.data,
            f"{prefix}.attn_sink": self.sinks.data,
            **self.wo_a.weight_slots(f"{prefix}.wo_a"),
            **self.wo_b.weight_slots(f"{prefix}.wo_b"),
            **self.entries.weight_slots(prefix),
        }
