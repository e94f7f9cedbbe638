"""Latent attention to chosen keys: an indexer ranks pools of consecutive tokens (GLM 5.3 Flash).

    open pool   a token's [ index key | gate + bias of its place ]   kept until its pool is complete
    pool key    sum over its tokens of softmax(gate + bias) * index key, by channel: kept for ever
    score       sum over heads of weight * relu(index query . pool key)
    keys        the tokens of the highest complete pools, and all behind the last complete one

A query that sees no more complete pools than are chosen attends to all keys.
"""

import torch
from torch.nn.functional import layer_norm

from vllm.exceptions import UnsupportedFeatureError
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.decoder.config import LayerPlan
from vllm.model_executor.models.decoder.kv_cache import pool_keys_name, pool_state_name
from vllm.model_executor.models.decoder.latent_attention import LatentAttention
from vllm.model_executor.models.decoder.step import ModelParts, Step
from vllm.v1.attention.step_tables import ChunkKeys, DecodeBatch, DecodeKeys, PageRows

_NORM_EPS = 1e-6
# Queries whose masks exist at a time.
_TILE = 256


class IndexedAttention(LatentAttention):
    """Attention of one layer over the latent rows that its indexer chooses.

    Letters: as of ``LatentAttention``; I values of an index key, J heads of the indexer.

    Args:
        index: The layer.
        plan: Its heads.
        parts: What to build from, within the layer's ``self_attn``.
    """

    def __init__(self, index: int, plan: LayerPlan, parts: ModelParts) -> None:
        super().__init__(index, plan, parts)
        indexer = self.latent.indexer
        assert indexer is not None
        self._indexer = indexer
        hidden, make = parts.config.hidden_size, parts.make.within(f"{parts.make.prefix}indexer")
        width, heads = indexer.head_dim, indexer.num_heads
        self.index_queries = ReplicatedLinear(
            self.latent.query_rank, (heads * width,), make, ("wq_b",)
        )
        # Index keys, then weights of heads.
        self._inner_names = ("wk", "weights_proj")
        self.index_inputs = ReplicatedLinear(hidden, (width, heads), make, self._inner_names)
        self.gate = make.parameter(width, hidden)
        self.place_bias = make.parameter(indexer.pool_size, width, dtype=torch.float32)
        self.key_norm = make.parameter(2, width, dtype=torch.float32)
        self._keys_name, self._state_name = pool_keys_name(index), pool_state_name(index)
        self._linear, self._compress = parts.ops("linear"), parts.ops("compress_windows")

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Maps the normed input [T, D] to the output [T, D]; writes the layer's caches.

        The last layer with a cache gives the step's wanted rows alone.

        Raises:
            UnsupportedFeatureError: The platform's kernels read pages by themselves.
        """
        if step.meta.pages is not None:
            raise UnsupportedFeatureError(
                "no kernel of this platform attends to keys that an indexer chooses: serve this "
                "model on a CPU."
            )
        projected, rows = self._project(x)
        sizes = [self._indexer.head_dim, self._indexer.num_heads]
        keys, weights = torch.split(self.index_inputs(x), sizes, -1)
        weight, bias = self.key_norm
        keys = layer_norm(keys.float(), weight.shape, weight, bias, _NORM_EPS)
        self._keep_pools(torch.cat([keys, self._linear(x, self.gate).float()], -1), step)
        # One tensor a row, as attention's steps are handed on.
        parts = (self._take(projected).flatten(1), self.index_queries(projected), weights)
        return self._map_found(self._attend_step(torch.cat(parts, 1), rows, step))

    def _keep_pools(self, rows: torch.Tensor, step: Step) -> None:
        """Stores rows of open pools, fp32 [T, 2 * I], then the keys of pools that are complete.

        Mutates:
            rows, the caches.
        """
        meta, width = step.meta, self._indexer.head_dim
        state = meta.states[meta.group_of[self._state_name]]
        cache = step.kv_caches[self._state_name]
        rows[:, width:] += self.place_bias[state.phases]
        # Rounding here too keeps the result independent of where chunks end.
        rows = self._round_rows(cache, rows)
        writes = state.writes
        kept = rows if writes.sources is None else rows[writes.sources]
        self._write_rows(cache, writes.target.blocks, writes.target.rows, kept)
        if not state.num_completed:
            return
        prior = self._read_rows(cache, state.prior.blocks, state.prior.rows, torch.float32)
        pools = self._compress(torch.cat([prior, rows])[state.windows], None, None)
        target = meta.entries[meta.group_of[self._keys_name]].target
        self._write_rows(step.kv_caches[self._keys_name], target.blocks, target.rows, pools)

    def _read_pools(self, source: PageRows, step: Step) -> torch.Tensor | None:
        """Returns pool keys, fp32 [..., C, I]; None: no query has to choose among so few."""
        if source.blocks.shape[-1] <= self._indexer.num_chosen:
            return None
        cache = step.kv_caches[self._keys_name]
        pools: torch.Tensor = self._read_rows(cache, source.blocks, source.rows, torch.float32)
        return pools

    def _attend_all(
        self, queries: torch.Tensor, rows: torch.Tensor, step: Step, *, skips: bool
    ) -> torch.Tensor:
        """Returns [T, H, L + S] for what ``forward`` made of rows, [T, values], and their rows."""
        tables = step.meta.keys[step.meta.group_of[self._cache_name]]
        entries = step.meta.entries[step.meta.group_of[self._keys_name]]
        width = self.latent.latent_dim + self.latent.shared_dim
        output = queries.new_empty(len(queries), self._shape.num_heads, width)
        decodes = zip(step.meta.decodes, tables.decodes, entries.decode_reads, strict=True)
        for decode, keys, reads in decodes:
            pools = self._read_pools(reads.source, step)
            attended = self._attend_batch(decode, keys, queries, rows, pools, step)
            decode.put(attended, output)
        chunks = zip(step.meta.chunks, tables.chunks, entries.chunk_reads, strict=True)
        for chunk, chunk_keys, found in chunks:
            part, skip = chunk.rows, chunk.num_unwanted if skips else 0
            if skip < chunk.num_tokens:
                wanted, pools = queries[part][skip:], self._read_pools(found, step)
                own = self._join_rows(chunk_keys, rows[part], queries.dtype, step)
                positions = torch.arange(len(own) - len(wanted), len(own), device=rows.device)
                output[part][skip:] = self._attend_request(wanted, own, pools, positions)
        return output

    def _attend_batch(
        self,
        decode: DecodeBatch,
        tables: DecodeKeys,
        queries: torch.Tensor,
        rows: torch.Tensor,
        pools: torch.Tensor | None,
        step: Step,
    ) -> torch.Tensor:
        """Attends the queries of a decode batch: [B, Q, H, L + S]."""
        taken, own = decode.take(queries), decode.take(rows)
        stored = self._read(tables.source, step, queries.dtype)
        num_stored = stored.shape[1]
        outputs = []
        # Padding repeats the last query; a request's rows are the last ones of those read.
        all_positions = decode.take(step.positions)
        for index, (first, end) in enumerate(tables.bounds):
            if tables.has_own:
                keys = stored[index, num_stored - end :]
            else:
                keys = torch.cat([stored[index, num_stored - first :], own[index, : end - first]])
            found = None
            if pools is not None:
                found = pools[index, : end // self._indexer.pool_size]
            found_rows = self._attend_request(taken[index], keys, found, all_positions[index])
            outputs.append(found_rows)
        return torch.stack(outputs)

    def _join_rows(
        self, tables: ChunkKeys, rows: torch.Tensor, dtype: torch.dtype, step: Step
    ) -> torch.Tensor:
        """Returns all rows of a request from its first token on; ``rows`` are its chunk's."""
        if tables.kept is not None:
            stored = self._read(tables.kept, step, dtype)
            rows = torch.cat([stored, rows[len(stored) :]])
        if tables.prior.blocks.numel():
            rows = torch.cat([self._read(tables.prior, step, dtype), rows])
        return rows

    def _attend_request(
        self,
        packed: torch.Tensor,
        rows: torch.Tensor,
        pools: torch.Tensor | None,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Attends one request's queries at int64 positions [N] to its rows from the first on."""
        indexer, latent = self._indexer, self.latent
        heads, width = self._shape.num_heads, latent.latent_dim + latent.shared_dim
        sizes = [heads * width, indexer.num_heads * indexer.head_dim, indexer.num_heads]
        queries, index_queries, weights = torch.split(packed, sizes, -1)
        by_head = queries.view(len(packed), heads, width).transpose(0, 1)
        keys = rows[None, None]
        if pools is not None and len(pools) <= indexer.num_chosen:
            pools = None
        outputs = []
        for first in range(0, len(packed), _TILE):
            tile = slice(first, first + _TILE)
            seen = torch.arange(len(rows), device=rows.device) <= positions[tile, None]
            if pools is not None:
                own = index_queries[tile].float().view(-1, indexer.num_heads, indexer.head_dim)
                scores = self._score(own, weights[tile].float(), pools, positions[tile])
                seen &= self._choose(scores, positions[tile], len(rows))
            mask = torch.zeros(seen.shape, device=rows.device).masked_fill_(~seen, -torch.inf)
            found, _ = self._attend(
                by_head[None, :, tile], keys, keys, mask[None, None], False, *self._score_args
            )
            outputs.append(found[0].transpose(0, 1))
        return torch.cat(outputs)

    def _score(
        self,
        queries: torch.Tensor,
        weights: torch.Tensor,
        pools: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Returns scores of pools [N, C]; of those that a query sees in part or not at all, -inf.

        Args:
            queries: fp32 [N, J, I].
            weights: fp32 [N, J].
            pools: fp32 [C, I].
            positions: int64 [N].
        """
        indexer = self._indexer
        products = (queries @ pools.T).mul_(indexer.head_dim**-0.5).relu_()
        weights = weights * indexer.num_heads**-0.5
        scores = (weights.unsqueeze(1) @ products).squeeze(1)
        num_complete = (positions + 1) // indexer.pool_size
        is_complete = torch.arange(len(pools), device=pools.device) < num_complete[:, None]
        return scores.masked_fill_(~is_complete, -torch.inf)

    def _choose(self, scores: torch.Tensor, positions: torch.Tensor, num_keys: int) -> torch.Tensor:
        """Returns which of ``num_keys`` keys queries choose, [N, keys], some behind their own."""
        indexer = self._indexer
        best = scores.topk(indexer.num_chosen, dim=-1).indices
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
        is_chosen &= scores > -torch.inf
        num_complete = (positions + 1) // indexer.pool_size
        places = torch.arange(num_keys, device=scores.device)
        chosen = places >= num_complete[:, None] * indexer.pool_size
        num_pooled = scores.shape[1] * indexer.pool_size
        chosen[:, :num_pooled] |= is_chosen.repeat_interleave(indexer.pool_size, 1)
        return chosen

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        own = f"{prefix}.indexer"
        slots = {
            **super().weight_slots(prefix),
            **self.index_queries.part_slots(0, f"{own}.wq_b"),
            f"{own}.index_kpool_compress_ape": self.place_bias.data,
            f"{own}.index_kpool_compress_gate": self.gate.data,
            f"{own}.k_norm.weight": self.key_norm.data[0],
            f"{own}.k_norm.bias": self.key_norm.data[1],
        }
        for index, name in enumerate(self._inner_names):
            slots |= self.index_inputs.part_slots(index, f"{own}.{name}")
        return slots
