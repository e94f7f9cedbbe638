"""Which parts of a packed matrix's tensors a rank holds (torch-free).

A rank's part of a matrix is cut from each of its tensors: along the same axis where outputs are
rows, along the other where a format stores inputs first. Cuts lie between groups and between words.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.model_executor.model_loader.shards import ELSEWHERE, Shard, ShardFinder

# What follows a matrix's name -> the axes that run over its outputs and over its inputs.
_AXES: Mapping[str, tuple[int | None, int | None]] = {
    "weight": (0, 1),
    "weight_packed": (0, 1),
    "weight_scale": (0, 1),
    "weight_scale_inv": (0, 1),
    "weight_zero_point": (0, 1),
    "weight_shape": (None, None),
    # One number for the whole matrix.
    "weight_global_scale": (None, None),
    "weight_scale_2": (None, None),
    "qweight": (1, 0),
    "scales": (1, 0),
    "qzeros": (1, 0),
    "g_idx": (None, None),
}


@dataclass(frozen=True, slots=True)
class PackedShards:
    """Cuts packed matrices as a model cuts plain ones.

    Args:
        find_plain: Tells the part of a plain tensor, by a name that ends in ".weight".
        tensors: What the files hold, by the model's names.
    """

    find_plain: ShardFinder
    tensors: Mapping[str, StoredTensor]

    def find(self, name: str) -> Shard | None:
        """A ``ShardFinder`` of plain and packed tensors."""
        module, _, leaf = name.rpartition(".")
        if leaf not in _AXES:
            return self.find_plain(name)
        own = self.of_matrix(module)
        if own is None or own is ELSEWHERE:
            return own
        axis = _AXES[leaf][own.axis]
        shape = self.tensors[name].shape if name in self.tensors else ()
        # One value for all outputs or inputs is every rank's.
        if axis is None or axis >= len(shape) or shape[axis] == 1:
            return None
        return Shard(axis, own.index, own.count)

    def of_matrix(self, module: str) -> Shard | None:
        """Return the part of a module's matrix [out, in]."""
        return self.find_plain(f"{module}.weight")


def refuse_cut_codes(
    name: str, size: tuple[int, int], whole_outputs: int, whole_inputs: int, shard: Shard | None
) -> None:
    """Refuse a boundary between ranks that falls within a word of codes or a group of inputs.

    Args:
        name: The matrix's name, for the message.
        size: Outputs and inputs of a rank.
        whole_outputs: How many outputs must stay together.
        whole_inputs: How many inputs must.
        shard: The rank's part.

    Raises:
        ConfigError: It does.
    """
    if shard is None or shard is ELSEWHERE:
        return
    part, together = size[shard.axis], (whole_outputs, whole_inputs)[shard.axis]
    if part % together:
        what = ("outputs", "inputs")[shard.axis]
        raise ConfigError(
            f"{name} is packed in runs of {together} {what}, and {shard.count} ranks would get "
            f"{part} each, which cuts one: use a --tensor-parallel-size that leaves whole ones."
        )
