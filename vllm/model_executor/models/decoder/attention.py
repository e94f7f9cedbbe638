"""Grouped-query attention over paged keys and values, with windows, sinks and soft caps."""

from collections.abc import Mapping

import torch
from typing_extensions import override

from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models.decoder.config import LayerPlan
from vllm.model_executor.models.decoder.paged_attention import PagedAttention
from vllm.model_executor.models.decoder.rope_config import RopeConfig
from vllm.model_executor.models.decoder.step import ModelParts, Step


class DecoderAttention(PagedAttention):
    """Attention of one layer.

    Letters: T rows, H query heads in K groups of G, d values per head; a cached row is keys then
    values of K heads. Of several ranks each has its own H and K, and sums the output. A layer that
    attends to another's keys and values makes queries alone.

    Args:
        index: The layer.
        plan: Its window, heads and rotary setting.
        parts: What to build from, within the layer's ``self_attn``.

    Attributes:
        key_sizes: fp32 [K, d], powers of two that keys are divided by where they are stored, and
            queries multiplied by; None: neither is.
        noted_queries: fp32 [T, H, d], where a step's queries are noted as they meet keys; None:
            they are not.
    """

    def __init__(self, index: int, plan: LayerPlan, parts: ModelParts) -> None:
        super().__init__(index, plan, parts)
        make, ops, config = parts.make, parts.ops, parts.config
        whole, shape = config.shape_of(plan), self._shape
        self._has_own = plan.kv_owner is None
        self._rope = plan.rope
        self._norm_plan = config.norm
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
        self.key_sizes: torch.Tensor | None = None
        self.noted_queries: torch.Tensor | None = None
        # One norm serves queries and keys: row 0 for query heads, row 1 for key heads.
        has_whole = shape.norms_whole_rows
        self.qk_norm = (
            make.parameter(1 + self._has_own, shape.head_dim)
            if shape.has_qk_norm and not has_whole
            else None
        )
        self.row_norms = (
            [make.parameter(size) for size in sizes[: 1 + self._has_own]] if has_whole else []
        )
        is_key = [0] * shape.num_heads + [1] * (shape.num_kv_heads if self._has_own else 0)
        self._norm_of_head = torch.tensor(is_key, device=make.device)
        self._plain_norm = torch.full(
            (shape.head_dim,),
            0.0 if self._norm_plan.has_offset else 1.0,
            dtype=make.dtype,
            device=make.device,
        )
        self._norm = ops("rms_norm_offset" if self._norm_plan.has_offset else "rms_norm")
        self._rotate = ops("rotate_halves")
        self._gate_heads = ops("gate_heads")

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
        attended = self._attend_step(queries, rows, step)
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
        if self.row_norms:
            sizes = [len(weight) for weight in self.row_norms]
            rows = zip(torch.split(heads.flatten(1), sizes, 1), self.row_norms, strict=True)
            heads = torch.cat([self._norm(row, own, eps) for row, own in rows], 1).view_as(heads)
        if self._rope is not None:
            heads = self._turn(heads, self._rope, step)
        queries = heads[:, : shape.num_heads]
        if shape.position_beta:
            queries = queries * self._scale_positions(step)
        if self.noted_queries is not None:
            self.noted_queries[: len(queries)] = queries
        keys = heads[:, shape.num_heads :]
        if self.key_sizes is not None:
            queries = queries * self.key_sizes.repeat_interleave(self._num_groups, 0)
            keys = keys / self.key_sizes
        if not self._has_own:
            return queries, None
        if shape.has_value_norm:
            by_head = values.view(-1, shape.num_kv_heads, shape.head_dim)
            values = self._norm(by_head, self._plain_norm, eps).flatten(1)
        return queries, torch.cat([keys.flatten(1), values], 1)

    def put_key_sizes(self, sizes: Mapping[str, torch.Tensor]) -> None:
        """Has keys stored divided by the sizes of their cache, by its name."""
        own = sizes.get(self._cache_name)
        self.key_sizes = None if own is None else own.to(self._plain_norm)

    def note_queries(self, num_tokens: int) -> tuple[str, torch.Tensor]:
        """Has the next step's queries noted, as kernels bound from now on do, too.

        Args:
            num_tokens: Of that step.

        Returns:
            The name of the cache whose keys they meet, and where they are noted, by key head:
            [T, K, G, d].
        """
        shape = self._shape
        by_key_head = torch.zeros(
            (num_tokens, shape.num_kv_heads, self._num_groups, shape.head_dim),
            dtype=torch.float32,
            device=self._plain_norm.device,
        )
        self.noted_queries = by_key_head.flatten(1, 2)
        return self._cache_name, by_key_head

    def forget_queries(self) -> None:
        """Has queries noted no longer."""
        self.noted_queries = None

    def restore_rows(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns keys and values [..., 2 * K * d] of rows as the layer's cache has them."""
        if stored.dtype != torch.int8:
            return stored.to(dtype)
        rows = self._coded_rows.decode(stored, dtype)
        if self.key_sizes is not None:
            sizes = self.key_sizes.flatten().to(dtype)
            rows[..., : len(sizes)] *= sizes
        return rows

    def _scale_positions(self, step: Step) -> torch.Tensor:
        """Returns what the queries of each row are multiplied by, [T, 1, 1]."""
        positions = step.positions
        if step.is_narrow and step.wanted is not None:
            positions = positions[step.wanted]
        periods = positions.div(self._shape.position_length, rounding_mode="floor").float()
        factors = 1.0 + self._shape.position_beta * torch.log1p(periods)
        return factors.to(self._plain_norm.dtype).view(-1, 1, 1)

    @override
    def _split_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self._shape
        both = rows.view(*rows.shape[:-1], 2, shape.num_kv_heads, shape.head_dim)
        return both[..., 0, :, :], both[..., 1, :, :]

    @override
    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
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
        for name, weight in zip(("q_norm", "k_norm"), self.row_norms, strict=False):
            slots[f"{prefix}.{name}.weight"] = weight.data
        if self.sinks is not None:
            slots[f"{prefix}.sinks"] = self.sinks.data
        return slots
