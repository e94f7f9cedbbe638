"""What all ways of reading quantised matrices have in common: who makes them, and when they end."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.interface import ExpertsSpec, MatrixSpec, RowDecoder
from vllm.model_executor.layers.quantization.packing_storage import PackingStorage
from vllm.model_executor.layers.quantization.storages import PlainRows, Storage
from vllm.model_executor.layers.quantization.stored_matrix import (
    StoredExpert,
    StoredExperts,
    StoredMatrix,
)
from vllm.model_executor.model_loader.packed_copies import PackedCopies
from vllm.v1.attention.ops.registry import OpResolver, get_reference_op
from vllm.v1.attention.ops.stored import Inputs

logger = init_logger(__name__)

_IN_WORDS: dict[Inputs, str] = {
    "whole": "as they are",
    "bytes by row": "int8 by token",
    "bytes by group": "int8 by token and group",
    "two bytes by group": "int16 by token and group",
}


class MatrixStorages(ABC):
    """The part of a ``WeightQuantization`` that does not ask how values are stored.

    Args:
        ops: Resolves the names of the ops that multiply by what it makes.

    Owns: the storages it made, and where copies of them are, until loading has finished.
    """

    def __init__(self, ops: OpResolver = get_reference_op) -> None:
        self._ops = ops
        self._made: list[StoredMatrix | StoredExperts] = []
        self._copies: PackedCopies | None = None
        self._new: list[tuple[str, PackingStorage]] = []

    @abstractmethod
    def plain_dtype(self, names: Sequence[str]) -> torch.dtype | None:
        """See ``WeightQuantization``."""

    @abstractmethod
    def _find_storage(self, spec: MatrixSpec) -> Storage | None:
        """Returns the storage of a matrix [out, in], still empty; None: it is plain."""

    def make_matrix(self, spec: MatrixSpec) -> StoredMatrix | None:
        """See ``WeightQuantization``."""
        storage = self._find_storage(spec)
        if storage is None:
            return None
        made = StoredMatrix(spec.name, storage, spec.num_groups, self._ops)
        self._made.append(made)
        return made

    def make_experts(self, spec: ExpertsSpec) -> StoredExperts | None:
        """See ``WeightQuantization``: only some formats have experts apart from matrices."""
        del spec
        return None

    def _make_experts(self, spec: ExpertsSpec) -> StoredExperts:
        """Returns a layer's experts, the plain ones among them as they are stored."""

        def make(name: str, out_size: int, in_size: int) -> Storage:
            matrix = MatrixSpec(name, in_size, out_size, spec.dtype, spec.device)
            storage = self._find_storage(matrix)
            if storage is not None:
                return storage
            kept = self.plain_dtype([f"{name}.weight"]) or spec.dtype
            return PlainRows(torch.empty((out_size, in_size), dtype=kept, device=spec.device))

        def make_expert(name: str) -> StoredExpert:
            return StoredExpert(
                gate=make(f"{name}.w1", spec.inner_size, spec.hidden_size),
                up=make(f"{name}.w3", spec.inner_size, spec.hidden_size),
                down=make(f"{name}.w2", spec.hidden_size, spec.inner_size),
            )

        prefix = spec.prefix
        routed = [make_expert(f"{prefix}experts.{expert}") for expert in range(spec.num_experts)]
        shared = make_expert(f"{prefix}shared_experts")
        made = StoredExperts(prefix, routed, shared, spec.limit, self._ops)
        self._made.append(made)
        return made

    def find_row_decoder(self, name: str, width: int) -> RowDecoder | None:
        """See ``WeightQuantization``: only some formats store tables otherwise than as values."""
        del name, width
        return None

    def take_copies(
        self, copies: PackedCopies, name_copy: Callable[[str], str]
    ) -> list[torch.Tensor]:
        """Take what was packed before, and keep there what was not once loading has finished.

        Args:
            copies: Where it is.
            name_copy: Makes a matrix's name there of its published one.

        Returns:
            What files need not fill.
        """
        self._copies = copies
        self._new = []
        filled = []
        packing = {
            name_copy(published): storage
            for made in self._made
            for published, storage in made.named_storages()
            if isinstance(storage, PackingStorage)
        }
        copies.check(packing)
        for name, storage in packing.items():
            if copies.has(name, storage.num_rows, storage.num_columns):
                filled += storage.adopt(copies.read(name, storage.wanted_inputs))
            else:
                self._new.append((name, storage))
        return filled

    def finish_loading(self) -> None:
        """See ``WeightQuantization``: packs matrix by matrix, and lets the files' layout go."""
        rounded: Counter[Inputs] = Counter()
        for made in self._made:
            made.check()
            rounded.update(storage.inputs for storage in made.storages())
        self._made.clear()
        if self._copies is not None and self._new:
            self._copies.write([(name, storage.packed) for name, storage in self._new])
        self._new, self._copies = [], None
        if rounded:
            logger.info("inputs of products with stored matrices: %s", _describe_inputs(rounded))


def _describe_inputs(rounded: Counter[Inputs]) -> str:
    """Return what a line of the log says."""
    return ", ".join(f"{_IN_WORDS[inputs]} ({count})" for inputs, count in rounded.most_common())
