"""Attention whose keys and values are products of one latent row a token (MLA).

    row      [ norm(latent) | shared ]                what is cached
    key      [ Wk latent | shared ]  of each head
    score    q . key  =  [ Wk^T q_own | q_shared ] . row
    output   sum of weights * Wv latent  =  Wv (sum of weights * row's latent)

Queries are taken to the row's space, where all heads attend to the same rows, and what they find is
taken back by Wv: keys and values of single heads are never made. Where a layer knows positions,
shared parts are turned by them: pairs of neighbours, which are kept as two halves.
Source: arXiv:2405.04434, section 2.1.
"""

import torch
from typing_extensions import override

from vllm.exceptions import UnsupportedFeatureError
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.storages import PlainRows
from vllm.model_executor.layers.rotary import split_pairs
from vllm.model_executor.models.decoder.config import LayerPlan
from vllm.model_executor.models.decoder.paged_attention import PagedAttention
from vllm.model_executor.models.decoder.step import ModelParts, Step
from vllm.v1.attention.ops.stored import RowSource

_ROW = "kv_a_proj_with_mqa"


class LatentAttention(PagedAttention):
    """Attention of one layer over latent rows.

    Letters: T rows, H heads, L values of the latent, W = L + the shared part's values of a row.
    Of several ranks each has its own heads and the same rows, and sums the output.

    Args:
        index: The layer.
        plan: Its heads.
        parts: What to build from, within the layer's ``self_attn``.

    Owns: the matrices of keys and values widened, where they are stored in codes.
    """

    def __init__(self, index: int, plan: LayerPlan, parts: ModelParts) -> None:
        super().__init__(index, plan, parts)
        make, ops, hidden = parts.make, parts.ops, parts.config.hidden_size
        shape, latent = self._shape, self._shape.latent
        assert latent is not None
        self.latent = latent
        heads = shape.num_heads
        self._query_dim = latent.key_dim + latent.shared_dim
        width = heads * self._query_dim
        sizes = (latent.query_rank or width, latent.latent_dim + latent.shared_dim)
        self._names = ("q_a_proj" if latent.query_rank else "q_proj", _ROW)
        self.projections = MergedColumnParallelLinear(hidden, sizes, make, self._names)
        # Where queries are products of a latent of their own.
        self.query_norm: torch.Tensor | None = None
        self.queries: ReplicatedLinear | None = None
        if latent.query_rank:
            self.query_norm = make.parameter(latent.query_rank)
            self.queries = ReplicatedLinear(latent.query_rank, (width,), make, ("q_b_proj",))
        self.row_norm = make.parameter(latent.latent_dim)
        # By head: rows of Wk, then of Wv.
        num_rows = heads * (latent.key_dim + latent.value_dim)
        self.heads = ReplicatedLinear(latent.latent_dim, (num_rows,), make, ("kv_b_proj",))
        self._dtype = make.dtype
        self._widened: torch.Tensor | None = None
        whole_width = parts.config.shape_of(plan).num_heads * latent.value_dim
        self.output = RowParallelLinear(
            "num_attention_heads * v_head_dim", whole_width, hidden, make, "o_proj"
        )
        self._rope = plan.rope
        self._norm, self._map_heads = ops("rms_norm"), ops("grouped_linear")
        self._rotate = ops("rotate_halves")

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Maps the normed input [T, D] to the output [T, D]; writes the layer's cache.

        The last layer with a cache gives the step's wanted rows alone.
        """
        projected, rows = self._project(x)
        queries = self._take(projected)
        if self._rope is not None:
            rows = self._turn(rows.unsqueeze(1), step).squeeze(1)
            queries = self._turn(queries, step)
        return self._map_found(self._attend_step(queries, rows, step))

    def _turn(self, rows: torch.Tensor, step: Step) -> torch.Tensor:
        """Turns the shared parts of [T, H, L + S]."""
        assert self._rope is not None, "the caller asked"
        own, shared = torch.split(rows, [self.latent.latent_dim, self.latent.shared_dim], -1)
        return torch.cat([own, self._rotate(split_pairs(shared), *step.turns[self._rope])], -1)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what queries are products of, normed if it is a latent, and rows [T, L + S]."""
        latent = self.latent
        queries, rows = torch.split(self.projections(x), list(self.projections.out_sizes), -1)
        latents, shared = torch.split(rows, [latent.latent_dim, latent.shared_dim], -1)
        normed = self._norm(latents, self.row_norm, latent.eps)
        if self.query_norm is not None:
            queries = self._norm(queries, self.query_norm, latent.eps)
        return queries, torch.cat([normed, shared], -1)

    def _take(self, projected: torch.Tensor) -> torch.Tensor:
        """Returns queries in the rows' space [T, H, L + S]."""
        latent = self.latent
        queries = projected if self.queries is None else self.queries(projected)
        by_head = queries.view(len(projected), self._shape.num_heads, self._query_dim)
        own, with_shared = torch.split(by_head, [latent.key_dim, latent.shared_dim], -1)
        return torch.cat([self._map_heads(own, self.split_heads()[0].mT), with_shared], -1)

    def _map_found(self, found: torch.Tensor) -> torch.Tensor:
        """Maps what heads found, [T, H, at least L], to the output [T, D]."""
        values = self.split_heads()[1]
        attended = self._map_heads(found[..., : self.latent.latent_dim], values)
        output: torch.Tensor = self.output(attended.flatten(1))
        return output

    def split_heads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns every head's Wk [H, K, L] and Wv [H, V, L]."""
        latent, source = self.latent, self.heads.find_rows()
        matrix = self.heads.weight if isinstance(source, PlainRows) else self._widen(source)
        by_head = matrix.view(-1, latent.key_dim + latent.value_dim, latent.latent_dim)
        keys, values = torch.split(by_head, [latent.key_dim, latent.value_dim], 1)
        return keys, values

    def _widen(self, source: RowSource | None) -> torch.Tensor:
        """Decodes the matrix, once: half of it is multiplied by from its other side.

        Raises:
            UnsupportedFeatureError: A platform stores it its own way.
        """
        if source is None:
            raise UnsupportedFeatureError(
                "kv_b_proj is quantised in a way that this platform multiplies by alone: latent "
                "attention needs its values."
            )
        if self._widened is None:
            shape = source.num_rows, source.num_columns
            values = torch.empty(shape, device=self.heads.weight.device)
            source.write_rows(0, values)
            self._widened = values.to(self._dtype)
        return self._widened

    def _split_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values [..., 1, W] of rows [..., W]: both are the row.

        Kernels want them of one width; what is found of the shared part is left out.
        """
        both = rows.unsqueeze(-2)
        return both, both

    @override
    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        slots = {
            **self.output.weight_slots(f"{prefix}.o_proj"),
            f"{prefix}.kv_a_layernorm.weight": self.row_norm.data,
            **self.heads.part_slots(0, f"{prefix}.kv_b_proj"),
        }
        if self.queries is not None and self.query_norm is not None:
            slots |= self.queries.part_slots(0, f"{prefix}.q_b_proj")
            slots[f"{prefix}.q_a_layernorm.weight"] = self.query_norm.data
        for index, name in enumerate(self._names):
            slots |= self.projections.part_slots(index, f"{prefix}.{name}")
        return slots
