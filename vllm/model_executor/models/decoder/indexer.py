"""What a layer ranks keys by: index keys, which it keeps, and its heads' queries and weights."""

import torch
from torch import nn
from torch.nn.functional import layer_norm

from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.rotary import split_pairs
from vllm.model_executor.models.decoder.config import LatentShape, LayerPlan
from vllm.model_executor.models.decoder.pool_keys import PoolKeys, TokenKeys
from vllm.model_executor.models.decoder.step import ModelParts, Step

_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """The indexer of one layer.

    Letters: T rows, D values of the layer's input, J heads of I values.

    Args:
        index: The layer.
        layer: Its plan.
        latent: Its latents.
        parts: What to build from, within the layer's ``self_attn.indexer``.
    """

    def __init__(
        self, index: int, layer: LayerPlan, latent: LatentShape, parts: ModelParts
    ) -> None:
        super().__init__()
        assert latent.indexer is not None, "the layer's keys are chosen"
        self.plan, self._rope = latent.indexer, layer.rope
        make, width, heads = parts.make, self.plan.head_dim, self.plan.num_heads
        self.queries = ReplicatedLinear(latent.query_rank, (heads * width,), make, ("wq_b",))
        # Index keys, then weights of heads.
        self._inner_names = ("wk", "weights_proj")
        hidden = parts.config.hidden_size
        self.inputs = ReplicatedLinear(hidden, (width, heads), make, self._inner_names)
        self.key_norm = make.parameter(2, width, dtype=torch.float32)
        kept = TokenKeys if self.plan.pool_size == 1 else PoolKeys
        self.pool_keys = kept(index, self.plan, parts)
        self._rotate = parts.ops("rotate_halves")

    def forward(self, x: torch.Tensor, latents: torch.Tensor, step: Step) -> torch.Tensor:
        """Keeps the keys of a step's rows.

        Args:
            x: The layer's normed input [T, D].
            latents: What its queries are products of, [T, rank].
            step: The step.

        Returns:
            What rows rank keys by, [T, J * I + J]: queries of all heads, then their weights.

        Mutates:
            The layer's caches.
        """
        keys, weights = torch.split(self.inputs(x), [self.plan.head_dim, self.plan.num_heads], -1)
        weight, bias = self.key_norm
        keys = layer_norm(keys.float(), weight.shape, weight, bias, _NORM_EPS)
        queries = self.queries(latents)
        if self._rope is not None:
            keys, queries = self._turn(keys, step), self._turn(queries, step)
        self.pool_keys(keys, x, step)
        return torch.cat([queries, weights], 1)

    def _turn(self, rows: torch.Tensor, step: Step) -> torch.Tensor:
        """Turns the first values of heads in rows [T, heads * I]."""
        assert self._rope is not None, "the caller asked"
        by_head = rows.view(len(rows), -1, self.plan.head_dim)
        first = by_head[..., : self._rope.dim]
        if self.plan.turns_pairs:
            first = split_pairs(first)
        turned = self._rotate(first, *step.turns[self._rope])
        return torch.cat([turned, by_head[..., self._rope.dim :]], -1).flatten(1)

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination; ``prefix`` is the layer's ``self_attn``."""
        own = f"{prefix}.indexer"
        slots = {
            **self.queries.part_slots(0, f"{own}.wq_b"),
            **self.pool_keys.weight_slots(own),
            f"{own}.k_norm.weight": self.key_norm.data[0],
            f"{own}.k_norm.bias": self.key_norm.data[1],
        }
        for index, name in enumerate(self._inner_names):
            slots |= self.inputs.part_slots(index, f"{own}.{name}")
        return slots
