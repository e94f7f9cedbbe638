"""A layer's matrix, or a layer's experts, kept as stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vllm.model_executor.layers.quantization.stacking import stack_stored
from vllm.model_executor.layers.quantization.storages import StackedRows, Storage
from vllm.v1.attention.ops import reference
from vllm.v1.attention.ops.registry import OpResolver
from vllm.v1.attention.ops.stored import GatedExperts, RowSource


class StoredMatrix:
    """A ``QuantisedMatrix`` of any storage; its input needs no preparation.

    Args:
        name: Its published name, for messages.
        storage: Its codes.
        num_groups: Blocks of rows that ``map_groups`` maps by.
        ops: Resolves op names.
    """

    def __init__(self, name: str, storage: Storage, num_groups: int, ops: OpResolver) -> None:
        self._name, self._storage, self._num_groups = name, storage, num_groups
        self.row_source: RowSource | None = storage
        self._linear, self._grouped_linear = ops("stored_linear"), ops("stored_grouped_linear")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, in] to [T, out]."""
        product: torch.Tensor = self._linear(x, self._storage)
        return product

    def prepare(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input as it is."""
        return x

    def map_prepared(self, prepared: torch.Tensor) -> torch.Tensor:
        """Map [T, in] to [T, out]."""
        return self(prepared)

    def map_groups(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, g, in] to [T, g, out / g]."""
        product: torch.Tensor = self._grouped_linear(x, self._storage, self._num_groups)
        return product

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        """Return tensor name -> destination."""
        return self._storage.slots(name)

    def storages(self) -> tuple[Storage, ...]:
        """Return the matrices as stored."""
        return (self._storage,)

    def named_storages(self) -> list[tuple[str, Storage]]:
        """Return the matrices by their published names."""
        return [(self._name, self._storage)]

    def check(self) -> None:
        """See ``Storage.check``."""
        self._storage.check(self._name)


@dataclass(frozen=True, slots=True)
class StoredExpert:
    """The three matrices of one gated expert: [M, D], [M, D] and [D, M]."""

    gate: Storage
    up: Storage
    down: Storage

    def by_leaf(self) -> dict[str, Storage]:
        """Return the matrices by the last part of their published names."""
        return {"w1": self.gate, "w3": self.up, "w2": self.down}


class StoredExperts:
    """A ``QuantisedExperts``; an expert is decoded when, and only when, a token chose it.

    Stacked, the routed ones are one product, in the input's type.

    Args:
        prefix: Published prefix of the layer, with its dot, for messages.
        routed: The routed experts.
        shared: The shared one.
        limit: Clamp of gate and up.
        ops: Resolves op names.
    """

    def __init__(
        self,
        prefix: str,
        routed: Sequence[StoredExpert],
        shared: StoredExpert,
        limit: float,
        ops: OpResolver,
    ) -> None:
        self._prefix, self._limit = prefix, limit
        self._linear, self._run = ops("stored_linear"), ops("run_experts")
        self._activate = partial(ops("limited_silu_and_mul"), limit=limit)
        self._stacks: GatedExperts | None = None
        # The shared expert stands last, as in the plain stacks.
        self.experts = (*routed, shared)
        self._gate_up = tuple(StackedRows(expert.gate, expert.up) for expert in self.experts)

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Map [T, D] to [T, D]; unless they are stacked, in fp32 throughout."""
        if self._stacks is not None:
            routed = self._run(x, expert_ids, weights, self._run_expert, self._stacks)
            output: torch.Tensor = routed.add_(self._run_expert(x, len(self.experts) - 1))
            return output
        mixed = reference.mix_expert_products(
            x.float(),
            self._map_up,
            self._map_down,
            len(self.experts) - 1,
            expert_ids,
            weights,
            self._limit,
        )
        return mixed.to(x.dtype)

    @property
    def is_one_product(self) -> bool:
        """Whether all routed experts are multiplied at once, whichever were chosen."""
        return self._stacks is not None

    def stack(self) -> None:
        """Move the routed experts, loaded, into stacks, if they are stored alike."""
        routed = self.experts[:-1]
        gate_up = stack_stored([own for e in routed for own in (e.gate, e.up)], len(routed))
        down = stack_stored([expert.down for expert in routed], len(routed))
        if gate_up is not None and down is not None:
            self._stacks = GatedExperts(gate_up, down, self._activate)

    def _run_expert(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        return self._map_down(self._activate(self._map_up(rows, expert)), expert)

    def _map_up(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        product: torch.Tensor = self._linear(rows, self._gate_up[expert])
        return product

    def _map_down(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        product: torch.Tensor = self._linear(rows, self.experts[expert].down)
        return product

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return tensor name -> destination; ``prefix`` is the layer's, without dot."""
        found: dict[str, torch.Tensor] = {}
        for name, storage in self._named(f"{prefix}."):
            found.update(storage.slots(name))
        return found

    def storages(self) -> tuple[Storage, ...]:
        """Return the matrices as stored."""
        return tuple(storage for _, storage in self._named(""))

    def check(self) -> None:
        """See ``Storage.check``."""
        for name, storage in self.named_storages():
            storage.check(name)

    def named_storages(self) -> list[tuple[str, Storage]]:
        """Return the matrices by their published names."""
        return self._named(self._prefix)

    def _named(self, prefix: str) -> list[tuple[str, Storage]]:
        shared = len(self.experts) - 1
        return [
            (f"{prefix}{'shared_experts' if i == shared else f'experts.{i}'}.{leaf}", storage)
            for i, expert in enumerate(self.experts)
            for leaf, storage in expert.by_leaf().items()
        ]
