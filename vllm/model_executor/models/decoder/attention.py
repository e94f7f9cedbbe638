"""Grouped-query attention over paged keys and values, with windows, sinks and soft caps."""

import torch
from torch import nn

from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models.decoder.config import LayerPlan
from vllm.model_executor.models.decoder.kv_cache import cache_name
from vllm.model_executor.models.decoder.rope_config import RopeConfig
from vllm.model_executor.models.decoder.step import ModelParts, Step
from vllm.v1.attention.step_tables import ChunkKeys, DecodeBatch, DecodeKeys, PageRows

Attended = tuple[torch.Tensor, torch.Tensor]


class DecoderAttention(nn.Module):
    """Attention of one layer.

    Letters: T rows, H query heads in K groups of G, d values per head; a cached row is keys then
    values of K heads. Of several ranks each has its own H and K, and sums the output. A layer that
    attends to another's keys and values makes queries alone.

    Args:
        index: The layer.
        plan: Its window, heads and rotary setting.
        parts: What to build from, within the layer's ``self_attn``.
    """

    def __init__(self, index: int, plan: LayerPlan, parts: ModelParts) -> None:
        super().__init__()
        make, ops, config = parts.make, parts.ops, parts.config
        whole = config.shape_of(plan)
        self._shape = shape = whole.for_ranks(make.group.size)
        self._has_own = plan.kv_owner is None
        owner = index if plan.kv_owner is None else plan.kv_owner
        self._cache_name = cache_name(owner)
        self._is_shared = owner in config.shared_owners
        self._narrows = index == config.last_owner
        self._rope = plan.rope
        self._norm_plan = config.norm
        self._num_groups = shape.num_heads // shape.num_kv_heads
        kv_size = shape.num_kv_heads * shape.head_dim
        num_products = 0 if not self._has_own else 1 if shape.has_one_product else 2
        # A gated head is projected with its gate behind it.
        per_head = shape.head_dim * (2 if shape.has_output_gate else 1)
        sizes = (shape.num_heads * per_head, *[kv_size] * num_products)
        self._names = ("q_proj", "k_proj", "v_proj")[: len(sizes)]
        self.qkv = MergedColumnParallelLinear(config.hidden_size, sizes, make, self._names)
        self.qkv_bias = make.parameter(sum(sizes)) if shape.has_qkv_bias else None
        self.output = RowParallelLinear(
            "num_attention_heads * head_dim",
            whole.num_heads * whole.head_dim,
            config.hidden_size,
            make,
            "o_proj",
        )
        self.output_bias = make.parameter(config.hidden_size) if shape.has_output_bias else None
        # One norm serves queries and keys: row 0 for query heads, row 1 for key heads.
        self.qk_norm = (
            make.parameter(1 + self._has_own, shape.head_dim) if shape.has_qk_norm else None
        )
        is_key = [0] * shape.num_heads + [1] * (shape.num_kv_heads if self._has_own else 0)
        self._norm_of_head = torch.tensor(is_key, device=make.device)
        self._plain_norm = torch.full(
            (shape.head_dim,),
            0.0 if self._norm_plan.has_offset else 1.0,
            dtype=make.dtype,
            device=make.device,
        )
        self.sinks = (
            make.parameter(shape.num_heads, dtype=torch.float32) if shape.has_sinks else None
        )
        self._norm = ops("rms_norm_offset" if self._norm_plan.has_offset else "rms_norm")
        self._rotate = ops("rotate_halves")
        self._write_rows, self._read_rows = ops("write_rows"), ops("read_rows")
        self._round_rows = ops("round_rows")
        self._attend, self._join = ops("attend_keys"), ops("join_attention")
        self._weigh_sinks, self._gate_heads = ops("weigh_sinks"), ops("gate_heads")

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Maps the normed input [T, D] to the output [T, D]; writes the layer's cache, if any.

        The last layer with a cache and those above give the step's wanted rows alone, and those
        above take no others.
        """
        product = self.qkv(x)
        if self.qkv_bias is not None:
            product += self.qkv_bias
        gates: torch.Tensor | None = None
        if self._shape.has_output_gate:
            product, gates = self._take_gates(product)
        queries, rows = self._prepare(product, step)
        pages = step.meta.pages
        # Every write of the layer comes before any read from its pages.
        if rows is None:
            rows = step.shared[self._cache_name]
        elif pages is None:
            rows = self._store(rows, step)
        if self._is_shared:
            step.shared[self._cache_name] = rows
        if pages is not None:
            attended = pages.attend(self._cache_name, queries, rows, self.sinks, *self._score_args)
        else:
            attended = self._attend_wanted(queries, rows, step)
        if gates is not None:
            if self._narrows and step.wanted is not None:
                gates = gates[step.wanted]
            attended = self._gate_heads(attended, gates)
        output: torch.Tensor = self.output(attended.flatten(1))
        if self.output_bias is not None:
            output += self.output_bias
        return output

    def _take_gates(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the projections without gates, and the gates [T, H, d]."""
        shape = self._shape
        width = 2 * shape.num_heads * shape.head_dim
        pairs = qkv[:, :width].view(-1, shape.num_heads, 2, shape.head_dim)
        return torch.cat([pairs[:, :, 0].flatten(1), qkv[:, width:]], 1), pairs[:, :, 1]

    def _turn(self, heads: torch.Tensor, rope: RopeConfig, step: Step) -> torch.Tensor:
        """Turns heads to their positions: all of each, or its first values."""
        turned: torch.Tensor
        if rope.dim == heads.shape[-1]:
            turned = self._rotate(heads, *step.turns[rope])
            return turned
        turned = self._rotate(heads[..., : rope.dim].contiguous(), *step.turns[rope])
        return torch.cat([turned, heads[..., rope.dim :]], -1)

    def _prepare(
        self, product: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns normed and turned queries [T, H, d], and the rows to cache of a layer that has
        a cache."""
        shape, eps = self._shape, self._norm_plan.eps
        num_turned = shape.num_heads + (shape.num_kv_heads if self._has_own else 0)
        heads = product[:, : num_turned * shape.head_dim].view(-1, num_turned, shape.head_dim)
        values = product[:, num_turned * shape.head_dim :]
        if self._has_own and shape.has_one_product:
            values = heads[:, shape.num_heads :].flatten(1)
        if self.qk_norm is not None:
            heads = self._norm(heads, self.qk_norm[self._norm_of_head], eps)
        if self._rope is not None:
            heads = self._turn(heads, self._rope, step)
        queries = heads[:, : shape.num_heads]
        if not self._has_own:
            return queries, None
        if shape.has_value_norm:
            by_head = values.view(-1, shape.num_kv_heads, shape.head_dim)
            values = self._norm(by_head, self._plain_norm, eps).flatten(1)
        return queries, torch.cat([heads[:, shape.num_heads :].flatten(1), values], 1)

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
        kept = rows if writes.sources is None else rows[writes.sources]
        self._write_rows(cache, writes.target.blocks, writes.target.rows, kept)
        rounded: torch.Tensor = self._round_rows(cache, rows)
        return rounded

    def _read(self, source: PageRows, step: Step, dtype: torch.dtype) -> torch.Tensor:
        cache = step.kv_caches[self._cache_name]
        rows: torch.Tensor = self._read_rows(cache, source.blocks, source.rows, dtype)
        return rows

    def _attend_all(
        self, queries: torch.Tensor, rows: torch.Tensor, step: Step, *, skips: bool
    ) -> torch.Tensor:
        """Returns [T, H, d] for queries [T, H, d] and the step's own rows [T, 2 * K * d].

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
        """Attends queries [K, G, N, d] to rows [L, 2 * K * d]."""
        keys, values = (part.transpose(0, 1).unsqueeze(1) for part in self._split_rows(rows))
        attended: Attended = self._attend(queries, keys, values, mask, is_causal, *self._score_args)
        return attended

    def _finish(self, attended: Attended, sinks: torch.Tensor | None) -> torch.Tensor:
        output, log_sums = attended
        if sinks is None:
            return output
        weighed: torch.Tensor = self._weigh_sinks(output, log_sums, sinks)
        return weighed

    def _split_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values [..., K, d] of rows [..., 2 * K * d]."""
        shape = self._shape
        both = rows.view(*rows.shape[:-1], 2, shape.num_kv_heads, shape.head_dim)
        return both[..., 0, :, :], both[..., 1, :, :]

    @property
    def _score_args(self) -> tuple[float, float]:
        return self._shape.scale, self._shape.soft_cap

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        slots = self.output.weight_slots(f"{prefix}.o_proj")
        biases: tuple[torch.Tensor, ...] = ()
        if self.qkv_bias is not None:
            biases = torch.split(self.qkv_bias.data, list(self.qkv.out_sizes))
        for index, name in enumerate(self._names):
            slots |= self.qkv.part_slots(index, f"{prefix}.{name}")
            if biases:
                slots[f"{prefix}.{name}.bias"] = biases[index]
        if self.output_bias is not None:
            slots[f"{prefix}.o_proj.bias"] = self.output_bias.data
        if self.qk_norm is not None:
            slots[f"{prefix}.q_norm.weight"] = self.qk_norm.data[0]
            if self._has_own:
                slots[f"{prefix}.k_norm.weight"] = self.qk_norm.data[1]
        if self.sinks is not None:
            slots[f"{prefix}.sinks"] = self.sinks.data
        return slots
