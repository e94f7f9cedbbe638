"""Latent attention to chosen keys: an indexer ranks pools of consecutive tokens (GLM 5.3 Flash).

    row         [ latent | index key | gate ]                    what is cached of a token
    pool key    sum over its tokens of softmax(gate + bias of its place) * index key, by channel
    score       sum over heads of weight * relu(index query . pool key)
    keys        the tokens of the highest complete pools, and all behind the last complete one

A query that sees no more complete pools than are chosen attends to all keys. A row keeps what a
pool is made of, not the pool, so no state of an open pool has to be kept: any token is a boundary.
"""

import torch
from torch.nn.functional import layer_norm

from vllm.exceptions import UnsupportedFeatureError
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.decoder.config import LayerPlan
from vllm.model_executor.models.decoder.latent_attention import LatentAttention
from vllm.model_executor.models.decoder.step import ModelParts, Step
from vllm.v1.attention.step_tables import ChunkKeys, DecodeBatch, DecodeKeys

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
        self._linear = parts.ops("linear")

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Maps the normed input [T, D] to the output [T, D]; writes the layer's cache.

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
        keys = layer_norm(keys.float(), weight.shape, weight, bias, _NORM_EPS).to(x.dtype)
        rows = torch.cat([rows, keys, self._linear(x, self.gate)], -1)
        # One tensor a row, as attention's steps are handed on.
        parts = (self._take(projected).flatten(1), self.index_queries(projected), weights)
        return self._map_found(self._attend_step(torch.cat(parts, 1), rows, step))

    def _attend_all(
        self, queries: torch.Tensor, rows: torch.Tensor, step: Step, *, skips: bool
    ) -> torch.Tensor:
        """Returns [T, H, L + S] for what ``forward`` made of rows, [T, values], and their rows."""
        tables = step.meta.keys[step.meta.group_of[self._cache_name]]
        width = self.latent.latent_dim + self.latent.shared_dim
        output = queries.new_empty(len(queries), self._shape.num_heads, width)
        for decode, keys in zip(step.meta.decodes, tables.decodes, strict=True):
            decode.put(self._attend_decodes(decode, keys, queries, rows, step), output)
        for chunk, chunk_keys in zip(step.meta.chunks, tables.chunks, strict=True):
            part, skip = chunk.rows, chunk.num_unwanted if skips else 0
            if skip < chunk.num_tokens:
                wanted = queries[part][skip:]
                output[part][skip:] = self._attend_chunk(chunk_keys, wanted, rows[part], skip, step)
        return output

    def _attend_decodes(
        self,
        decode: DecodeBatch,
        tables: DecodeKeys,
        queries: torch.Tensor,
        rows: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        """Attends the queries of a decode batch: [B, Q, H, L + S]."""
        taken, own = decode.take(queries), decode.take(rows)
        stored = self._read(tables.source, step, queries.dtype)
        num_stored = stored.shape[1]
        outputs = []
        for index, positions in enumerate(decode.take(step.positions)):
            # Padding repeats the last query; a request's rows are the last ones of those read.
            first, end = int(positions[0]), int(positions[-1]) + 1
            if tables.has_own:
                keys = stored[index, num_stored - end :]
            else:
                keys = torch.cat([stored[index, num_stored - first :], own[index, : end - first]])
            outputs.append(self._attend_request(taken[index], keys, positions))
        return torch.stack(outputs)

    def _attend_chunk(
        self, tables: ChunkKeys, queries: torch.Tensor, rows: torch.Tensor, skip: int, step: Step
    ) -> torch.Tensor:
        """As ``PagedAttention``'s, for what ``forward`` made of rows; gives [N, H, L + S]."""
        if tables.kept is not None:
            stored = self._read(tables.kept, step, queries.dtype)
            rows = torch.cat([stored, rows[len(stored) :]])
        num_prior = tables.prior.blocks.numel()
        if num_prior:
            rows = torch.cat([self._read(tables.prior, step, queries.dtype), rows])
        positions = torch.arange(len(rows) - len(queries), len(rows), device=rows.device)
        return self._attend_request(queries, rows, positions)

    def _attend_request(
        self, packed: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Attends one request's queries at int64 positions [N] to its rows from the first on."""
        indexer, latent = self._indexer, self.latent
        heads, width = self._shape.num_heads, latent.latent_dim + latent.shared_dim
        sizes = [heads * width, indexer.num_heads * indexer.head_dim, indexer.num_heads]
        queries, index_queries, weights = torch.split(packed, sizes, -1)
        by_head = queries.view(len(packed), heads, width).transpose(0, 1)
        keys = rows[None, None, :, :width]
        pools = None
        if len(rows) // indexer.pool_size > indexer.num_chosen:
            pools = self._make_pools(rows[:, width:].float())
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

    def _make_pools(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the keys of complete pools, fp32 [C, I], of index keys and gates [K, 2 * I]."""
        size = self._indexer.pool_size
        complete = rows[: len(rows) // size * size].view(-1, size, 2, self._indexer.head_dim)
        shares = (complete[:, :, 1] + self.place_bias).softmax(1)
        return (complete[:, :, 0] * shares).sum(1)

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
