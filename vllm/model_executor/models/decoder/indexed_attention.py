"""Latent attention to chosen keys: an indexer ranks pools of consecutive tokens.

    index key   norm of a product of the token's input, turned where the layer knows positions
    pool key    of its tokens' index keys (``pool_keys``)
    score       sum over heads of weight * relu(index query . pool key)
    keys        the tokens of the highest complete pools, and all behind the last complete one

A query that sees no more complete pools than are chosen attends to all keys. Pools are of several
tokens in GLM 5.3 Flash and of one in DeepSeek V3.2 and GLM 5, which is every token by itself. Some
of a model's layers may have no indexer, and attend to what that of a layer below chooses: here they
rank once more, by what is kept there, and natively the choice itself is kept.
"""

from functools import partial

import torch
from typing_extensions import override

from vllm.exceptions import UnsupportedFeatureError
from vllm.model_executor.models.decoder.config import LayerPlan
from vllm.model_executor.models.decoder.indexer import Indexer
from vllm.model_executor.models.decoder.kv_cache import pool_keys_name
from vllm.model_executor.models.decoder.latent_attention import LatentAttention
from vllm.model_executor.models.decoder.pool_keys import TokenKeys
from vllm.model_executor.models.decoder.step import ModelParts, Step
from vllm.v1.attention.step_tables import (
    ChunkKeys,
    DecodeBatch,
    PaddedRows,
    PicksKeys,
)

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
        assert self.latent.indexer is not None
        self._plan = self.latent.indexer
        own = parts.within(f"{parts.make.prefix}indexer")
        owner = index if plan.index_owner is None else plan.index_owner
        self.indexer = Indexer(index, plan, self.latent, own) if owner == index else None
        self._keys_name = pool_keys_name(owner)
        self._is_asked = index in parts.config.index_owners
        # Keys of any indexer are read alike.
        self._read_keys = TokenKeys(owner, self._plan, own).read
        self._score_pools, self._select = parts.ops("index_scores"), parts.ops("select_entries")
        self._list = parts.ops("list_entries")

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
        queries = self._take(projected)
        if self._rope is not None:
            rows = self._turn(rows.unsqueeze(1), step).squeeze(1)
            queries = self._turn(queries, step)
        if self.indexer is None:
            ranked_by = step.shared[self._keys_name]
        else:
            ranked_by = self.indexer(x, projected, step)
        if self._is_asked:
            step.shared[self._keys_name] = ranked_by
        # One tensor a row, as attention's steps are handed on.
        packed = torch.cat([queries.flatten(1), ranked_by], 1)
        return self._map_found(self._attend_step(packed, rows, step))

    def _attend_all(
        self, queries: torch.Tensor, rows: torch.Tensor, step: Step, *, skips: bool
    ) -> torch.Tensor:
        """Returns [T, H, L + S] for what ``forward`` made of rows, [T, values], and their rows."""
        tables = step.meta.keys[step.meta.group_of[self._cache_name]]
        entries = step.meta.entries[step.meta.group_of[self._keys_name]]
        width = self.latent.latent_dim + self.latent.shared_dim
        output = queries.new_empty(len(queries), self._shape.num_heads, width)
        picked = tables.decodes if tables.picked is None else tables.picked
        decodes = zip(step.meta.decodes, picked, entries.decode_reads, strict=True)
        for decode, keys, reads in decodes:
            decode.put(self._attend_batch(decode, keys, reads, queries, rows, step), output)
        chunks = zip(step.meta.chunks, tables.chunks, entries.chunk_reads, strict=True)
        for chunk, chunk_keys, found in chunks:
            part, skip = chunk.rows, chunk.num_unwanted if skips else 0
            if skip < chunk.num_tokens:
                wanted, pools = queries[part][skip:], None
                if found.blocks.shape[0] > self._plan.num_chosen:
                    pools = self._read_keys(found, step)
                own = self._join_rows(chunk_keys, rows[part], queries.dtype, step)
                positions = torch.arange(len(own) - len(wanted), len(own), device=rows.device)
                output[part][skip:] = self._attend_request(wanted, own, pools, positions)
        return output

    def _attend_batch(
        self,
        decode: DecodeBatch,
        tables: PicksKeys,
        reads: PaddedRows,
        queries: torch.Tensor,
        rows: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        """Attends the queries of a decode batch: [B, Q, H, L + S].

        Every query has keys of its own, in an order that the batch does not change:

            | behind its last complete pool | of pools that it sees, as they follow | of no pool |
        """
        size, heads = self._plan.pool_size, self._shape.num_heads
        positions = decode.take(step.positions)
        by_head, index_queries, weights = self._split_packed(decode.take(queries))
        pools, are_seen = self._list_pools(reads, index_queries, weights, positions, step)
        within = torch.arange(size, device=positions.device)
        own = ((positions + 1) // size * size).unsqueeze(-1) + within
        places = torch.cat([own, (pools.unsqueeze(-1) * size + within).flatten(2)], -1)
        at = positions.unsqueeze(-1)
        seen = torch.cat([own <= at, are_seen.repeat_interleave(size, -1)], -1)
        # In place of others stands the query's own row, which is there.
        places = torch.where(seen, places, at)
        read = partial(self._read, step=step, dtype=rows.dtype)
        picked = tables.pick_rows(places.flatten(1), decode.take(rows), read)
        keys = picked.view(-1, places.shape[-1], picked.shape[-1])
        mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
        # All heads attend to the same keys: they are a query's rows.
        taken = by_head.flatten(0, 1).unsqueeze(1)
        mask = mask.view(len(keys), 1, 1, -1)
        mask = mask.expand(-1, -1, heads, -1)
        keys = keys.unsqueeze(1)
        found, _ = self._attend(taken, keys, keys, mask, False, *self._score_args)
        attended: torch.Tensor = found.view(by_head.shape)
        return attended

    def _list_pools(
        self,
        reads: PaddedRows,
        queries: torch.Tensor,
        weights: torch.Tensor,
        positions: torch.Tensor,
        step: Step,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the pools of each query, ascending, int64 [B, Q, N], and which of them it sees.

        Args:
            reads: The pools of the requests.
            queries: fp32 [B, Q, J, I].
            weights: fp32 [B, Q, J].
            positions: int64 [B, Q].
            step: The step.
        """
        indexer, num_pools = self._plan, reads.source.blocks.shape[1]
        numbers = torch.arange(num_pools, device=positions.device)
        is_complete = numbers < ((positions + 1) // indexer.pool_size).unsqueeze(-1)
        if num_pools <= indexer.num_chosen:
            return numbers.expand(is_complete.shape), is_complete
        weights = weights * (indexer.head_dim * indexer.num_heads) ** -0.5
        scores = self._score_pools(queries, self._read_keys(reads.source, step), weights)
        scores = scores.masked_fill(~is_complete, -torch.inf)
        listed = self._list(self._select(scores, indexer.num_chosen), indexer.num_chosen)
        # Where too few are complete, others were chosen as fill.
        return listed, is_complete.gather(2, listed)

    def _split_packed(
        self, packed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries [..., H, L + S], and fp32 [..., J, I] and [..., J] of the indexer."""
        indexer, latent = self._plan, self.latent
        heads, width = self._shape.num_heads, latent.latent_dim + latent.shared_dim
        sizes = [heads * width, indexer.num_heads * indexer.head_dim, indexer.num_heads]
        queries, index_queries, weights = torch.split(packed, sizes, -1)
        index_queries = index_queries.float()
        return (
            queries.view(*queries.shape[:-1], heads, width),
            index_queries.view(*weights.shape, indexer.head_dim),
            weights.float(),
        )

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
        queries, index_queries, weights = self._split_packed(packed)
        by_head, keys = queries.transpose(0, 1), rows[None, None]
        outputs = []
        for first in range(0, len(packed), _TILE):
            tile = slice(first, first + _TILE)
            seen = torch.arange(len(rows), device=rows.device) <= positions[tile, None]
            if pools is not None:
                scores = self._score(index_queries[tile], weights[tile], pools, positions[tile])
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
        indexer = self._plan
        products = (queries @ pools.T).mul_(indexer.head_dim**-0.5).relu_()
        weights = weights * indexer.num_heads**-0.5
        scores = (weights.unsqueeze(1) @ products).squeeze(1)
        num_complete = (positions + 1) // indexer.pool_size
        is_complete = torch.arange(len(pools), device=pools.device) < num_complete[:, None]
        return scores.masked_fill_(~is_complete, -torch.inf)

    def _choose(self, scores: torch.Tensor, positions: torch.Tensor, num_keys: int) -> torch.Tensor:
        """Returns which of ``num_keys`` keys queries choose, [N, keys], some behind their own."""
        indexer = self._plan
        is_chosen = self._select(scores, indexer.num_chosen) & (scores > -torch.inf)
        num_complete = (positions + 1) // indexer.pool_size
        places = torch.arange(num_keys, device=scores.device)
        chosen = places >= num_complete[:, None] * indexer.pool_size
        num_pooled = scores.shape[1] * indexer.pool_size
        chosen[:, :num_pooled] |= is_chosen.repeat_interleave(indexer.pool_size, 1)
        return chosen

    @override
    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        slots = super().weight_slots(prefix)
        return slots if self.indexer is None else slots | self.indexer.weight_slots(prefix)
