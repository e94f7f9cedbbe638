"""From a ModelSlim description to the storages of a model's matrices."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vllm.exceptions import CheckpointError, UnsupportedFeatureError
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization import ExpertsSpec, MatrixSpec
from vllm.model_executor.model_loader.checkpoint_files import name_some
from vllm.model_executor.model_loader.shards import ELSEWHERE, ShardFinder, find_whole
from vllm_ascend.quantization.description import QuantDescription, read_description
from vllm_ascend.quantization.w8a8 import (
    GatedMatrices,
    PlainGatedMatrices,
    W8A8Experts,
    W8A8GroupedMatrix,
    W8A8Matrix,
)

logger = init_logger(__name__)

_MTP = "mtp."
_EXPERT_LEAVES = ("w1", "w2", "w3")


class ModelSlimQuantization:
    """A ``WeightQuantization`` read from ``quant_model_description.json``.

    Args:
        description: The scheme of each tensor.
        find_shard: Tells which part of a tensor this rank holds.
        use_nz: Whether weights are rearranged to the device's NZ format after loading.

    Owns: the storages it made, until loading has finished.
    """

    def __init__(
        self,
        description: QuantDescription,
        find_shard: ShardFinder = find_whole,
        *,
        use_nz: bool = False,
    ) -> None:
        self._description = description
        self._find_shard = find_shard
        self._use_nz = use_nz
        self._made: list[W8A8Matrix | W8A8GroupedMatrix | W8A8Experts] = []
        self._asked: set[str] = set()

    def make_matrix(self, spec: MatrixSpec) -> W8A8Matrix | W8A8GroupedMatrix | None:
        """See ``WeightQuantization``."""
        self._asked.add(spec.name)
        if not self._description.is_quantised(spec.name):
            return None
        has_offset = self._description.has_offset(spec.name)
        made: W8A8Matrix | W8A8GroupedMatrix
        if spec.num_groups > 1:
            made = W8A8GroupedMatrix(spec, has_offset)
        else:
            made = W8A8Matrix(spec, has_offset)
        self._made.append(made)
        return made

    def find_row_decoder(self, name: str, width: int) -> None:
        """See ``WeightQuantization``: tables are plain."""

    def make_experts(self, spec: ExpertsSpec) -> W8A8Experts | None:
        """See ``WeightQuantization``."""
        prefix = spec.prefix
        routed_names = [
            f"{prefix}experts.{expert}.{leaf}"
            for expert in range(spec.num_experts)
            for leaf in _EXPERT_LEAVES
        ]
        shared_names = [f"{prefix}shared_experts.{leaf}" for leaf in _EXPERT_LEAVES]
        self._asked.update(routed_names, shared_names)
        is_routed_quantised = self._agree(routed_names)
        is_shared_quantised = self._agree(shared_names)
        if not is_routed_quantised:
            if is_shared_quantised:
                raise UnsupportedFeatureError(
                    f"{self._description.source} quantises {shared_names[0]} but not the routed "
                    "experts beside it: quantise both or neither."
                )
            return None
        # The grouped product of bf16 results takes bf16 scales, that of others fp32 ones.
        group_scales = torch.bfloat16 if spec.dtype == torch.bfloat16 else torch.float32
        routed = GatedMatrices(spec, group_scales)
        shared: GatedMatrices | PlainGatedMatrices
        if is_shared_quantised:
            shared = GatedMatrices(replace(spec, num_experts=1), torch.float32)
        else:
            shared = PlainGatedMatrices(spec)
        made = W8A8Experts(
            routed,
            shared,
            prefix,
            self._description.has_offset(routed_names[0]),
            self._description.has_offset(shared_names[0]),
        )
        self._made.append(made)
        return made

    def has_part(self, prefix: str) -> bool:
        """See ``WeightQuantization``: descriptions need not name plain tensors."""
        del prefix
        return True

    def plain_dtype(self, names: Sequence[str]) -> torch.dtype | None:
        """See ``WeightQuantization``: plain tensors take the model's types."""
        del names
        return None

    def finish_loading(self) -> None:
        """See ``WeightQuantization``."""
        self._refuse_leftovers()
        for made in self._made:
            made.finish(self._use_nz)
        self._made.clear()

    def _refuse_leftovers(self) -> None:
        """Refuse quantised matrices that the model keeps plain, or does not have."""
        has_mtp = any(name.startswith(_MTP) for name in self._asked)
        leftovers = sorted(
            name
            for name in self._description.quantised_matrices()
            if name not in self._asked
            and (has_mtp or not name.startswith(_MTP))
            and self._find_shard(f"{name}.weight") is not ELSEWHERE
        )
        if leftovers:
            raise CheckpointError(
                f"{self._description.source} quantises {name_some(leftovers)}, which cannot be "
                "quantised in this model: leave them FLOAT."
            )

    def _agree(self, names: list[str]) -> bool:
        """Return whether all matrices are quantised.

        Raises:
            UnsupportedFeatureError: Some are and some are not.
        """
        plain = [name for name in names if not self._description.is_quantised(name)]
        if plain and len(plain) < len(names):
            raise UnsupportedFeatureError(
                f"{self._description.source} quantises some of {len(names)} matrices but not "
                f"{name_some(plain)}: quantise all or none of a layer's."
            )
        return not plain


def find_quantization(
    checkpoint: str, find_shard: ShardFinder = find_whole, *, use_nz: bool
) -> ModelSlimQuantization | None:
    """Return the quantisation of a checkpoint folder; None without a description.

    Args:
        checkpoint: The folder.
        find_shard: Tells which part of a tensor this rank holds.
        use_nz: Whether the device takes weights in NZ format.

    Raises:
        CheckpointError: The description is broken.
        UnsupportedFeatureError: It uses a scheme that is not supported.
    """
    description = read_description(Path(checkpoint))
    if description is None:
        return None
    num_quantised = len(description.quantised_matrices())
    logger.info("%s: %d matrices are W8A8_DYNAMIC", description.source, num_quantised)
    return ModelSlimQuantization(description, find_shard, use_nz=use_nz)
