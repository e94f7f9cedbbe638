"""The second half of a layer: a gated MLP, or routed experts."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn
from typing_extensions import override

from vllm.distributed.parallel_state import shard_size
from vllm.exceptions import UnsupportedFeatureError
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
    TensorFactory,
)
from vllm.model_executor.layers.quantization import QuantisedMatrix
from vllm.model_executor.layers.quantization.stacking import stack_stored
from vllm.model_executor.layers.spread_experts import find_share, run_own_experts
from vllm.model_executor.models.decoder.clamped_experts import ClampedExperts
from vllm.model_executor.models.decoder.config import (
    ClampedExpertsPlan,
    ExpertsPlan,
    FeedForwardPlan,
    MlpPlan,
)
from vllm.model_executor.models.decoder.step import ModelParts
from vllm.v1.attention.ops.registry import Op, OpResolver
from vllm.v1.attention.ops.stored import GatedExperts, StoredStack

_LEAVES = ("gate_proj", "up_proj", "down_proj")
_ACTIVATION_OPS = {"silu": "silu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}


def find_activation(plan: MlpPlan | ExpertsPlan, ops: OpResolver) -> Op:
    """Returns what makes the second product's input of the first one's [N, gate | up]."""
    if plan.limit:
        return partial(ops("limited_silu_and_mul"), limit=plan.limit)
    return ops(_ACTIVATION_OPS[plan.activation])


def build_feed_forward(
    plan: FeedForwardPlan, parts: ModelParts
) -> "GatedMlp | Experts | SharedExperts | SigmoidExperts | ClampedExperts":
    """Returns the module of a plan, its tensors named within ``parts``' prefix."""
    if isinstance(plan, ClampedExpertsPlan):
        return ClampedExperts(plan, parts)
    if isinstance(plan, MlpPlan):
        return GatedMlp(plan, parts)
    if plan.router is not None:
        numbered = plan.router.has_numbered_names
        return (NumberedExperts if numbered else SigmoidExperts)(plan, parts)
    return Experts(plan, parts) if plan.shared is None else SharedExperts(plan, parts)


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, plan: MlpPlan, parts: ModelParts) -> None:
        super().__init__()
        make, hidden = parts.make, parts.config.hidden_size
        inner = shard_size("intermediate_size", plan.inner_size, make.group)
        self.gate_up = MergedColumnParallelLinear(
            hidden, (inner, inner), make, ("gate_proj", "up_proj")
        )
        self.down = RowParallelLinear(
            "intermediate_size", plan.inner_size, hidden, make, "down_proj"
        )
        self.gate_up_bias = make.parameter(2 * inner) if plan.has_bias else None
        self.down_bias = make.parameter(hidden) if plan.has_bias else None
        self._activate = find_activation(plan, parts.ops)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps the normed input [T, D] to [T, D]."""
        gate_up = self.gate_up(x)
        if self.gate_up_bias is not None:
            gate_up += self.gate_up_bias
        output: torch.Tensor = self.down(self._activate(gate_up))
        if self.down_bias is not None:
            output += self.down_bias
        return output

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        slots = {
            **self.gate_up.part_slots(0, f"{prefix}.gate_proj"),
            **self.gate_up.part_slots(1, f"{prefix}.up_proj"),
            **self.down.weight_slots(f"{prefix}.down_proj"),
        }
        if self.gate_up_bias is not None and self.down_bias is not None:
            gate, up = self.gate_up_bias.data.chunk(2)
            slots[f"{prefix}.gate_proj.bias"], slots[f"{prefix}.up_proj.bias"] = gate, up
            slots[f"{prefix}.down_proj.bias"] = self.down_bias.data
        return slots


@dataclass(frozen=True, slots=True)
class StoredGatedMlp:
    """The three matrices of one quantised expert: [M, D], [M, D] and [D, M]."""

    gate: QuantisedMatrix
    up: QuantisedMatrix
    down: QuantisedMatrix

    def slots(self, name: str, leaves: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination of the matrices ``leaves`` of the expert ``name``."""
        parts = zip(leaves, (self.gate, self.up, self.down), strict=True)
        return {
            slot: tensor
            for leaf, matrix in parts
            for slot, tensor in matrix.slots(f"{name}.{leaf}").items()
        }


class ExpertBank(nn.Module):
    """Routed experts, whoever chooses among them; ``router`` is a matrix [E, D] in fp32."""

    leaves: ClassVar[tuple[str, ...]] = _LEAVES
    """Names of an expert's gate, up and down matrices."""

    def __init__(self, plan: ExpertsPlan, parts: ModelParts) -> None:
        super().__init__()
        make, hidden = parts.make, parts.config.hidden_size
        self.plan = plan
        self._group = make.group
        self.router = make.parameter(plan.num_experts, hidden, dtype=torch.float32)
        self._own, inner = find_share(make, plan.num_experts, plan.inner_size)
        self.stored = self._find_stored(make, hidden, inner)
        num_plain = 0 if self.stored else len(self._own)
        kept = make.kept_dtype(
            make.dtype, *(f"experts.{e}.{leaf}.weight" for e in self._own for leaf in self.leaves)
        )
        self.gate_up = make.parameter(num_plain, 2 * inner, hidden, dtype=kept)
        self.down = make.parameter(num_plain, hidden, inner, dtype=kept)
        self._score = parts.ops("router_logits")
        self._choose, self._run = parts.ops("choose_by_softmax"), parts.ops("run_experts")
        self._activate = activate = find_activation(plan, parts.ops)
        self._mlp = partial(parts.ops("gated_mlp"), activate=activate)
        # Packed ones are stacked where kernels want it, once they are loaded.
        self._experts: GatedExperts | None = None
        if not self.stored:
            stacks = (StoredStack.plain(self.gate_up.data), StoredStack.plain(self.down.data))
            self._experts = GatedExperts(*stacks, activate)

    def _find_stored(
        self, make: TensorFactory, hidden: int, inner: int
    ) -> tuple[StoredGatedMlp, ...]:
        """Returns the experts where they are quantised; empty: they are plain.

        Raises:
            UnsupportedFeatureError: Some are and some are not.
        """
        gate, up, down = self.leaves
        found = [
            (
                make.quantised_matrix(f"experts.{expert}.{gate}", hidden, inner),
                make.quantised_matrix(f"experts.{expert}.{up}", hidden, inner),
                make.quantised_matrix(f"experts.{expert}.{down}", inner, hidden),
            )
            for expert in self._own
        ]
        present = [(g, u, d) for g, u, d in found if g and u and d]
        if len(present) == len(found):
            return tuple(StoredGatedMlp(*expert) for expert in present)
        if any(matrix is not None for expert in found for matrix in expert):
            raise UnsupportedFeatureError(
                f"some of the experts of {make.prefix.rstrip('.')} are quantised and some are not, "
                "which is not served: quantise all of them, or none."
            )
        return ()

    @property
    def is_one_product(self) -> bool:
        """Whether all experts are multiplied at once, whichever were chosen."""
        return self._experts is not None and len(self._own) == self.plan.num_experts

    def stack_stored(self) -> None:
        """Moves stored experts into stacks that a kernel takes as one, if they are stored alike."""
        gate_ups = [matrix.row_source for own in self.stored for matrix in (own.gate, own.up)]
        gate_up = stack_stored(gate_ups, len(self.stored))
        down = stack_stored([own.down.row_source for own in self.stored], len(self.stored))
        if gate_up is not None and down is not None:
            self._experts = GatedExperts(gate_up, down, self._activate)

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns int64 ids and fp32 weights [T, k] for the router's input [T, D]."""
        logits = self._score(x, self.router)
        chosen: tuple[torch.Tensor, torch.Tensor] = self._choose(
            logits, self.plan.num_chosen, self.plan.normalises
        )
        return chosen

    def run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the chosen experts' weighted sum [T, D] of the normed input [T, D]."""
        num_experts = self.plan.num_experts
        return self._group.all_reduce(
            run_own_experts(
                x, ids, weights, self._own, self._run_expert, self._run, num_experts, self._experts
            )
        )

    def _run_expert(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        if self.stored:
            own = self.stored[expert]
            inner = self._activate(torch.cat([own.gate(rows), own.up(rows)], -1))
            return own.down(inner)
        output: torch.Tensor = self._mlp(rows, self.gate_up[expert], self.down[expert])
        return output

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination; experts are slices of the stacks."""
        slots: dict[str, torch.Tensor] = {}
        names = [f"{leaf}.weight" for leaf in self.leaves]
        for index, expert in enumerate(self._own):
            name = f"{prefix}.experts.{expert}"
            if self.stored:
                slots |= self.stored[index].slots(name, self.leaves)
                continue
            matrices = (*self.gate_up.data[index].chunk(2), self.down.data[index])
            slots |= {f"{name}.{leaf}": m for leaf, m in zip(names, matrices, strict=True)}
        return slots


class Experts(ExpertBank):
    """Routed experts without a shared one; a softmax over all of them chooses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps the normed input [T, D] to [T, D]."""
        return self.run(x, *self.choose(x))

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        return {f"{prefix}.gate.weight": self.router.data, **super().weight_slots(prefix)}


class SharedExperts(Experts):
    """Routed experts, and beside them one MLP for every token, times the sigmoid of its gate."""

    def __init__(self, plan: ExpertsPlan, parts: ModelParts) -> None:
        super().__init__(plan, parts)
        assert plan.shared is not None
        prefix = f"{parts.make.prefix}shared_expert"
        self.shared = GatedMlp(plan.shared, parts.within(prefix))
        self.shared_gate = parts.make.parameter(1, parts.config.hidden_size)
        self._linear = parts.ops("linear")

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share: torch.Tensor = self._linear(x, self.shared_gate).sigmoid()
        shared: torch.Tensor = self.shared(x)
        return super().forward(x) + shared * share

    @override
    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            **super().weight_slots(prefix),
            **self.shared.weight_slots(f"{prefix}.shared_expert"),
            f"{prefix}.shared_expert_gate.weight": self.shared_gate.data,
        }


class SigmoidExperts(ExpertBank):
    """Routed experts by their own scores, in groups, and a shared MLP if there is one."""

    def __init__(self, plan: ExpertsPlan, parts: ModelParts) -> None:
        super().__init__(plan, parts)
        assert plan.router is not None
        self._router_plan = plan.router
        self.router_bias = parts.make.parameter(plan.num_experts, dtype=torch.float32)
        if plan.router.is_softmax:
            self.router_bias.data.zero_()
        self.shared: GatedMlp | None = None
        if plan.shared is not None:
            prefix = f"{parts.make.prefix}shared_experts"
            self.shared = GatedMlp(plan.shared, parts.within(prefix))
        self._choose_by_sigmoid = parts.ops("choose_by_sigmoid")

    @override
    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        router = self._router_plan
        chosen: tuple[torch.Tensor, torch.Tensor] = self._choose_by_sigmoid(
            self._score(x, self.router),
            self.router_bias,
            self.plan.num_chosen,
            router.num_groups,
            router.num_chosen_groups,
            self.plan.normalises,
            router.factor,
            router.is_softmax,
        )
        return chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps the normed input [T, D] to [T, D]."""
        routed = self.run(x, *self.choose(x))
        return routed if self.shared is None else routed + self.shared(x)

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        slots = {
            f"{prefix}.gate.weight": self.router.data,
            **super().weight_slots(prefix),
        }
        if not self._router_plan.is_softmax:
            slots[f"{prefix}.gate.e_score_correction_bias"] = self.router_bias.data
        if self.shared is not None:
            slots |= self.shared.weight_slots(f"{prefix}.shared_experts")
        return slots


class NumberedExperts(SigmoidExperts):
    """The same under Kimi's names."""

    leaves: ClassVar[tuple[str, ...]] = ("w1", "w3", "w2")
