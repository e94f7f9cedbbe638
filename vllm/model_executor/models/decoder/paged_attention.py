"""Attention over paged rows of the step's tokens and those before, however rows become keys."""

from abc import abstractmethod

import torch
from torch import nn

from vllm.model_executor.models.decoder.config import LayerPlan
from vllm.model_executor.models.decoder.kv_cache import cache_name
from vllm.model_executor.models.decoder.step import ModelParts, Step
from vllm.v1.attention.ops.int8_rows import Int8Rows
from vllm.v1.attention.step_tables import ChunkKeys, DecodeBatch, DecodeKeys, PageRows

Attended = tuple[torch.Tensor, torch.Tensor]


class PagedAttention(nn.Module):
    """Writes a layer's rows to its cache and attends queries to them.

    Letters: T rows, H query heads in K groups of G, d values per head, W values of a cached row.

    Args:
        index: The layer.
        plan: Its window, heads and rotary setting.
        parts: What to build from, within the layer's ``self_attn``.
    """

    def __init__(self, index: int, plan: LayerPlan, parts: ModelParts) -> None:
        super().__init__()
        make, ops, config = parts.make, parts.ops, parts.config
        self._shape = shape = config.shape_of(plan).for_ranks(make.group.size)
        owner = index if plan.kv_owner is None else plan.kv_owner
        self._cache_name = cache_name(owner)
        # In bytes there are keys and values of heads, never latents.
        self._coded_rows = Int8Rows(2 * shape.num_kv_heads, shape.head_dim)
        self._is_shared = owner in config.shared_owners
        self._narrows = index == config.last_owner
        self._sees_both_ways, self._window = config.sees_both_ways, plan.window
        self._num_groups = shape.num_heads // shape.num_kv_heads
        self.sinks = (
            make.parameter(shape.num_heads, dtype=torch.float32) if shape.has_sinks else None
        )
        self._write_rows, self._read_rows = ops("write_rows"), ops("read_rows")
        self._round_rows = ops("round_rows")
        self._attend, self._join = ops("attend_keys"), ops("join_attention")
        self._weigh_sinks = ops("weigh_sinks")

    @abstractmethod
    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""

    @abstractmethod
    def _split_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values [..., K, d] of rows [..., W]."""

    def _attend_step(
        self, queries: torch.Tensor, rows: torch.Tensor | None, step: Step
    ) -> torch.Tensor:
        """Returns attention's output [T, H, d] for queries [T, H, d]; writes the layer's cache.

        The last layer with a cache and those above give the step's wanted rows alone, and those
        above take no others.

        Args:
            queries: Of all rows that the layer takes.
            rows: What to cache of each, [T, W]; None: the layer reads another one's.
            step: The step.
        """
        if self._sees_both_ways:
            assert rows is not None, "every layer has keys of its own"
            return self._attend_prompts(queries, rows, step)
        pages = step.meta.pages
        is_owner = rows is not None
        # Every write of the layer comes before any read from its pages.
        if rows is None:
            rows = step.shared[self._cache_name]
        elif pages is None:
            rows = self._store(rows, step)
        if self._is_shared:
            step.shared[self._cache_name] = rows
        if pages is None:
            return self._attend_wanted(queries, rows, step)
        latent = self._shape.latent
        attended: torch.Tensor = pages.attend(
            self._cache_name,
            queries,
            rows,
            self.sinks,
            *self._score_args,
            latent_dim=0 if latent is None else latent.latent_dim,
            is_owner=is_owner,
        )
        return attended

    def _attend_prompts(
        self, queries: torch.Tensor, rows: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """Attends the queries of whole prompts to all their rows; nothing is cached or read."""
        output = torch.empty_like(queries)
        for prompt in step.prompts:
            own = rows[prompt]
            split = queries[prompt].view(len(own), self._shape.num_kv_heads, self._num_groups, -1)
            mask = both_ways_mask(len(own), self._window, own.device)
            attended = self._attend_rows(split.permute(1, 2, 0, 3), own, mask, False)
            output[prompt] = self._finish(attended, None).permute(2, 0, 1, 3).flatten(1, 2)
        narrows = self._narrows and step.wanted is not None
        return output[step.wanted] if narrows else output

    def _attend_wanted(self, queries: torch.Tensor, rows: torch.Tensor, step: Step) -> torch.Tensor:
        """Attends the wanted rows' queries where the layer narrows or is above one that did."""
        wanted = step.wanted
        if wanted is None or not (self._narrows or step.is_narrow):
            return self._attend_all(queries, rows, step, skips=False)
        if step.is_narrow:
            # Tables index all rows; the others' memory is never touched.
            spread = queries.new_empty(len(rows), *queries.shape[1:])
            spread[wanted] = queries
            queries = spread
        return self._attend_all(queries, rows, step, skips=True)[wanted]

    def _store(self, rows: torch.Tensor, step: Step) -> torch.Tensor:
        """Writes the step's rows; returns them as a later step will read them."""
        cache = step.kv_caches[self._cache_name]
        writes = step.meta.keys[step.meta.group_of[self._cache_name]].writes
        is_coded = cache.dtype == torch.int8
        stored = self._coded_rows.encode(rows) if is_coded else rows
        kept = stored if writes.sources is None else stored[writes.sources]
        self._write_rows(cache, writes.target.blocks, writes.target.rows, kept)
        if is_coded:
            return self._coded_rows.decode(stored, rows.dtype)
        rounded: torch.Tensor = self._round_rows(cache, rows)
        return rounded

    def _read(self, source: PageRows, step: Step, dtype: torch.dtype) -> torch.Tensor:
        cache = step.kv_caches[self._cache_name]
        if cache.dtype == torch.int8:
            coded = self._read_rows(cache, source.blocks, source.rows, cache.dtype)
            return self._coded_rows.decode(coded, dtype)
        rows: torch.Tensor = self._read_rows(cache, source.blocks, source.rows, dtype)
        return rows

    def _attend_all(
        self, queries: torch.Tensor, rows: torch.Tensor, step: Step, *, skips: bool
    ) -> torch.Tensor:
        """Returns [T, H, d] for queries [T, H, d] and the step's own rows [T, W].

        Args:
            queries: Of all rows.
            rows: Of all rows.
            step: The step.
            skips: Whether rows of chunks that nobody wants are left undefined.
        """
        tables = step.meta.keys[step.meta.group_of[self._cache_name]]
        decodes = step.meta.decodes
        if len(decodes) == 1 and decodes[0].rows is None:
            only = self._attend_decodes(decodes[0], tables.decodes[0], queries, rows, step)
            return only.flatten(0, 1)
        output = torch.empty_like(queries)
        for decode, keys in zip(decodes, tables.decodes, strict=True):
            decode.put(self._attend_decodes(decode, keys, queries, rows, step), output)
        for chunk, chunk_keys in zip(step.meta.chunks, tables.chunks, strict=True):
            part, skip = chunk.rows, chunk.num_unwanted if skips else 0
            if skip < chunk.num_tokens:
                own = rows[part]
                attended = self._attend_chunk(chunk_keys, queries[part][skip:], own, skip, step)
                output[part][skip:] = attended
        return output

    def _attend_decodes(
        self,
        decode: DecodeBatch,
        tables: DecodeKeys,
        queries: torch.Tensor,
        rows: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        """Attends the queries of a decode batch: [B, Q, H, d]."""
        shape, num_groups = self._shape, self._num_groups
        taken = decode.take(queries)
        stored = self._read(tables.source, step, queries.dtype)
        if not tables.has_own:
            stored = torch.cat([stored, decode.take(rows)], 1)
        num_requests, num_queries = taken.shape[:2]
        # A key head's query heads and queries become one axis: each reads the same keys.
        split = taken.view(num_requests, num_queries, shape.num_kv_heads, num_groups, -1)
        merged = split.permute(0, 2, 3, 1, 4).flatten(2, 3)
        keys, values = self._split_rows(stored)
        mask = tables.mask
        if mask is not None and num_queries > 1:
            mask = mask.unsqueeze(2).expand(-1, -1, num_groups, -1, -1).flatten(2, 3)
        sinks: torch.Tensor | None = None
        if self.sinks is not None:
            sinks = self.sinks.view(shape.num_kv_heads, num_groups, 1)
            sinks = sinks.expand(-1, -1, num_queries).flatten(1)
        attended = self._attend(
            merged, keys.transpose(1, 2), values.transpose(1, 2), mask, False, *self._score_args
        )
        output = self._finish(attended, sinks)
        split = output.view(num_requests, shape.num_kv_heads, num_groups, num_queries, -1)
        return split.permute(0, 3, 1, 2, 4).flatten(2, 3)

    def _attend_chunk(
        self, tables: ChunkKeys, queries: torch.Tensor, rows: torch.Tensor, skip: int, step: Step
    ) -> torch.Tensor:
        """Attends one request's queries [N, H, d] to what is stored and to its own rows.

        Args:
            tables: Its tables.
            queries: Those behind the first ``skip`` rows.
            rows: All N + skip of the chunk.
            skip: Rows without a query.
            step: The step.
        """
        shape = self._shape
        # Each key head is a batch of its own, its keys shared by G heads.
        split = queries.view(len(queries), shape.num_kv_heads, self._num_groups, -1)
        by_head = split.permute(1, 2, 0, 3)
        sinks = None
        if self.sinks is not None:
            sinks = self.sinks.view(shape.num_kv_heads, self._num_groups, 1)
        if tables.kept is not None:
            # These were computed without all they depend on; what is stored is right.
            stored = self._read(tables.kept, step, queries.dtype)
            rows = torch.cat([stored, rows[len(stored) :]])
        prior = None
        if tables.prior.blocks.numel():
            prior = self._read(tables.prior, step, queries.dtype)
        if tables.tiles:
            output = self._attend_tiles(tables, by_head, rows, skip, prior, sinks)
        else:
            if skip:
                seen, rows = rows[:skip], rows[skip:]
                prior = seen if prior is None else torch.cat([prior, seen])
            attended = self._attend_rows(by_head, rows, None, True)
            if prior is not None:
                attended = self._join(self._attend_rows(by_head, prior, None, False), attended)
            output = self._finish(attended, sinks)
        return output.permute(2, 0, 1, 3).flatten(1, 2)

    def _attend_tiles(
        self,
        tables: ChunkKeys,
        queries: torch.Tensor,
        rows: torch.Tensor,
        skip: int,
        prior: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attends queries [K, G, N, d], those behind the first ``skip`` rows, tile by tile."""
        local = rows if prior is None else torch.cat([prior, rows])
        output = torch.empty_like(queries)
        for tile in tables.tiles:
            first, last = max(tile.queries.start, skip), tile.queries.stop
            if first >= last:
                continue
            mask = tile.mask[first - tile.queries.start :]
            own = slice(first - skip, last - skip)
            attended = self._attend_rows(
                queries[:, :, own], local[tile.keys], mask[None, None], False
            )
            output[:, :, own] = self._finish(attended, sinks)
        return output

    def _attend_rows(
        self, queries: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
    ) -> Attended:
        """Attends queries [K, G, N, d] to rows [L, W]."""
        keys, values = (part.transpose(0, 1).unsqueeze(1) for part in self._split_rows(rows))
        attended: Attended = self._attend(queries, keys, values, mask, is_causal, *self._score_args)
        return attended

    def _finish(self, attended: Attended, sinks: torch.Tensor | None) -> torch.Tensor:
        output, log_sums = attended
        if sinks is None:
            return output
        weighed: torch.Tensor = self._weigh_sinks(output, log_sums, sinks)
        return weighed

    @property
    def _score_args(self) -> tuple[float, float]:
        return self._shape.scale, self._shape.soft_cap


def both_ways_mask(num_tokens: int, window: int, device: torch.device) -> torch.Tensor | None:
    """Returns which tokens of a prompt see each other: those less than ``window`` apart.

    Args:
        num_tokens: N, of the prompt.
        window: 0: all.
        device: Where the mask is.

    Returns:
        fp32 [1, 1, N, N], 0 or -inf; None: all do.
    """
    if not window or num_tokens <= window:
        return None
    places = torch.arange(num_tokens, device=device)
    is_far = (places.unsqueeze(1) - places).abs() >= window
    mask = torch.zeros(num_tokens, num_tokens, device=device)
    return mask.masked_fill_(is_far, float("-inf"))[None, None]
