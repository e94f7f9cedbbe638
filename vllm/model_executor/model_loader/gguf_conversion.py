"""What conversion to GGUF changed in the values of some architectures, and how it is undone.

pairs            rows of queries and keys lie in pairs that are turned together: row 2i of a head
                 is its i-th, 2i + 1 the i-th of its second half (Llama's)
tiled heads      value heads lie head by head of their groups (the first of each, then the
                 second of each), where releases have those of one key head together (Qwen 3.5's)
recurrent        ``ssm_a`` is -exp(A_log); the convolution has lost an axis
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm.exceptions import CheckpointError
from vllm.model_executor.model_loader.gguf_architectures import find_architecture
from vllm.utils.gguf_file import GgufFile

Undo = Callable[[torch.Tensor], torch.Tensor]

_PAIRED = re.compile(r".+\.self_attn\.[qk]_proj")
# Parts of a recurrent layer that have something of every value head, by how many numbers of it.
_BY_HEAD = ("in_proj_b", "in_proj_a", "dt_bias", "A_log")
_BY_VALUE = ("in_proj_z",)
_BEHIND_KEYS = ("in_proj_qkv", "conv1d")


@dataclass(frozen=True, slots=True)
class _RecurrentHeads:
    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int

    def tiled(self, width: int, *, first: int = 0) -> torch.Tensor:
        """Returns where each number of a release lies in the file.

        Args:
            width: Numbers of a value head.
            first: Numbers before those of value heads, left where they are.
        """
        heads = torch.arange(self.num_values).view(-1, self.num_keys).T.reshape(-1)
        moved = (heads[:, None] * width + torch.arange(width)).reshape(-1)
        return torch.cat([torch.arange(first), first + moved])


class Conversion:
    """One file's.

    Args:
        file: Its header; the keys of its architecture have been read as a config.

    Raises:
        CheckpointError: Its keys of recurrent layers contradict one another.
    """

    def __init__(self, file: GgufFile) -> None:
        own, prefix = find_architecture(file), file.keys.get("general.architecture")
        rows, self._shapes = own.rows, own.shapes
        self._pair_dim = 0
        self._heads: _RecurrentHeads | None = None

        def read(name: str) -> int:
            value = file.keys.get(f"{prefix}.{name}")
            return value if type(value) is int else 0

        if rows == "pairs":
            heads = read("attention.head_count") or 1
            self._pair_dim = read("attention.key_length") or read("embedding_length") // heads
        if rows == "tiled heads":
            num_values = read("ssm.time_step_rank")
            names = ("ssm.group_count", "ssm.state_size", "ssm.inner_size")
            num_keys, key_dim, inner = (read(name) for name in names)
            if not num_keys or not num_values or num_values % num_keys or inner % num_values:
                raise CheckpointError(
                    f"{file.path}: {num_values} value heads (ssm.time_step_rank) of {num_keys} key "
                    f"heads (ssm.group_count) and {inner} values (ssm.inner_size) fit no model."
                )
            self._heads = _RecurrentHeads(num_keys, num_values, key_dim, inner // num_values)

    def row_order(self, name: str, num_rows: int) -> torch.Tensor | None:
        """Return which stored row each row of a release is; None: the one of its number.

        Args:
            name: Of a matrix or vector in the release, without ".weight".
            num_rows: Its rows.
        """
        if self._pair_dim and _PAIRED.fullmatch(name):
            stored = torch.arange(num_rows).view(-1, self._pair_dim // 2, 2)
            return stored.transpose(1, 2).reshape(-1)
        heads, leaf = self._heads, name.rpartition(".")[2]
        if heads is None or ".linear_attn." not in name or heads.num_values == heads.num_keys:
            return None
        if leaf in _BY_HEAD:
            return heads.tiled(1)
        if leaf in _BY_VALUE:
            return heads.tiled(heads.value_dim)
        if leaf in _BEHIND_KEYS:
            return heads.tiled(heads.value_dim, first=2 * heads.num_keys * heads.key_dim)
        return None

    def column_order(self, name: str) -> torch.Tensor | None:
        """Return which stored column each input of a release is; None: the one of its number."""
        heads = self._heads
        if heads is None or not name.endswith(".linear_attn.out_proj"):
            return None
        return None if heads.num_values == heads.num_keys else heads.tiled(heads.value_dim)

    def find_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a tensor's shape in the release, of which a file leaves out axes of one."""
        for end, own in self._shapes.items():
            if name.endswith(end):
                sizes = [shape[-1] if size == 0 else size for size in own]
                left = math.prod(shape) // max(1, math.prod(size for size in sizes if size > 0))
                return tuple(left if size < 0 else size for size in sizes)
        if name.endswith(".linear_attn.conv1d.weight"):
            return (shape[0], 1, *shape[1:])
        return (1, *shape) if name.endswith(".shared_expert_gate.weight") else shape

    def find_undo(self, name: str, num_rows: int) -> Undo | None:
        """Return what makes a release's values of a file's plain ones; None: they are equal.

        Args:
            name: Of the tensor in the release.
            num_rows: Its rows.
        """
        stem = name.removesuffix(".weight")
        rows, columns = self.row_order(stem, num_rows), self.column_order(stem)
        has_logs = stem.endswith(".A_log")
        if rows is None and columns is None and not has_logs:
            return None

        def undo(values: torch.Tensor) -> torch.Tensor:
            if rows is not None:
                values = values[rows]
            if columns is not None:
                values = values[:, columns]
            return (-values).log() if has_logs else values

        return undo
