"""gpt-oss's experts: biases everywhere, a clamped gate, weights plain or MXFP4.

MXFP4 weights stay as stored; a chosen expert's are decoded where they are used, tile by tile, so
that a decoded tile is still in the cache when its product reads it.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from vllm.model_executor.layers.quantization import QuantisedMatrix
from vllm.model_executor.layers.quantization.decode import decode_fp4_groups
from vllm.model_executor.layers.quantization.stacking import stack_stored
from vllm.model_executor.layers.spread_experts import find_share, run_own_experts
from vllm.model_executor.models.decoder.config import MXFP4_GROUP_SIZE, ClampedExpertsPlan
from vllm.model_executor.models.decoder.step import ModelParts
from vllm.v1.attention.ops.stored import FP4_GROUPS, GatedExperts, MatrixStack, StoredStack

# Values of a decoded tile: 1 MiB of fp32.
_TILE_VALUES = 1 << 18


class PlainStack(nn.Module):
    """One matrix [out, in] per expert; checkpoints store them as [E, in, out].

    Args:
        num_experts: E.
        in_size, out_size: Of each matrix.
        parts: What to build from.
    """

    def __init__(self, num_experts: int, in_size: int, out_size: int, parts: ModelParts) -> None:
        super().__init__()
        self.weight = parts.make.parameter(num_experts, out_size, in_size)
        self._linear = parts.ops("linear")

    def forward(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """Maps [N, in] by one expert's matrix to [N, out]."""
        mapped: torch.Tensor = self._linear(rows, self.weight[expert])
        return mapped

    def as_stack(self) -> StoredStack:
        """Returns the matrices as kernels take them."""
        return StoredStack.plain(self.weight.data)

    def weight_slots(self, name: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        return {name: self.weight.data.mT}


class MxFp4Stack(nn.Module):
    """``PlainStack`` as e2m1 codes under e8m0 scales."""

    def __init__(self, num_experts: int, in_size: int, out_size: int, parts: ModelParts) -> None:
        super().__init__()
        make, num_groups = parts.make, in_size // MXFP4_GROUP_SIZE
        self.codes = make.parameter(
            num_experts, out_size, num_groups, MXFP4_GROUP_SIZE // 2, dtype=torch.uint8
        )
        self.scales = make.parameter(num_experts, out_size, num_groups, dtype=torch.uint8)
        self._linear = parts.ops("linear")
        self._tile_rows = max(1, _TILE_VALUES // in_size)

    def forward(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """Maps [N, in] by one expert's matrix to [N, out], in fp32 products of decoded values."""
        codes, scales = self.codes[expert].flatten(1), self.scales[expert]
        wide = rows.float()
        tiles = []
        for first in range(0, codes.shape[0], self._tile_rows):
            part = slice(first, first + self._tile_rows)
            tile = decode_fp4_groups(codes[part], scales[part], MXFP4_GROUP_SIZE)
            tiles.append(self._linear(wide, tile))
        return torch.cat(tiles, 1).to(rows.dtype)

    def as_stack(self) -> StoredStack:
        """Returns the matrices as kernels take them."""
        codes = self.codes.data.flatten(2)
        return StoredStack(FP4_GROUPS, codes, self.scales.data, (1, MXFP4_GROUP_SIZE))

    def weight_slots(self, name: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        return {f"{name}_blocks": self.codes.data, f"{name}_scales": self.scales.data}


class PackedStack(nn.Module):
    """``PlainStack`` as one quantised matrix per expert.

    Args:
        matrices: One per expert.
    """

    def __init__(self, matrices: Sequence[QuantisedMatrix]) -> None:
        super().__init__()
        self.matrices = tuple(matrices)
        self.is_loaded = False

    def forward(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """Maps [N, in] by one expert's matrix to [N, out]."""
        return self.matrices[expert](rows)

    def as_stack(self) -> MatrixStack | None:
        """Moves the matrices, loaded, into a stack; None: they are not stored alike, or not yet."""
        sources = [matrix.row_source for matrix in self.matrices]
        return stack_stored(sources, len(sources)) if self.is_loaded else None

    def weight_slots(self, name: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination; the experts have names of their own."""
        prefix, _, leaf = name.rpartition(".")
        return {
            slot: tensor
            for expert, matrix in enumerate(self.matrices)
            for slot, tensor in matrix.slots(f"{prefix}.{expert}.{leaf}").items()
        }


Stack = PlainStack | MxFp4Stack | PackedStack


def _build_stacks(
    plan: ClampedExpertsPlan, num_own: int, inner: int, parts: ModelParts
) -> tuple[Stack, Stack]:
    """Returns the matrices [2 * M, D], rows of gate and up alternating, and [D, M]."""
    make, hidden = parts.make, parts.config.hidden_size
    gate_ups, downs = [], []
    for expert in range(num_own):
        gate_up = make.quantised_matrix(f"experts.{expert}.gate_up_proj", hidden, 2 * inner)
        if gate_up is None:
            break
        gate_ups.append(gate_up)
        if down := make.quantised_matrix(f"experts.{expert}.down_proj", inner, hidden):
            downs.append(down)
    if len(downs) == num_own:
        return PackedStack(gate_ups), PackedStack(downs)
    stack = MxFp4Stack if plan.is_mxfp4 else PlainStack
    return stack(num_own, hidden, 2 * inner, parts), stack(num_own, inner, hidden, parts)


class ClampedExperts(nn.Module):
    """Routed experts with biases; a softmax over the chosen ones weighs them."""

    def __init__(self, plan: ClampedExpertsPlan, parts: ModelParts) -> None:
        super().__init__()
        make, hidden = parts.make, parts.config.hidden_size
        self.plan = plan
        self.router = make.parameter(plan.num_experts, hidden, dtype=torch.float32)
        self.router_bias = make.parameter(plan.num_experts, dtype=torch.float32)
        self._group = make.group
        self._own, inner = find_share(make, plan.num_experts, plan.inner_size)
        # Ranks that hold a part of every expert sum: one of them adds the bias.
        self._adds_bias = make.share.spreads_experts or make.group.rank == 0
        num_own = len(self._own)
        self.gate_up, self.down = _build_stacks(plan, num_own, inner, parts)
        self.gate_up_bias = make.parameter(num_own, 2 * inner)
        self.down_bias = make.parameter(num_own, hidden)
        self._choose, self._run = parts.ops("choose_by_softmax"), parts.ops("run_experts")
        self._score = parts.ops("router_logits")
        self._activate = parts.ops("clamped_glu_and_mul")
        self._experts = self._find_experts()

    def _find_experts(self) -> GatedExperts | None:
        gate_up, down = self.gate_up.as_stack(), self.down.as_stack()
        if gate_up is None or down is None:
            return None
        return GatedExperts(
            gate_up,
            down,
            partial(self._activate, alpha=self.plan.alpha, limit=self.plan.limit),
            self.gate_up_bias.data,
            self.down_bias.data if self._adds_bias else None,
        )

    @property
    def is_one_product(self) -> bool:
        """Whether all experts are multiplied at once, whichever were chosen."""
        return self._experts is not None and len(self._own) == self.plan.num_experts

    def stack_stored(self) -> None:
        """Moves stored experts into stacks that a kernel takes as one, if they are stored alike."""
        if isinstance(self.gate_up, PackedStack) and isinstance(self.down, PackedStack):
            self.gate_up.is_loaded = self.down.is_loaded = True
            self._experts = self._find_experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps the normed input [T, D] to [T, D]."""
        logits = self._score(x, self.router, self.router_bias)
        # A softmax over the chosen logits is the softmax over all, scaled to a sum of one.
        ids, weights = self._choose(logits, self.plan.num_chosen, True)
        num_experts = self.plan.num_experts
        return self._group.all_reduce(
            run_own_experts(
                x, ids, weights, self._own, self._run_expert, self._run, num_experts, self._experts
            )
        )

    def _run_expert(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        gate_up = self.gate_up(rows, expert) + self.gate_up_bias[expert]
        inner = self._activate(gate_up, self.plan.alpha, self.plan.limit)
        output: torch.Tensor = self.down(inner, expert)
        return output + self.down_bias[expert] if self._adds_bias else output

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        experts = f"{prefix}.experts"
        biases = {f"{experts}.gate_up_proj_bias": self.gate_up_bias.data}
        if isinstance(self.gate_up, PackedStack):
            # Apart in the file, alternating here.
            gate, up = self.gate_up_bias.data[:, 0::2], self.gate_up_bias.data[:, 1::2]
            biases = {f"{experts}.gate_proj_bias": gate, f"{experts}.up_proj_bias": up}
        return {
            f"{prefix}.router.weight": self.router.data,
            f"{prefix}.router.bias": self.router_bias.data,
            **self.gate_up.weight_slots(f"{experts}.gate_up_proj"),
            **biases,
            **self.down.weight_slots(f"{experts}.down_proj"),
            f"{experts}.down_proj_bias": self.down_bias.data,
        }
