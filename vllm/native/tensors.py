"""Tensors as the structs that the native kernels take. Nothing is copied but small vectors."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from vllm.native.structs import BF16, F32, MXFP4, Cache, Matrix
from vllm.v1.attention.metadata import CacheLayout

_KINDS = {torch.float32: F32, torch.bfloat16: BF16}


def can_read(tensor: torch.Tensor) -> bool:
    """Whether the kernels can read a tensor of this type and place."""
    return tensor.dtype in _KINDS and tensor.device.type == "cpu" and tensor.stride(-1) == 1


@dataclass(slots=True)
class TensorBinder:
    """Makes structs over tensors.

    Args:
        layout: The KV groups.
        kv_caches: Cache name -> [num_blocks, rows_per_block, width].

    Owns: the fp32 copies of small vectors; keep it as long as the structs.
    """

    layout: CacheLayout
    kv_caches: Mapping[str, torch.Tensor]
    copies: list[torch.Tensor] = field(default_factory=list)

    def matrix(self, weight: torch.Tensor) -> Matrix:
        """Returns [rows, in], or stacked [n, rows, in] as one matrix of n * rows."""
        flat = weight.detach().flatten(0, -2)
        assert flat.data_ptr() == weight.data_ptr(), "stacked matrices lie end to end"
        return Matrix(flat.data_ptr(), None, *flat.shape, flat.stride(0), _KINDS[flat.dtype])

    def mxfp4_matrix(self, codes: torch.Tensor, scales: torch.Tensor) -> Matrix:
        """Returns stacked e2m1 codes [n, rows, groups, G / 2] under scales [n, rows, groups]."""
        num_stacked, rows, num_groups, half = codes.shape
        columns = num_groups * 2 * half
        return Matrix(
            codes.data_ptr(),
            scales.data_ptr(),
            num_stacked * rows,
            columns,
            columns,
            MXFP4,
            2 * half,
        )

    def vector(self, values: torch.Tensor) -> int:
        """Returns the address of the values as contiguous fp32."""
        wide = values.detach().float().contiguous()
        self.copies.append(wide)
        return wide.data_ptr()

    def cache(self, name: str, group: int | None = None) -> Cache:
        """Returns a cache by name, addressed by its group, or by ``group`` if given."""
        view = self.kv_caches[name]
        own_group = self.layout.group_of[name]
        return Cache(
            data=view.data_ptr(),
            num_blocks=view.shape[0],
            block_stride=view.stride(0),
            rows_per_block=view.shape[1],
            width=view.shape[2],
            block_size=self.layout.groups[own_group].block_size,
            group=own_group if group is None else group,
            kind=_KINDS[view.dtype],
        )
